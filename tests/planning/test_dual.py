"""Bounds of prices: above every feasible plan, and near the best one where units are many."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import Plan
from ds_hilore.planning.brute_force import brute_force
from ds_hilore.planning.dual import Dual, concave_hull, risk_bounds
from ds_hilore.planning.program import SolverLimits, solve
from tests.planning.planning_problems import decoder, random_problem


@pytest.mark.parametrize("chunk", range(3))
def test_no_plan_beats_the_bounds(chunk: int) -> None:
    """150 random problems before and after forward, under their own risk budget and under others."""
    tried = 0
    for seed in range(chunk * 50, chunk * 50 + 50):
        problem = random_problem(seed, max_units=6, max_choices=300)
        dual = Dual(problem)
        for factor in (0.0, 0.3, 1.0, 5.0):
            here = replace(problem, risk_budget=problem.risk_budget * factor)
            best = brute_force(here)
            if isinstance(best, Plan):
                tried += 1
                assert dual.bound(here.risk_limit).seconds >= best.saved_seconds, (seed, factor)
                assert risk_bounds(here, [here.risk_limit])[0] >= best.saved_seconds, (seed, factor)
    assert tried > 80


@pytest.mark.parametrize("variants", [2, 3, 6])
def test_the_bound_is_near_the_optimum_of_many_units(variants: int) -> None:
    problem = decoder(80, variants, noise=0.05, risk_budget=0.05)
    plan = solve(problem, SolverLimits(time_limit_s=5, relative_gap=0.005))
    assert isinstance(plan, Plan)
    bound = Dual(problem).bound(problem.risk_limit).seconds
    assert plan.saved_seconds <= bound <= 1.04 * plan.saved_seconds


def test_with_room_for_all_the_bound_is_what_all_save() -> None:
    problem = decoder(12, 3, share=2.0, risk_budget=1.0)
    assert Dual(problem).bound(1.0).seconds == pytest.approx(0.12, rel=1e-9)


#: Costs are not subnormal: slopes between those overflow, and no real risk is so small.
points = st.lists(st.tuples(st.floats(0, 10, allow_subnormal=False), st.floats(-5, 5)), max_size=12)


@given(points=points)
@settings(max_examples=200, deadline=None)
def test_the_hull_is_concave_rises_and_covers(points: list[tuple[float, float]]) -> None:
    hull = concave_hull([*points, (math.inf, 9.0)])
    assert set(hull) <= set(points)
    assert bool(hull) == bool(points)
    for low, high in pairwise(hull):
        assert low[0] < high[0] and low[1] < high[1]
    for low, middle, high in zip(hull, hull[1:], hull[2:]):
        left = (middle[1] - low[1]) / (middle[0] - low[0])
        assert left >= (high[1] - middle[1]) / (high[0] - middle[0]) * (1 - 1e-6)
    for cost, gain in points:
        assert gain <= _on(hull, cost) + 1e-6


def _on(hull: list[tuple[float, float]], cost: float) -> float:
    for low, high in pairwise(hull):
        if low[0] <= cost <= high[0]:
            return low[1] + (high[1] - low[1]) * (cost - low[0]) / (high[0] - low[0])
    return hull[-1][1]
