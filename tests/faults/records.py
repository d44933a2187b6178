"""A fault of the suite, as data: what is planted, where and on which ranks, and what must become of the update.

Whatever it is, three things hold after it: no rank hangs, no gradient is silently wrong, and the next update is right
on every rank, by the gradients of DeepSpeed without checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tests.faults.bench import Bench
    from tests.faults.sites import Strike

#: What becomes of an update: this, or the class of the error that it ended in.
RIGHT = "right"

#: Gradients by name: those that were found, and those that are right.
Gradients = dict[str, Tensor]
Pair = tuple[Gradients, Gradients]

Site = Callable[["Bench", "Strike"], AbstractContextManager[object]]


class Planted(Exception):
    """Stands for any exception of the user's own, or of a bug. It must reach the caller as it is."""


class Place(Enum):
    """Parts of the suite, by the headings of its table."""

    MICROBATCH = "Exceptions in an update"
    MEMORY = "Memory that runs out"
    NUMBERS = "Numbers that are none"
    BETWEEN = "What a host does in between"
    ENGINES = "Engines that come and go"
    PLANNING = "Planning and measuring"
    FILES = "Stored profiles"
    RANKS = "Ranks that differ"
    REFUSED = "Refused features"
    PROCESSES = "Processes that end"


class Plans(Enum):
    """What units do while the fault strikes."""

    MIXED = "stored and replayed in turn, on each rank the other way round"
    STORE = "all stored"
    REPLAY = "all replayed"
    COMPRESS = "MLP and residual state of all units in bf16"


def planted() -> BaseException:
    return Planted("planted by the fault suite")


def update(bench: Bench) -> Pair:
    """One update of the fault's own data."""
    return bench.update(FAULTY), bench.expected(FAULTY)


def nowhere(bench: Bench, strike: Strike) -> AbstractContextManager[object]:
    """Of faults that lie in what is done."""
    strike.count += 1
    return nullcontext()


#: Numbers of updates, which stand for their data: the one that the fault strikes, and the next one.
FAULTY, NEXT = 3, 4


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Args:
        name: what happens, in a few words; unique.
        site: where `error` strikes.
        run: what is done; gradients that were found, and those that are right.
        error: what is raised there.
        times: how often.
        at: the microbatch of the update, of two.
        stages: of ZeRO; by default the one that has most to lose, where nothing depends on it.
        ranks: those that it strikes.
        outside: the error comes out of the caller's code, not out of the engine: the caller has the update restarted.
        becomes: of the update on these: RIGHT or the class of an error.
        others: of the update on the others.
        thorough: a variation of another fault, tried by `python -m tests.faults` and not in CI.
        open: what happens instead, where that is a known bug: "a hang: ...", "a wrong gradient: ...", or an error.
    """

    name: str
    place: Place
    site: Site = nowhere
    run: Callable[[Bench], Pair] = update
    error: Callable[[], BaseException] = planted
    times: int = 1
    at: int = 1
    plan: Plans = Plans.MIXED
    stages: tuple[int, ...] = (3,)
    ranks: tuple[int, ...] = (0, 1)
    outside: bool = False
    becomes: str = RIGHT
    others: str = RIGHT
    thorough: bool = False
    open: str = ""

    def expected(self, rank: int) -> str:
        return self.becomes if rank in self.ranks else self.others


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one fault under one ZeRO stage.

    Args:
        first: what became of the update: RIGHT, "wrong ..." or the class of an error.
        later: the same of the next update, until it was right: errors before it are those of ranks that learn late.
        said: the message of the error.
        struck: how often the fault struck here.
        seconds: until the outcome was there.
    """

    rank: int
    stage: int
    first: str
    later: tuple[str, ...]
    said: str
    struck: int
    seconds: float
