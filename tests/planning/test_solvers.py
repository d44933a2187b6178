"""Greedy, the programme under both solvers, and brute force: by hand, in three regimes, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Plan, Solver
from ds_hilore.planning.brute_force import brute_force
from ds_hilore.planning.greedy import greedy, repair
from ds_hilore.planning.problem import Infeasible, Problem, check, evaluate
from ds_hilore.planning.program import SolverLimits, solve
from tests.planning.planning_problems import (
    all_of,
    decoder,
    letters,
    random_problem,
    replayed,
    stored,
    unit,
    unit_id,
    with_budget,
)

Planner = Callable[[Problem], "Plan | Infeasible"]

EXACT = {
    "highs": partial(solve, limits=SolverLimits(relative_gap=0.0)),
    "cbc": partial(solve, limits=SolverLimits(relative_gap=0.0, solver="cbc")),
    "brute_force": brute_force,
}
ALL = {**EXACT, "greedy": greedy}


def planned(planner: Planner, problem: Problem) -> Plan:
    plan = planner(problem)
    assert isinstance(plan, Plan), plan
    check(problem, plan)
    return plan


def knapsack(budget: int) -> Problem:
    """Held and seconds 6/0.65, 5/0.5, 5/0.5, nothing for R: the densest item is not in the best plan for 10."""
    units = tuple(
        unit(i, replayed(0), stored(held, seconds)) for i, (held, seconds) in enumerate([(6, 0.65), (5, 0.5), (5, 0.5)])
    )
    return Problem(units, budget_bytes=budget)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    ("budget", "expected"),
    [(0, "RRR"), (4, "RRR"), (5, "RRH"), (6, "HRR"), (9, "HRR"), (10, "RHH"), (11, "HRH"), (15, "HRH"), (16, "HHH")],
)
def test_hand_solved(name: str, budget: int, expected: str) -> None:
    problem = knapsack(budget)
    assert letters(problem, planned(EXACT[name], problem).choice) == expected


def test_greedy_misses_what_only_the_programme_sees() -> None:
    problem = knapsack(10)
    assert letters(problem, planned(greedy, problem).choice) == "HRR"
    plan = planned(EXACT["highs"], problem)
    assert plan.saved_seconds == pytest.approx(1.0)
    assert plan.bound_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("name", ALL)
def test_backward_rows_bind_early_units(name: str) -> None:
    """Replay workspace of late units sits on top of what early ones hold, so only the last unit may be stored."""
    units = tuple(unit(i, replayed(1, 20), stored(10, 1.0, 5)) for i in range(3))
    problem = Problem(units, budget_bytes=23)
    assert letters(problem, planned(ALL[name], problem).choice) == "RRH"
    assert not evaluate(problem, {**all_of(problem, "R"), unit_id(0): "H"}).feasible


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("share", [1.0, 5.0])
def test_slack_regime_stores_everything(name: str, share: float) -> None:
    problem = decoder(6, share=share)
    plan = planned(ALL[name], problem)
    assert plan.count(Action.STORE) == 6
    assert plan.peak_bytes <= problem.budget_bytes


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_binding_regime_fills_the_budget_from_the_last_unit(name: str, share: float) -> None:
    problem = decoder(8, share=share)
    stored_units = planned(ALL[name], problem).count(Action.STORE)
    room = problem.budget_bytes - with_budget(problem, 0.0).budget_bytes
    grown = problem.units[0].variant("H").held_bytes - problem.units[0].variant("R").held_bytes
    assert stored_units in (room // grown, room // grown + 1)  # all-R peaks by its workspace: a little is left
    assert letters(problem, planned(ALL[name], problem).choice) == "R" * (8 - stored_units) + "H" * stored_units


@pytest.mark.parametrize("name", ALL)
def test_infeasible_regime_says_by_how_much(name: str) -> None:
    fits = decoder(5, share=0.0)
    result = ALL[name](replace(fits, budget_bytes=fits.budget_bytes - 7))
    assert isinstance(result, Infeasible)
    assert (result.min_bytes, result.missing_bytes, result.row) == (fits.budget_bytes, 7, "backward")
    assert result.unit == unit_id(4)
    assert "7 more than the budget" in str(result)
    assert isinstance(ALL[name](fits), Plan)


@pytest.mark.parametrize("name", ALL)
def test_plans_that_fit_where_all_replay_does_not(name: str) -> None:
    """A replay's workspace may be what does not fit; storing is then the lean plan."""
    problem = Problem((unit(0, replayed(1, 90), stored(30, 0.5, 10)),), budget_bytes=40)
    assert letters(problem, planned(ALL[name], problem).choice) == "H"


@pytest.mark.parametrize("chunk", range(12))
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_programme_equals_brute_force(solver: str, chunk: int) -> None:
    """600 random problems of up to 8 units a solver: before and after forward, risk, host, lattice, equal units."""
    for seed in range(chunk * 50, chunk * 50 + 50):
        problem = random_problem(seed)
        truth, plan = brute_force(problem), EXACT[solver](problem)
        assert isinstance(plan, Plan) == isinstance(truth, Plan), seed
        if isinstance(plan, Plan) and isinstance(truth, Plan):
            check(problem, plan)
            assert plan.saved_seconds == pytest.approx(truth.saved_seconds, rel=1e-7, abs=1e-9), seed
            assert plan.bound_seconds is not None
            assert plan.bound_seconds >= truth.saved_seconds - 1e-7, seed


def test_greedy_is_feasible_and_below_brute_force() -> None:
    best = solved = 0
    for seed in range(600):
        problem = random_problem(seed)
        truth, plan = brute_force(problem), greedy(problem)
        lean = evaluate(problem, {u.unit: "R" for u in problem.units})
        assert isinstance(plan, Plan) or not lean.feasible, seed
        if isinstance(plan, Plan) and isinstance(truth, Plan):
            check(problem, plan)
            assert plan.saved_seconds <= truth.saved_seconds + 1e-12, seed
            solved += 1
            best += plan.saved_seconds >= truth.saved_seconds - 1e-9
        elif isinstance(plan, Infeasible) and isinstance(truth, Infeasible):
            assert plan.min_bytes >= truth.min_bytes
    assert best / solved > 0.9


@pytest.mark.parametrize("name", ALL)
def test_min_bytes_is_a_budget_that_does(name: str) -> None:
    tried = 0
    for seed in range(150):
        problem = random_problem(seed)
        result = ALL[name](problem) if name != "cbc" or seed < 40 else None
        if isinstance(result, Infeasible) and result.missing_bytes:
            assert isinstance(ALL[name](replace(problem, budget_bytes=result.min_bytes)), Plan), seed
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("units", [12, 36, 80])
@pytest.mark.parametrize("variants", [2, 3])
def test_equal_units_are_solved_to_the_proven_optimum(units: int, variants: int) -> None:
    """Without counts and order these instances run into any time limit; with them the bound meets the plan."""
    problem = decoder(units, variants, risk_budget=0.015)
    plan = planned(EXACT["highs"], problem)
    assert plan.solver is Solver.HIGHS
    assert plan.bound_seconds == pytest.approx(plan.saved_seconds, rel=1e-9)
    assert plan.saved_seconds >= planned(greedy, problem).saved_seconds


@pytest.mark.parametrize("name", ALL)
def test_ties_are_settled_alike_by_all(name: str) -> None:
    """Equal units: what is held more lies later (T2); a variant that saves nothing is not worth its bytes (T1)."""
    problem = decoder(8, 2, share=0.45)
    reference = letters(problem, planned(brute_force, problem).choice)
    assert letters(problem, planned(ALL[name], problem).choice) == reference
    useless = Problem((unit(0, stored(5, 0.0), replayed(1)), unit(1, stored(5, 0.0), replayed(1))), budget_bytes=100)
    assert letters(useless, planned(ALL[name], useless).choice) == "RR"


@pytest.mark.parametrize("name", ALL)
def test_the_same_problem_gives_the_same_plan(name: str) -> None:
    problem = decoder(8, 3, noise=0.05, risk_budget=0.006)
    again = replace(problem, exposures={u.unit: 1.0 for u in reversed(problem.units)})
    assert dict(planned(ALL[name], problem).choice) == dict(planned(ALL[name], again).choice)


def test_repair_drops_and_keeps() -> None:
    problem = decoder(12, 3, share=0.6, noise=0.02, risk_budget=0.01)
    plan = planned(EXACT["highs"], problem)
    assert repair(problem, plan) == replace(plan, bound_seconds=None)
    for tighter in (with_budget(problem, 0.2), replace(problem, risk_budget=0.002), problem.after_forward(plan.choice)):
        repaired = repair(tighter, plan)
        assert isinstance(repaired, Plan)
        check(tighter, repaired)
        for profile in problem.units:
            assert repaired.choice[profile.unit] in ("R", plan.choice[profile.unit])
    violent = problem.after_forward(plan.choice, {u.unit: math.inf for u in problem.units})
    exact = repair(violent, plan)
    assert isinstance(exact, Plan)
    assert exact.count(Action.COMPRESS) == 0
    assert exact.count(Action.STORE) == plan.count(Action.STORE)


def test_repair_of_what_cannot_fit_is_infeasible() -> None:
    problem = decoder(4, share=0.5)
    plan = planned(greedy, problem)
    assert isinstance(repair(replace(problem, budget_bytes=1), plan), Infeasible)


def test_brute_force_refuses_large_problems() -> None:
    with pytest.raises(UsageError, match="at most 8 units"):
        brute_force(decoder(9))
