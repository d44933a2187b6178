"""The command `hilore`: its subcommands, and the exit codes that all of them have in common."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType

from rich.console import Console

from ds_hilore.cli import bench, doctor, plan, profile, report, summary
from ds_hilore.core.errors import HiLoReError

#: Exit code of a command line, a JSON or a model that is wrong; argparse has the same.
WRONG = 2
#: Exit code of a run that was begun and failed: memory ran out, a rank did not answer, state could not be recovered.
FAILED = 3
#: As shells have it for a command that was ended by Ctrl-C.
INTERRUPTED = 130

DESCRIPTION = """\
Store or recompute: recovery plans for DeepSpeed. Without a command: what is installed here, what the DeepSpeed JSON and
the model in this folder could save, and what to type next."""
EPILOG = """\
examples:
  hilore
  hilore plan --config ds.json --model ./Llama-3.1-8B --tokens 4 4096 --world 8
  hilore doctor --config ds.json --model ./Llama-3.1-8B --script train.py
  hilore bench --config ds.json --model ./Llama-3.1-8B --tokens 4 4096
  hilore COMMAND --help

exit codes, of all commands: 0 yes; 1 no (something is wrong, does not fit, or does not pay); 2 the request is wrong,
and stderr says how; 3 a run was begun and failed.
"""

#: Each has HELP, EPILOG, `add_arguments(parser)` and `run(arguments)`, which gives the exit code.
COMMANDS: Mapping[str, ModuleType] = {
    "doctor": doctor,
    "plan": plan,
    "profile": profile,
    "bench": bench,
    "report": report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit code: 0 for success, 1 where something that is needed is wrong, does not fit or does not pay, 2 for a
        request that makes no sense, 3 for a run that failed; the reason of 2 and 3 is on stderr.
    """
    parsed = _parser().parse_args(_own(sys.argv[1:] if arguments is None else arguments))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # hosts' to their own developers
            return int(parsed.run(parsed))
    except HiLoReError as error:
        return reported(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def reported(error: HiLoReError) -> int:
    """Says an error on stderr; gives its exit code."""
    Console(stderr=True).print(f"hilore: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return FAILED if isinstance(error, RuntimeError) else WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hilore", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="for machines: the summary as one object")
    parser.set_defaults(run=summary.run)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _own(arguments: Sequence[str]) -> list[str]:
    """Without what DeepSpeed's launcher puts in front."""
    return [argument for argument in arguments if not argument.startswith("--local_rank")]


if __name__ == "__main__":
    raise SystemExit(main())
