"""`python -m ds_hilore script.py ...`: runs a script that needs no line of ours; its "hilore" block is honoured.

Under the launcher: `deepspeed --module ds_hilore script.py ...`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: python -m ds_hilore script.py [arguments of the script]")
    arguments = sys.argv[1:]
    # the deepspeed launcher puts --local_rank=N before the script's own arguments
    launcher = [argument for argument in arguments if argument.startswith("--local_rank")]
    script = [argument for argument in arguments if not argument.startswith("--local_rank")]
    from ds_hilore.integration.deepspeed_engine import install

    install()
    sys.argv = [script[0], *launcher, *script[1:]]
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
