"""The command `hilore`: its subcommands and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ds_hilore.cli import plan
from ds_hilore.core.errors import HiLoReError

#: Exit code of a command line, a JSON or a model that is wrong; argparse has the same.
WRONG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit code: 0 for success, 1 where something that is needed is wrong or does not fit, 2 for a request that
        makes no sense; its reason is on stderr.
    """
    parser = argparse.ArgumentParser(prog="hilore", description="Store or recompute: recovery plans for DeepSpeed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what is installed, what works here, and what is not supported")
    doctor.add_argument("--config", type=Path, metavar="DS.json", help="look at this DeepSpeed JSON, too")
    doctor.add_argument("--model", metavar="PATH", help="and at this model: a folder with a config.json, or that file")
    doctor.add_argument("--json", action="store_true", help="for machines: findings of --config and --model only")
    doctor.set_defaults(run=_doctor)
    planning = commands.add_parser("plan", help=plan.HELP)
    plan.add_arguments(planning)
    planning.set_defaults(run=plan.run)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except HiLoReError as error:
        Console(stderr=True).print(f"hilore: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return WRONG


def _doctor(arguments: argparse.Namespace) -> int:
    from ds_hilore.cli import doctor

    return doctor.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
