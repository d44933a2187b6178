"""A frontier that came back from the solver's process is believed only where all of its plans hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_hilore.core.errors import PlanError
from ds_hilore.core.types import Action, Plan, UnitId
from ds_hilore.planning import refine as module
from ds_hilore.planning.frontier import Frontier, first_frontier
from ds_hilore.planning.problem import Infeasible
from ds_hilore.planning.refine import refine, refine_apart
from tests.planning.planning_problems import decoder

PROBLEM = decoder(6, 3, risk_budget=0.01)


def honest() -> Frontier:
    first = first_frontier(PROBLEM)
    assert isinstance(first, Frontier)
    return refine(first)


def _plans(change: Callable[[Plan], Plan]) -> Frontier:
    found = honest()
    rows = [replace(row, plan=change(row.plan)) for row in found.rows]
    return Frontier(found.problem, tuple(rows))


def _points(change: Callable[[Plan], Plan]) -> Frontier:
    found = honest()
    rows = [replace(row, points=tuple(change(point) for point in row.points)) for row in found.rows]
    return Frontier(found.problem, tuple(rows))


def everything(plan: Plan) -> Plan:
    """More than fits."""
    return replace(plan, choice=dict.fromkeys(plan.choice, "H"), actions=dict.fromkeys(plan.actions, Action.STORE))


def nonsense(plan: Plan) -> Plan:
    return replace(plan, choice=dict.fromkeys(plan.choice, "X"))


def strangers(plan: Plan) -> Plan:
    return replace(plan, choice={UnitId(f"not.{unit.name}"): name for unit, name in plan.choice.items()})


def of_another_problem() -> Any:
    return Frontier(replace(PROBLEM, budget_bytes=PROBLEM.budget_bytes + 1), honest().rows)


def of_other_rows() -> Any:
    found = honest()
    assert len(found.rows) > 1
    first, second = found.rows[0], found.rows[-1]
    return Frontier(found.problem, (replace(first, problem=second.problem), *found.rows[1:]))


def in_other_places() -> Any:
    found = honest()
    rows = [replace(row, places=tuple(tuple(0 for _ in each) for each in row.places)) for row in found.rows]
    return Frontier(found.problem, tuple(rows))


WRONG: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "infeasible": lambda: Infeasible(1, "backward", None, 0),
    "no rows": lambda: Frontier(PROBLEM, ()),
    "another problem": of_another_problem,
    "other rows": of_other_rows,
    "other places": in_other_places,
    "q-plans over the budget": lambda: _plans(everything),
    "q-plans of unknown variants": lambda: _plans(nonsense),
    "q-plans of other units": lambda: _plans(strangers),
    "a-plans of unknown variants": lambda: _points(nonsense),
    "a-plans of other units": lambda: _points(strangers),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    answer = WRONG[kind]()
    monkeypatch.setattr(module, "apart", lambda function, *given: answer)
    first = first_frontier(PROBLEM)
    assert isinstance(first, Frontier)
    with pytest.raises(PlanError):
        refine_apart(first)


def test_an_honest_answer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = honest()
    monkeypatch.setattr(module, "apart", lambda function, *given: answer)
    first = first_frontier(PROBLEM)
    assert isinstance(first, Frontier)
    assert refine_apart(first) is answer
