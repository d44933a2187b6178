"""Processes that end, stop or never start in the middle of a job: the others must not wait for them for ever."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults.bench import Bench, hilore_engine, model, settings
from tests.faults.jobs import run_job, tell
from tests.faults.kinds.microbatch import STEP
from tests.faults.records import FAULTY, NEXT, RIGHT, Plans, planted
from tests.faults.sites import Strike, between, calls, unit_backward, unit_forward, unit_replay

#: Of the control plane, which is what the rank that is left waits for here.
LIMIT_S = 3.0

Act = Callable[[], object]


@dataclass(frozen=True)
class Ending:
    """One kind of fault that ends or stops rank 1.

    Args:
        body: what both ranks do, with a folder.
        code: exit code of rank 1, minus a signal's number; None: it has to be killed, because it was stopped.
        thorough: as of a fault.
        told: what becomes of rank 0: the class of its error. A collective whose partner is gone ends in a RuntimeError
            of torch's.
    """

    name: str
    body: Meets | Raises | Starts
    code: int | None
    told: str
    thorough: bool = False

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return self.body.stage


@dataclass(frozen=True)
class Meets:
    """A good update, and one in which rank 1 meets its end at a site. Rank 0 tells how it learns of that."""

    site: Any
    end: Act
    stage: int
    before: Act = lambda: None

    def __call__(self, folder: Path) -> None:
        bench = Bench(self.stage, LIMIT_S)
        bench.begin(Plans.REPLAY)
        bench.update(NEXT)
        self.before()
        struck = dist.get_rank() == 1

        def meet() -> BaseException:
            self.end()
            return SystemExit(0)

        with self.site(bench, Strike(bench, meet, 1, int(struck))):
            told = _told(lambda: bench.update(FAULTY))
        if told == RIGHT:  # what the other did not need to take part in
            told = _told(lambda: bench.update(NEXT))
        tell(folder, told)


def _told(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return RIGHT


@dataclass(frozen=True)
class Raises:
    """Rank 1 raises where rank 0 waits for it in a collective, or has stepped: the update cannot begin again on both.
    Rank 1 tries to go on, is told at the time limit, and ends as a script does that nobody catches an error of."""

    site: Any
    stage: int

    def __call__(self, folder: Path) -> None:
        bench = Bench(self.stage, LIMIT_S)
        bench.begin(Plans.REPLAY)
        bench.update(NEXT)
        with self.site(bench, Strike(bench, planted, 1, int(dist.get_rank() == 1))):
            told = _told(lambda: bench.update(FAULTY))
        if dist.get_rank() == 1:
            assert told == "Planted"
            os._exit(1 if _told(lambda: bench.update(FAULTY)) == "RankMismatch" else 2)
        tell(folder, told if told != RIGHT else _told(lambda: bench.update(NEXT)))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)  # Python's own handlers run between two of its operations


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def ended() -> None:
    os._exit(0)


def leave_on_sigterm() -> None:
    """As launchers and schedulers advise: a handler that ends the script."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))


@dataclass(frozen=True)
class Starts:
    """Rank 1 does not start as rank 0 does."""

    start: Callable[[], object]
    stage: int = 2

    def __call__(self, folder: Path) -> None:
        if dist.get_rank() == 1:
            self.start()
            os._exit(1)
        tell(folder, _told(lambda: hilore_engine(self.stage, limit_s=LIMIT_S)))


def without_a_block() -> None:
    from tests.engines import engine

    engine(model(), settings(2))


def with_a_bad_block() -> None:
    try:
        hilore_engine(2, limit_s=LIMIT_S, memory_budgt="1.1x")
    except ValueError:
        return


def not_at_all() -> None:
    time.sleep(LIMIT_S + 2.0)


ENDINGS: tuple[Ending, ...] = (
    Ending("a rank is killed in a unit's forward", Meets(unit_forward(1), killed, 2), -9, "RankMismatch"),
    Ending("a rank is killed in a unit's backward", Meets(unit_backward(1), killed, 3), -9, "RuntimeError"),
    Ending("a rank is killed between forward and backward", Meets(between(), killed, 0), -9, "RankMismatch"),
    Ending("a rank is terminated in a replay", Meets(unit_replay(1), terminated, 2), -15, "RuntimeError"),
    Ending(
        "a rank leaves its script when it is terminated in a replay",
        Meets(unit_replay(1), terminated, 2, leave_on_sigterm),
        7,
        "RuntimeError",
        thorough=True,
    ),
    Ending("an exception in a backward of ZeRO-2, on one rank", Raises(unit_backward(2), 2), 1, "RuntimeError"),
    Ending("an exception in a backward of ZeRO-3, on one rank", Raises(unit_backward(2), 3), 1, "RuntimeError"),
    Ending("an exception in the optimizer of ZeRO-0, on one rank", Raises(calls(STEP), 0), 1, "RankMismatch"),
    Ending("an exception in the optimizer of ZeRO-2, on one rank", Raises(calls(STEP), 2), 1, "RuntimeError"),
    Ending("a rank is stopped", Meets(unit_forward(1), stopped, 2), None, "RankMismatch"),
    Ending("a rank has no more microbatches and ends", Meets(between(), ended, 2), 0, "RankMismatch"),
    Ending("a rank has no block", Starts(without_a_block), 1, "RankMismatch"),
    Ending("a rank has a bad block and ends", Starts(with_a_bad_block), 1, "RankMismatch", thorough=True),
    Ending("a rank does not start in time", Starts(not_at_all), 1, "RankMismatch", thorough=True),
)
BY_NAME: dict[str, Ending] = {ending.name: ending for ending in ENDINGS}


def complaints(ending: Ending, limit_s: float) -> list[str]:
    """Tries it on two new ranks: what is not as the suite says; empty where rank 0 was told, and rank 1 ended so."""
    first, second = run_job(ending.name, limit_s)
    found = []
    if (first.code, first.told) != (0, ending.told):
        found.append(f"rank 0 should be told by {ending.told}: {first}")
    if second.code != ending.code:
        found.append(f"rank 1 should end with {ending.code}: {second}")
    return found
