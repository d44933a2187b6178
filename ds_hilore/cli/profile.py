"""`hilore profile`: bytes and seconds of the user's units, measured on this machine and stored for the runs to come."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds_hilore.cli.account import gigabytes
from ds_hilore.cli.options import add_rehearsal, read_json, subject_of
from ds_hilore.cli.rehearse import rehearse
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UsageError

if TYPE_CHECKING:
    from ds_hilore.integration.rehearsal import Rehearsal

HELP = "measures bytes and seconds of your model's units on this machine, and stores them for your runs"
EPILOG = """\
examples:
  hilore profile --config ds.json --model ./Llama-3.1-8B --tokens 4 4096
  hilore profile --config ds.json --model ./Qwen2.5-3B --tokens 8 2048 --lora-rank 32 --lora-targets q_proj v_proj
  hilore profile --config ds.json --model . --tokens 4 4096 --json | jq '.units[] | .variant, .held_bytes'
  deepspeed --num_gpus 8 --module ds_hilore.cli.main profile --config ds.json --model . --tokens 4 4096

It runs as many updates as a run needs to learn what its units cost (ten to twenty), on random tokens, with a learning
rate of 0. The profile goes where "profile": {"path": ...} of the JSON's "hilore" block says. A run takes it over if
model, adapters, dtypes, ZeRO stage, number of ranks, device and versions are the same.

exit codes: 0 measured (and stored, where there is a path); 1 measured, and could not be stored; 2 the command line, the
JSON or the model is wrong; 3 the updates failed.
"""

#: Columns of the table where nobody says how many there are.
_WIDTH = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_rehearsal(parser)


@dataclass(frozen=True)
class Measured:
    """A variant of a class of units, for one of its units and the microbatch that was asked for.

    Args:
        count: units of the class.
        held_bytes: from the end of its forward to its backward.
        workspace_bytes: more, while its backward runs.
        replay_seconds: of one replay of the unit.
        saved_seconds: against R, in forward and backward together; what encoding costs is taken off.
    """

    unit_class: str
    count: int
    variant: str
    held_bytes: int
    workspace_bytes: int
    replay_seconds: float
    saved_seconds: float


def run(arguments: argparse.Namespace) -> int:
    """Measures, stores, prints; gives the exit code.

    Raises:
        HiLoReError: the request is wrong, or the updates failed.
    """
    ds = read_json(arguments.config)
    config = HiLoReConfig.from_ds_json(ds) or HiLoReConfig()
    with contextlib.redirect_stdout(sys.stderr):
        from ds_hilore.profiling.store import folder_of

        folder = folder_of(config.profile.path)
        subject = subject_of(arguments, ds)
        with _fresh(folder) as fresh:
            rehearsal = rehearse(replace(subject, profile_folder=fresh))
            rehearsal.meet()
            stored = _put(fresh, folder)
    if not rehearsal.leads:
        return 0
    found = measured(rehearsal)
    if arguments.json:
        print(json.dumps(as_json(found, rehearsal, stored), indent=1))
    else:
        console = Console()
        show(console if console.is_terminal else Console(width=_WIDTH), found, rehearsal)
        console.print(_whereabouts(folder, stored), markup=False, highlight=False, soft_wrap=True)
    return int(folder is not None and not stored)


# -- where it goes -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fresh(folder: Path | None) -> Iterator[Path | None]:
    """An empty folder within: what is there already is measured anew, and kept until that is done.

    All ranks of a launcher name the same one, which the first of each machine makes and takes away.
    """
    if folder is None:
        yield None
        return
    fresh = folder / f".measuring-{os.environ.get('MASTER_PORT', os.getpid())}"
    try:
        if _is_first():
            shutil.rmtree(fresh, ignore_errors=True)  # of a run that was ended
        fresh.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"profile.path {folder}: {error.strerror}; name a folder that can be written to") from None
    try:
        yield fresh
    finally:
        if _is_first():
            shutil.rmtree(fresh, ignore_errors=True)


def _is_first() -> bool:
    """Of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _put(fresh: Path | None, folder: Path | None) -> list[Path]:
    """Moves what all ranks of this machine have measured to its place."""
    if fresh is None or folder is None or not _is_first():
        return []
    found = sorted(fresh.glob("*.json"))
    for file in found:
        os.replace(file, folder / file.name)
    return [folder / file.name for file in found]


def _whereabouts(folder: Path | None, stored: Sequence[Path]) -> str:
    if stored:
        return "stored: " + ", ".join(map(str, stored))
    if folder is None:
        return 'not stored: add "profile": {"path": "auto"} to the "hilore" block, and runs need not measure it again'
    return f"not stored: nothing could be written to {folder}; see the warning above"


# -- what was found ------------------------------------------------------------------------------------------------


def measured(rehearsal: Rehearsal) -> list[Measured]:
    """Of each class of units, what every variant takes, as plans count with it."""
    measurements = rehearsal.hilore.measurements
    counts = Counter(name for _, name in measurements.roster)
    found: dict[tuple[str, str], Measured] = {}
    for profile in measurements.profiles(rehearsal.shape):
        shape = measurements.relations[profile.unit].apply(rehearsal.shape)
        replay_s = measurements.replay_seconds(profile.unit_class, shape) or 0.0
        for variant in profile.variants:
            bytes_ = variant.held_bytes, variant.workspace_bytes
            seconds = replay_s, variant.saved_seconds - variant.prepare_seconds
            row = Measured(profile.unit_class, counts[profile.unit_class], variant.name, *bytes_, *seconds)
            found.setdefault((profile.unit_class, variant.name), row)
    return list(found.values())


def as_json(found: Sequence[Measured], rehearsal: Rehearsal, stored: Sequence[Path]) -> dict[str, Any]:
    """Plain data: bytes and seconds."""
    learning = rehearsal.hilore.learning
    struck = learning.measurements.struck.items()
    return {
        "update": rehearsal.as_json(),
        "replayed_peak_bytes": learning.baseline.result().peak_bytes,
        "budget_bytes": rehearsal.hilore.budget_bytes,
        "update_seconds": learning.update_seconds,
        "units": [asdict(row) for row in found],
        "struck_out": [{"unit_class": name, "variant": way, "reason": why} for (name, way), why in struck],
        "prize": None if learning.prize is None else learning.prize.as_json(),
        "stored": [str(path) for path in stored],
        "notes": list(rehearsal.notes),
    }


def show(console: Console, found: Sequence[Measured], rehearsal: Rehearsal) -> None:
    """For people."""
    learning = rehearsal.hilore.learning
    table = Table(title=f"one unit, {rehearsal.shape} tokens", caption="R: replayed; H: stored; L: compressed")
    for name in ("units", "variant"):
        table.add_column(name, no_wrap=True)
    for name in ("held", "more in backward", "a replay takes, s", "saved against R, s"):
        table.add_column(name, justify="right")
    for row in found:
        sizes = gigabytes(row.held_bytes), gigabytes(row.workspace_bytes)
        table.add_row(
            f"{row.count} {row.unit_class}",
            row.variant,
            *sizes,
            f"{row.replay_seconds:.3g}",
            f"{row.saved_seconds:.3g}",
        )
    console.print(f"[bold]{rehearsal}[/]", highlight=False)
    console.print(table)
    for (name, way), why in learning.measurements.struck.items():
        console.print(f"struck out: {name} {way}: {why}", markup=False, highlight=False)
    for line in (*(learning.prize.lines() if learning.prize else ()), *rehearsal.notes):
        console.print(f"- {line}", style="dim", markup=False, highlight=False)
