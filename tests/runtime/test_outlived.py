"""A planner that raises in an update: every unit is replayed, and it is said once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ds_hilore.core.budget import BudgetKind, MemoryBudget
from ds_hilore.core.types import Plan, Solver
from ds_hilore.planning.frontier import Prepared
from ds_hilore.runtime import budget
from ds_hilore.runtime.budget import Baseline, PhasePeaks
from tests.runtime.test_budget import TEN, knapsack, planner


def made() -> budget.RankPlanner:
    found = planner(MemoryBudget(BudgetKind.BYTES, 1000), Solver.GREEDY)
    found.calibrate(Baseline(900, (PhasePeaks(TEN, 900, 900, 900),), 10**9), {TEN: knapsack()})
    return found


def broken(*_: object) -> None:
    raise ZeroDivisionError("planted")


def test_a_choice_that_fails_replays_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = made()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(budget, "first_frontier", broken)
        assert [found.prepare(TEN, knapsack()) for _ in range(3)] == [Plan()] * 3
        assert found.breakpoints(TEN, knapsack()) == ()
    assert [record.getMessage() for record in caplog.records if "ZeroDivisionError" in record.getMessage()] == [
        "hilore: planning failed (ZeroDivisionError: planted); every unit is replayed wherever it does. "
        "Please report this"
    ]
    assert isinstance(found.prepare(TEN, knapsack()), Prepared), "a failure is not remembered as an answer"


def test_a_final_plan_that_fails_replays_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made()
    row = found.prepare(TEN, knapsack())
    assert isinstance(row, Prepared)
    monkeypatch.setattr(found, "_pressure", broken)
    assert found.decide(TEN, replace(row, plan=replace(row.plan, risk=0.1))) == Plan()


def test_what_is_no_exception_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(budget, "first_frontier", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.prepare(TEN, knapsack())
