"""The command `hilore`: its subcommands and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit code: 0 for success, 1 where something that is needed is wrong.
    """
    parser = argparse.ArgumentParser(prog="hilore", description="Store or recompute: recovery plans for DeepSpeed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what is installed, what works here, and what is not supported")
    doctor.set_defaults(run=_doctor)
    return int(parser.parse_args(arguments).run())


def _doctor() -> int:
    from ds_hilore.cli.doctor import print_diagnosis

    return 0 if print_diagnosis(Console()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
