#!/usr/bin/env bash
# Runs the tests that need a CUDA device. Arguments go to pytest. On a machine whose Python has torch with CUDA and the
# other packages already: HILORE_VENV=none launch/test_gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv dev

export DS_ACCELERATOR=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "this torch sees no CUDA device, so every test of tests/gpu will be skipped" >&2
    export DS_ACCELERATOR=cpu
fi
exec "$PYTHON" -m pytest -q tests/gpu "$@"
