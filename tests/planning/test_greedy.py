"""Greedy's work grows with units times variants, and plans are judged a fixed number of times."""

from __future__ import annotations

import pytest

from ds_hilore.core.types import Plan
from ds_hilore.planning import greedy as greedy_module
from ds_hilore.planning import problem as problem_module
from ds_hilore.planning import ties as ties_module
from ds_hilore.planning.greedy import greedy
from ds_hilore.planning.problem import Problem, evaluate
from ds_hilore.planning.rows import Rows
from tests.planning.planning_problems import decoder


@pytest.mark.parametrize(("units", "variants", "passes"), [(36, 2, 1), (36, 5, 8), (80, 2, 1), (80, 5, 8)])
def test_counted_work(units: int, variants: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"evaluate": 0, "fits": 0}

    def evaluated(problem: Problem, choice: dict) -> object:  # type: ignore[type-arg]
        counts["evaluate"] += 1
        return evaluate(problem, choice)

    class Counted(Rows):
        def fits(self, *args: object) -> bool:
            counts["fits"] += 1
            return super().fits(*args)  # type: ignore[arg-type]

    for module in (greedy_module, problem_module, ties_module):
        monkeypatch.setattr(module, "evaluate", evaluated)
    monkeypatch.setattr(greedy_module, "Rows", Counted)
    plan = greedy(decoder(units, variants, noise=0.02, risk_budget=0.02))
    assert isinstance(plan, Plan)
    assert plan.saved_seconds > 0
    assert counts["fits"] <= passes * units * (variants - 1)
    assert counts["evaluate"] <= 3


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.8])
def test_exact_mode_stores_what_fits(share: float) -> None:
    """One more stored unit would break a row: greedy leaves nothing that fits."""
    problem = decoder(36, 2, share=share, noise=0.05)
    plan = greedy(problem)
    assert isinstance(plan, Plan)
    for profile in problem.units:
        if plan.choice[profile.unit] == "R":
            assert not evaluate(problem, {**plan.choice, profile.unit: "H"}).feasible
