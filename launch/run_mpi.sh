#!/usr/bin/env bash
# Runs a training script under mpirun (Open MPI, MPICH or Intel MPI) with the "hilore" block of its DeepSpeed JSON in
# force; the script itself needs no change. DeepSpeed asks MPI, by mpi4py, for ranks and addresses.
#
#   launch/run_mpi.sh train.py --deepspeed ds.json ...
#
#   RANKS      processes in all (default: this node's CUDA devices, or 2 on CPU)
#   HOSTFILE   several nodes: a host file of the MPI at hand (Open MPI: lines "hostname slots=N"); the environment and
#              the script must be at the same paths on all of them
#   MPI_FLAGS  more options for mpirun, for example "--mca btl_tcp_if_include eth0"
set -euo pipefail
source_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[[ $# -gt 0 ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 2; }
command -v mpirun >/dev/null || { echo "no mpirun on the path; Debian: apt-get install openmpi-bin" >&2; exit 127; }
start_dir="$PWD"
source "$source_dir/venv.sh"
prepare_venv demo,mpi
cd "$start_dir"

choose_ranks
if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for "$RANKS")}"
fi

# What every rank must see. Open MPI hands variables to other nodes only by name.
forwarded=(PATH PYTHONPATH DS_ACCELERATOR OMP_NUM_THREADS HF_HUB_OFFLINE TOKENIZERS_PARALLELISM)
options=(-np "$RANKS")
if mpirun --version 2>/dev/null | grep -q "Open MPI"; then
    for name in "${forwarded[@]}"; do
        [[ -z "${!name:-}" ]] || options+=(-x "$name")
    done
    [[ -z "${HOSTFILE:-}" ]] || options+=(--hostfile "$HOSTFILE")
    # On CPU, ranks may be more than cores; a rank bound to one core could use no threads.
    [[ "${DS_ACCELERATOR:-}" != cpu ]] || options+=(--oversubscribe)
    options+=(--bind-to none)
    [[ "$(id -u)" -ne 0 ]] || options+=(--allow-run-as-root)
else
    [[ -z "${HOSTFILE:-}" ]] || options+=(-f "$HOSTFILE")
fi
# shellcheck disable=SC2086  # MPI_FLAGS is a list of words
exec mpirun "${options[@]}" ${MPI_FLAGS:-} "$PYTHON" -m ds_hilore "$@"
