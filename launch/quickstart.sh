#!/usr/bin/env bash
# From nothing to the demo: makes the environment, installs, and trains SmolLM2-135M on arithmetic with GRPO on two
# ranks with different memory budgets. Arguments go to examples/grpo_arithmetic.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv demo

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if ! "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for 2)}"
fi
exec deepspeed --num_gpus 2 examples/grpo_arithmetic.py --deepspeed_config configs/zero2_exact.json "$@"
