"""Plans and frontiers made off the critical path: one worker thread, newest result by key."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_hilore.core.errors import UsageError
from ds_hilore.planning.problem import Infeasible

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanningFailure:
    """The worker could not plan for `key`; the job goes on with what it has. `detail` names the exception."""

    key: Hashable
    detail: str


class BackgroundPlanner(Generic[_Task, _Result]):
    """Works in one daemon thread while training goes on.

    Every method returns at once. Of tasks waiting under one key only the newest is done; keys are served in the order
    in which they were first submitted. A failure of the planner is recorded (`failures`) and ends nothing.

    Args:
        planner: what makes a result of a task, for example `partial(refine_apart, limits=...)` a frontier of a
            frontier, or `partial(solve, limits=...)` a plan of a problem. While it works for long it must hold no
            interpreter lock: solvers release it, Python does not (`apart` is the way out).

    A key names what a result depends on (shape class, budget, profile): `best` gives the newest one under it, which
    may have been made for an older task; `check` or `repair` a plan against the problem at hand.
    """

    def __init__(self, planner: Callable[[_Task], _Result | Infeasible]) -> None:
        self._planner = planner
        self._wake = threading.Condition()
        self._waiting: OrderedDict[Hashable, _Task] = OrderedDict()
        self._working = False
        self._closed = False
        self._results: dict[Hashable, _Result | Infeasible] = {}
        self._failures: list[PlanningFailure] = []
        self._thread = threading.Thread(target=self._work, name="hilore-planner", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, task: _Task) -> None:
        """Asks for the result of `task`; a task still waiting under `key` is replaced.

        Raises:
            UsageError: the planner is closed.
        """
        with self._wake:
            if self._closed:
                raise UsageError("this background planner is closed; make a new one")
            self._waiting[key] = task
            self._wake.notify_all()

    def best(self, key: Hashable) -> _Result | None:
        """Gives the newest finished result under `key`, or None while there is none (or none fits)."""
        with self._wake:
            result = self._results.get(key)
        return None if isinstance(result, Infeasible) else result

    def verdict(self, key: Hashable) -> _Result | Infeasible | None:
        """Gives the newest finished result under `key`, "nothing fits" included."""
        with self._wake:
            return self._results.get(key)

    def failures(self) -> tuple[PlanningFailure, ...]:
        """Gives the failures since the last call and forgets them: the caller turns them into events."""
        with self._wake:
            failures = tuple(self._failures)
            self._failures.clear()
        return failures

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is left to solve; False if that took longer. For tests and planning without a run."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._waiting and not self._working, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Drops what waits and joins the thread; what is being solved is finished first (at most the solver's
        time limit). True if the thread ended."""
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._working = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                key, task = self._waiting.popitem(last=False)
                self._working = True
            try:
                result = self._planner(task)
            except Exception as error:  # the job must outlive its planner
                _log.warning("planning for %s failed: %s: %s", key, type(error).__name__, error)
                with self._wake:
                    self._failures.append(PlanningFailure(key, f"{type(error).__name__}: {error}"))
            else:
                with self._wake:
                    self._results[key] = result
