#!/usr/bin/env bash
# Makes the environment if there is none and runs the tests on CPU, all of them with a worker per core.
# Arguments go to pytest: launch/test.sh tests/core -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv dev,demo,megatron,mpi,report,triton,trl

# tests/gpu is collected and skipped here; launch/test_gpu.sh runs it.
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Tests of several ranks start one process per core; more threads than cores would only make them wait.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
if [[ $# == 0 ]]; then
    set -- -n logical --maxprocesses 8 --durations=40
fi
exec "$PYTHON" -m pytest -q "$@"
