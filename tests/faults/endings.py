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

from tests.faults.bench import LIMIT_S, Bench, hilore_engine, model, settings
from tests.faults.jobs import tell
from tests.faults.records import FAULTY, NEXT, RIGHT, Plans
from tests.faults.sites import Strike, between, unit_backward, unit_forward, unit_replay

Act = Callable[[], object]


@dataclass(frozen=True)
class Ending:
    """One kind of fault that ends or stops rank 1.

    Args:
        body: what both ranks do.
        code: exit code of rank 1, minus a signal's number; None: it has to be killed, because it was stopped.
        told: what becomes of rank 0: the class of its error.
    """

    name: str
    body: Callable[[Path], None]
    code: int | None
    told: str


@dataclass(frozen=True)
class Meets:
    """A good update, and one in which rank 1 meets its end at a site. Rank 0 tells how it learns of that."""

    site: Any
    end: Act
    stage: int
    before: Act = lambda: None

    def __call__(self, folder: Path) -> None:
        bench = Bench(self.stage)
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

    def __call__(self, folder: Path) -> None:
        if dist.get_rank() == 1:
            self.start()
            os._exit(1)
        tell(folder, _told(lambda: hilore_engine(2)))


def without_a_block() -> None:
    from tests.engines import engine

    engine(model(), settings(2))


def with_a_bad_block() -> None:
    try:
        hilore_engine(2, memory_budgt="1.1x")
    except ValueError:
        return


def not_at_all() -> None:
    time.sleep(2 * LIMIT_S)


ENDINGS: tuple[Ending, ...] = (
    Ending("a rank is killed in a unit's forward", Meets(unit_forward(1), killed, 2), -9, "RankMismatch"),
    Ending("a rank is killed in a unit's backward", Meets(unit_backward(1), killed, 3), -9, "RankMismatch"),
    Ending("a rank is killed between forward and backward", Meets(between(), killed, 0), -9, "RankMismatch"),
    Ending("a rank is terminated in a replay", Meets(unit_replay(1), terminated, 2), -15, "RankMismatch"),
    Ending(
        "a rank leaves its script when it is terminated in a replay",
        Meets(unit_replay(1), terminated, 2, leave_on_sigterm),
        7,
        "RankMismatch",
    ),
    Ending("a rank is stopped", Meets(unit_forward(1), stopped, 2), None, "RankMismatch"),
    Ending("a rank has no more microbatches and ends", Meets(between(), ended, 2), 0, "RankMismatch"),
    Ending("a rank has no block", Starts(without_a_block), 1, "RankMismatch"),
    Ending("a rank has a bad block and ends", Starts(with_a_bad_block), 1, "RankMismatch"),
    Ending("a rank does not start in time", Starts(not_at_all), 1, "RankMismatch"),
)
