"""`hilore report`: a page with pictures of a run, from the logs that its ranks wrote."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from ds_hilore.core import deps

HELP = "a page with pictures of a run, from the logs of its ranks"
EPILOG = """\
examples:
  hilore report runs/first
  hilore report runs/first --out /tmp/first.html
  hilore report runs/first --json | jq .saved_share

RUN_DIR is the folder that "report": {"path": RUN_DIR} in the hilore block named. A run that is still going on can be
looked at, too. The page is one file that loads nothing; its pictures lie beside it as PNG.

exit codes: 0 written; 2 there is no log to be read, or the page cannot be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the folder with the logs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default RUN_DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="for machines: the run's figures, and no page")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, or prints the figures; 0.

    Raises:
        DependencyMissing: matplotlib is not installed.
        UsageError: there is nothing to read, or no place to write to.
    """
    from ds_hilore.report.publish import publish
    from ds_hilore.report.reading import read_run
    from ds_hilore.report.summary import summarise

    if not arguments.json:
        deps.require("matplotlib")
    columns = SpinnerColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(f"reading {arguments.folder}")
        read = read_run(
            arguments.folder,
            lambda done, whole: shown.update(task, description=f"reading the logs: {done / max(1, whole):.0%}"),
        )
        summary = summarise(read)
        if arguments.json:
            print(json.dumps(summary.as_json(), indent=1))
            return 0
        out = arguments.out or arguments.folder / "report.html"
        written = publish(read, summary, out, lambda name: shown.update(task, description=f"drawing: {name}"))
    console = Console()
    for line in (summary.sentence, f"{written[0]} and {len(written) - 1} pictures in {written[0].stem}-pictures/"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
