#!/usr/bin/env bash
# Runs a training script under the deepspeed launcher with the "hilore" block of its DeepSpeed JSON in force; the script
# itself needs no change.
#
#   launch/run_deepspeed.sh train.py --deepspeed ds.json ...
#
#   RANKS        processes on this node, or on every node (default: the slots of HOSTFILE; without one, this node's CUDA
#                devices, or 2 on CPU)
#   HOSTFILE     several nodes: file with lines "hostname slots=N"; started over ssh from one node
#   NODE_RANK    several nodes without ssh: run the same command on every node with HOSTFILE, MASTER_ADDR (the first
#                node) and the node's line in HOSTFILE, counted from 0
#   MASTER_PORT  port of rank 0 (default: 29500)
set -euo pipefail
source_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[[ $# -gt 0 ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 2; }
start_dir="$PWD"
source "$source_dir/venv.sh"
prepare_venv demo
cd "$start_dir"

choose_accelerator
if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
    if [[ -n "${HOSTFILE:-}" ]]; then
        slots="$(sed -n 's/.*slots=\([0-9]*\).*/\1/p' "$HOSTFILE" | sort -n | tail -n 1)"
    else
        RANKS="${RANKS:-2}"
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for "${RANKS:-${slots:-1}}")}"
fi

options=(--master_port "${MASTER_PORT:-29500}")
[[ -z "${HOSTFILE:-}" ]] || options+=(--hostfile "$HOSTFILE")
if [[ -n "${NODE_RANK:-}" ]]; then
    : "${HOSTFILE:?NODE_RANK needs HOSTFILE}" "${MASTER_ADDR:?NODE_RANK needs MASTER_ADDR, the node of rank 0}"
    options+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR")
fi
[[ -z "${RANKS:-}" ]] || options+=(--num_gpus "$RANKS")
exec deepspeed "${options[@]}" --module ds_hilore "$@"
