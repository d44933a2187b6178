"""The processes behind `hilore bench`: one takes peaks, one takes times.

    python -m ds_hilore.cli.bench_process peaks SPEC OUT    started with malloc variables (memory/glibc.py)
    python -m ds_hilore.cli.bench_process times SPEC OUT    started without

The variables make physical peaks on CPU mean something, and slow memory-heavy updates down (design fact 20).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from ds_hilore.cli.options import read_json, subject_of
from ds_hilore.cli.rehearse import rehearse
from ds_hilore.cli.statistics import in_turns
from ds_hilore.core.errors import HiLoReError, MemoryExhausted

if TYPE_CHECKING:
    from ds_hilore.integration.rehearsal import Rehearsal

#: Updates that let small allocations find their places before peaks are read, and updates of which the highest counts.
WARM, REFERENCES = 2, 3


class Way(Enum):
    """How an update recovers the saved state of its layers."""

    NONE = "no checkpointing"
    CHECKPOINTING = "your checkpointing"
    HILORE = "hilore"


#: Checkpoint functions that a host may have.
CHECKPOINTING = ("torch", "deepspeed")


def take(what: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peaks, or times, as plain data: bytes, seconds."""
    rehearsal = rehearse(subject_of(arguments, read_json(arguments.config)))
    function = _checkpoint_function(arguments.checkpointing)
    runs = {way: partial(_run, rehearsal, way, function) for way in Way}
    if what == "peaks":
        return _peaks(rehearsal, runs)
    return _times(rehearsal, runs, arguments.turns)


def _peaks(rehearsal: Rehearsal, runs: Mapping[Way, Callable[[], float]]) -> dict[str, Any]:
    hilore = rehearsal.hilore
    found: dict[str, int | None] = {}
    for way in track(Way, "peaks", console=Console(stderr=True)):
        found[way.value] = _peak(rehearsal, runs[way])
    return {
        "peaks": found,
        "budget_bytes": hilore.budget_bytes,
        "wander_bytes": hilore.parts.meter.wander_bytes,
        "foreseen_bytes": hilore.plan.peak_bytes,
    }


def _peak(rehearsal: Rehearsal, run: Callable[[], float]) -> int | None:
    """The highest of several updates. None: it does not fit."""
    meter = rehearsal.hilore.parts.meter
    highest = 0
    for turn in range(WARM + REFERENCES):
        meter.settle()
        meter.reset()
        if not _fits(run):
            return None
        highest = highest if turn < WARM else max(highest, meter.peak_bytes())
    return highest


def _times(rehearsal: Rehearsal, runs: Mapping[Way, Callable[[], float]], turns: int) -> dict[str, Any]:
    ways = [way for way in Way if _fits(runs[way])]
    seconds = in_turns(ways, turns, lambda way: runs[way](), Console(stderr=True))
    rehearsal.update()  # what is said of the plan is said of ours
    actions = Counter(treatment.name for treatment in rehearsal.hilore.microbatch.treated.values())
    return {
        "seconds": {way.value: taken for way, taken in seconds.items()},
        "actions": dict(actions),
        "update": rehearsal.as_json(),
        "said": str(rehearsal),
        "notes": list(rehearsal.notes),
    }


def _fits(run: Callable[[], float]) -> bool:
    """Whether an update has the memory that it needs; runs one."""
    import torch

    try:
        run()
    except (torch.OutOfMemoryError, MemoryExhausted):
        return False
    return True


def _run(rehearsal: Rehearsal, way: Way, function: Callable[..., Any]) -> float:
    with _recovering(rehearsal, way, function):
        return rehearsal.update()


@contextlib.contextmanager
def _recovering(rehearsal: Rehearsal, way: Way, function: Callable[..., Any]) -> Iterator[None]:
    hilore = rehearsal.hilore
    if way is Way.NONE:
        with hilore.paused():
            yield
    elif way is Way.CHECKPOINTING:
        with hilore.host_checkpointing(function):
            yield
    else:
        yield


def _checkpoint_function(kind: str) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    from ds_hilore.integration.checkpoint import deepspeed_checkpoint

    return deepspeed_checkpoint() if kind == "deepspeed" else partial(checkpoint, use_reentrant=False)


def written(arguments: argparse.Namespace) -> str:
    """The options of the command, for another process."""
    plain = {name: value for name, value in vars(arguments).items() if name != "run"}
    return json.dumps({**plain, "config": str(arguments.config)})


def read(text: str) -> argparse.Namespace:
    """What `written` wrote."""
    found = json.loads(text)
    return argparse.Namespace(**{**found, "config": Path(found["config"])})


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as of `hilore`; 2 and 3 have their reason on stderr."""
    from ds_hilore.cli.main import INTERRUPTED, reported

    what, spec, out = sys.argv[1:] if arguments is None else arguments
    try:
        found = take(what, read(Path(spec).read_text(encoding="utf-8")))
    except HiLoReError as error:
        return reported(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
