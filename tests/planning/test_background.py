"""The worker: never in the way, newest problem first served, failures told and survived."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Plan
from ds_hilore.planning.background import BackgroundPlanner, PlanningFailure
from ds_hilore.planning.frontier import Frontier, first_frontier
from ds_hilore.planning.greedy import greedy
from ds_hilore.planning.problem import Infeasible, Problem
from ds_hilore.planning.program import SolverLimits, solve
from ds_hilore.planning.refine import refine, refine_apart
from tests.planning.planning_problems import decoder

LONG_S = 30.0


class Gate:
    """A planner that waits until the test opens it, and notes what it was given."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.started = threading.Event()
        self.seen: list[Problem] = []

    def __call__(self, problem: Problem) -> Plan | Infeasible:
        self.seen.append(problem)
        self.started.set()
        assert self.open.wait(LONG_S)
        return greedy(problem)


def test_solves_with_the_programme() -> None:
    planner = BackgroundPlanner(solve)
    problem = decoder(12, 3, risk_budget=0.01)
    planner.submit("shape", problem)
    assert planner.wait(LONG_S)
    assert planner.best("shape") == solve(problem)
    assert planner.best("other shape") is None
    assert planner.close(LONG_S)


def test_makes_frontiers_of_frontiers_in_a_process_of_its_own() -> None:
    first = first_frontier(decoder(12, 3, risk_budget=0.01))
    assert isinstance(first, Frontier)
    planner = BackgroundPlanner(refine_apart)
    planner.submit("shape", first)
    assert planner.wait(LONG_S)
    assert planner.best("shape") == refine(first)
    assert planner.failures() == ()
    assert planner.close(LONG_S)


def test_nothing_waits_for_the_worker() -> None:
    gate = Gate()
    planner = BackgroundPlanner(gate)
    problem = decoder(4)
    planner.submit("a", problem)
    assert gate.started.wait(LONG_S)
    planner.submit("b", problem)  # all of these return while the worker is stuck in "a"
    assert planner.best("a") is None
    assert planner.failures() == ()
    assert not planner.wait(0.01)
    gate.open.set()
    assert planner.wait(LONG_S)
    assert planner.best("a") == planner.best("b") == greedy(problem)
    assert planner.close(LONG_S)


def test_of_waiting_problems_only_the_newest_is_solved() -> None:
    gate = Gate()
    planner = BackgroundPlanner(gate)
    first, second, third = (decoder(4, share=share) for share in (0.1, 0.5, 0.9))
    planner.submit("key", first)
    assert gate.started.wait(LONG_S)
    planner.submit("key", second)
    planner.submit("key", third)
    gate.open.set()
    assert planner.wait(LONG_S)
    assert gate.seen == [first, third]
    assert planner.best("key") == greedy(third)
    assert planner.close(LONG_S)


def test_failures_are_told_once_and_end_nothing() -> None:
    def fails(problem: Problem) -> Plan | Infeasible:
        if len(problem.units) == 2:
            raise ZeroDivisionError("no units per second")
        return greedy(problem)

    planner = BackgroundPlanner(fails)
    planner.submit("bad", decoder(2))
    planner.submit("good", decoder(3))
    assert planner.wait(LONG_S)
    assert planner.failures() == (PlanningFailure("bad", "ZeroDivisionError: no units per second"),)
    assert planner.failures() == ()
    assert planner.best("bad") is None
    assert planner.best("good") is not None
    assert planner.close(LONG_S)


def test_a_failure_keeps_the_plan_made_before() -> None:
    calls: list[int] = []

    def once(problem: Problem) -> Plan | Infeasible:
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("later")
        return greedy(problem)

    planner = BackgroundPlanner(once)
    for _ in range(2):
        planner.submit("key", decoder(3))
        assert planner.wait(LONG_S)
    assert planner.best("key") is not None
    assert len(planner.failures()) == 1
    assert planner.close(LONG_S)


def test_nothing_fits_is_a_verdict_and_no_plan() -> None:
    planner = BackgroundPlanner(partial(solve, limits=SolverLimits(time_limit_s=1)))
    planner.submit("tight", decoder(3, share=-0.5))
    assert planner.wait(LONG_S)
    assert planner.best("tight") is None
    assert isinstance(planner.verdict("tight"), Infeasible)
    assert planner.close(LONG_S)


def test_close_drops_what_waits_and_joins() -> None:
    gate = Gate()
    planner = BackgroundPlanner(gate)
    planner.submit("running", decoder(3))
    assert gate.started.wait(LONG_S)
    planner.submit("waiting", decoder(3))
    assert not planner.close(0.01)  # still in "running"
    gate.open.set()
    assert planner.close(LONG_S)
    assert len(gate.seen) == 1
    with pytest.raises(UsageError, match="closed"):
        planner.submit("late", decoder(3))
    assert planner.close(LONG_S)  # a second time is harmless
