"""A rehearsal that has learnt what its units cost, with progress for people and errors that say what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from ds_hilore.core.errors import MemoryExhausted

if TYPE_CHECKING:
    from ds_hilore.integration.rehearsal import Rehearsal, Subject

#: As long as a solve may take, and more.
SOLVED_S = 60.0


def rehearse(subject: Subject) -> Rehearsal:
    """Makes the engine and runs updates until plans are followed, and waits until those are solved.

    Raises:
        HiLoReError: the JSON or the model cannot be had here; `MemoryExhausted`: they do not fit.
    """
    from ds_hilore.integration.rehearsal import Rehearsal, quieten_hosts

    quieten_hosts()
    console = Console(stderr=True)
    reads = "reading the weights" if subject.has_weights else "making random weights"
    with explained_shortage(), contextlib.redirect_stdout(sys.stderr):
        with console.status(f"{reads}, making the engine"):
            rehearsal = Rehearsal(subject)
        with console.status("learning what the units cost") as status:
            for number, stage in enumerate(rehearsal.learn(), 1):
                status.update(f"learning what the units cost: update {number}, {stage.value.replace('_', ' ')}")
            status.update("waiting for the solver")
            rehearsal.hilore.parts.planner.wait(timeout_s=SOLVED_S)
    return rehearsal


@contextlib.contextmanager
def explained_shortage() -> Iterator[None]:
    """A failed allocation inside says what to do.

    Raises:
        MemoryExhausted: in its place.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryExhausted) as error:
        raise MemoryExhausted(
            f"one microbatch does not fit on this device, with every unit replayed: {str(error).splitlines()[0]} "
            "Give smaller --tokens, use ZeRO-3 or offload in the JSON, or ask `hilore plan` what is in the way"
        ) from error
