#!/usr/bin/env bash
# Runs a training script under Slurm, one task per device, with the "hilore" block of its DeepSpeed JSON in force; the
# script itself needs no change. Submit it, or run it inside an allocation:
#
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 launch/run_slurm.sh train.py --deepspeed ds.json ...
#   salloc --ntasks 2 launch/run_slurm.sh train.py --deepspeed ds.json ...
#
#   HILORE_DIR   the checkout (default: where this script is; sbatch runs a copy from elsewhere, so it looks in the
#                folder that it was submitted from)
#   MASTER_PORT  port of rank 0 (default: made from the job's number)
#   SRUN_FLAGS   more options for srun; with "--mpi=pmix" the control plane runs on MPI
set -euo pipefail
[[ $# -gt 0 ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 2; }
: "${SLURM_JOB_ID:?run this inside an allocation: sbatch or salloc (see the head of this script)}"
checkout="${HILORE_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
[[ -e "$checkout/launch/venv.sh" ]] || checkout="${SLURM_SUBMIT_DIR:-$PWD}"
[[ -e "$checkout/launch/venv.sh" ]] || { echo "the checkout is not found: set HILORE_DIR" >&2; exit 2; }
start_dir="$PWD"
source "$checkout/launch/venv.sh"
prepare_venv demo
cd "$start_dir"

MASTER_ADDR="$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | head -n 1)"
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
choose_accelerator
if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
fi

# Slurm numbers the tasks; torch and DeepSpeed read the names on the left.
task='export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"; exec "$@"'
# shellcheck disable=SC2086  # SRUN_FLAGS is a list of words
exec srun ${SRUN_FLAGS:-} bash -c "$task" task "$PYTHON" -m ds_hilore "$@"
