#!/usr/bin/env bash
# Runs the tests that need a CUDA device, and then the update-step benchmark at Qwen2.5-3B's shape (HILORE_BENCHMARK=0
# leaves it out). Arguments go to pytest. On a machine whose Python has torch with CUDA and the other packages already:
# HILORE_VENV=none launch/test_gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv dev

export DS_ACCELERATOR=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "this torch sees no CUDA device, so every test of tests/gpu will be skipped, and the benchmark too" >&2
    export DS_ACCELERATOR=cpu HILORE_BENCHMARK=0
fi
"$PYTHON" -m pytest -q tests/gpu "$@"
if [[ "${HILORE_BENCHMARK:-1}" != 0 ]]; then
    # where a caller collects files (a lent machine's OUT), the records go there
    "$PYTHON" -m benchmarks.update_step --preset gpu --json "${OUT:-.}/update_step_gpu.json"
fi
