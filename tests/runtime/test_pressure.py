"""What is tighter between forward and backward than the plan took it to be."""

from __future__ import annotations

import pytest

from ds_hilore.core.types import Action, Plan, UnitId, UnitProfile, Variant
from ds_hilore.planning.problem import Problem, evaluate
from ds_hilore.runtime.pressure import NOISE_BYTES, Levels, held_bytes, pressure

MB = 10**6
BUDGET = 1000 * MB
BASE = 500 * MB


def variants() -> tuple[Variant, ...]:
    return (
        Variant("H", Action.STORE, held_bytes=100 * MB, saved_seconds=1.0),
        Variant("R", Action.RECOMPUTE, held_bytes=10 * MB, workspace_bytes=90 * MB),
    )


UNITS = tuple(UnitProfile(UnitId(f"u{k}"), "u", variants()) for k in range(4))
STORED = Plan(choice={unit.unit: "H" for unit in UNITS}, peak_bytes=900 * MB)
PROBLEM = Problem(UNITS, BUDGET, base_backward_bytes=BASE).after_forward(STORED.choice)
FORESEEN = BASE + 400 * MB


@pytest.mark.parametrize(
    "levels",
    [
        Levels(FORESEEN),
        Levels(FORESEEN, FORESEEN),
        Levels(FORESEEN, FORESEEN - 100 * MB),
        Levels(FORESEEN, FORESEEN + NOISE_BYTES),
        Levels(FORESEEN, None, 10 * MB),
        Levels(FORESEEN, FORESEEN, BUDGET),
    ],
)
def test_as_foreseen(levels: Levels) -> None:
    assert pressure(PROBLEM, STORED, levels, BUDGET) is None


def test_more_is_held_than_foreseen() -> None:
    found = pressure(PROBLEM, STORED, Levels(FORESEEN, FORESEEN + 150 * MB), BUDGET)
    assert found is not None and found.base_backward_bytes == BASE + 150 * MB and found.budget_bytes == BUDGET
    assert found.shortage(PROBLEM, STORED) == 50 * MB


def test_less_is_free_than_backward_needs() -> None:
    """The device's own limit comes before the budget: another process has taken memory."""
    dropped = Plan(choice={**STORED.choice, UNITS[3].unit: "R"}, peak_bytes=910 * MB)
    problem = Problem(UNITS, BUDGET, base_backward_bytes=BASE).after_forward(dropped.choice)
    foreseen = BASE + held_bytes(problem, dropped)
    needs = evaluate(problem, dropped.choice).peak_bytes
    assert pressure(problem, dropped, Levels(foreseen, None, dropped.peak_bytes - foreseen), BUDGET) is None
    found = pressure(problem, dropped, Levels(foreseen, None, 30 * MB), BUDGET)
    assert found is not None and found.budget_bytes == foreseen + 30 * MB
    assert found.shortage(problem, dropped) == needs - foreseen - 30 * MB


def test_what_plans_leave_free_is_there_for_what_was_not_foreseen() -> None:
    careful = Problem(UNITS, BUDGET - 100 * MB, base_backward_bytes=BASE).after_forward(STORED.choice)
    found = pressure(careful, STORED, Levels(FORESEEN, FORESEEN + 80 * MB), BUDGET)
    assert found is not None and found.shortage(careful, STORED) == 0
