"""Properties that hold for any problem, whoever plans."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import LATTICE, Plan, Variant
from ds_hilore.planning.brute_force import brute_force
from ds_hilore.planning.greedy import greedy, repair
from ds_hilore.planning.problem import Infeasible, Problem, check, evaluate, pick
from ds_hilore.planning.program import SolverLimits, solve
from ds_hilore.planning.rows import Rows
from ds_hilore.planning.ties import settle, tie_key
from tests.planning.planning_problems import random_problem

PROOF = SolverLimits(relative_gap=0.0)
PLANNERS = {"greedy": greedy, "highs": lambda p: solve(p, PROOF), "brute_force": brute_force}
seeds = st.integers(0, 1 << 40)
quick = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def small(seed: int) -> Problem:
    return random_problem(seed, max_units=6, max_choices=300)


@pytest.mark.parametrize("name", PLANNERS)
@quick
@given(seed=seeds)
def test_every_plan_holds_and_keeps_its_promise(name: str, seed: int) -> None:
    problem = small(seed)
    plan = PLANNERS[name](problem)
    if isinstance(plan, Infeasible):
        return
    evaluation = check(problem, plan)
    assert set(plan.choice) == {u.unit for u in problem.units}
    assert plan.saved_seconds == evaluation.saved_seconds
    assert plan.peak_bytes == evaluation.peak_bytes <= problem.budget_bytes
    assert plan.risk <= problem.risk_budget * (1 + 1e-6)


@pytest.mark.parametrize("name", ["highs", "brute_force"])
@quick
@given(seed=seeds, more=st.integers(0, 200))
def test_more_budget_never_hurts(name: str, seed: int, more: int) -> None:
    problem = small(seed)
    before = PLANNERS[name](problem)
    after = PLANNERS[name](replace(problem, budget_bytes=problem.budget_bytes + more))
    if isinstance(before, Plan):
        assert isinstance(after, Plan)
        assert after.saved_seconds >= before.saved_seconds - 1e-9
    bolder = PLANNERS[name](replace(problem, risk_budget=problem.risk_budget + more / 1000))
    if isinstance(before, Plan):
        assert isinstance(bolder, Plan)
        assert bolder.saved_seconds >= before.saved_seconds - 1e-9


@pytest.mark.parametrize("name", PLANNERS)
@quick
@given(seed=seeds)
def test_the_lattice_is_respected(name: str, seed: int) -> None:
    problem = small(seed)
    plan = PLANNERS[name](problem)
    if isinstance(plan, Infeasible):
        return
    for profile in problem.units:
        chosen: Variant = profile.variant(plan.choice[profile.unit])
        assert chosen.name in problem.allowed.get(profile.unit, (chosen.name,))
        if problem.prepared is not None:
            prepared = profile.variant(problem.prepared[profile.unit])
            assert chosen.action in LATTICE[prepared.action]
            assert chosen.action is not prepared.action or chosen.name == prepared.name


@quick
@given(seed=seeds)
def test_all_replay_is_always_a_choice_and_carries_no_risk(seed: int) -> None:
    problem = replace(small(seed), allowed={})
    evaluation = evaluate(problem, {})
    assert evaluation.risk == 0.0
    roomy = replace(problem, budget_bytes=evaluation.peak_bytes)
    assert evaluate(roomy, {}).feasible
    for planner in PLANNERS.values():
        assert isinstance(planner(roomy), Plan)


@quick
@given(seed=seeds, other=seeds)
def test_repair_holds_for_any_plan_in_any_problem(seed: int, other: int) -> None:
    problem = small(seed)
    choice = {u.unit: u.variants[(other >> i) % len(u.variants)].name for i, u in enumerate(problem.units)}
    repaired = repair(problem, Plan(choice=choice))
    if isinstance(repaired, Plan):
        check(problem, repaired)
    else:
        assert isinstance(greedy(problem), Infeasible)


@quick
@given(seed=seeds, other=seeds)
def test_running_slacks_agree_with_the_truth(seed: int, other: int) -> None:
    """`Rows.fits` on a feasible choice says exactly what `evaluate` says of the changed one."""
    problem = small(seed)
    start = greedy(problem)
    if isinstance(start, Infeasible):
        return
    rows = Rows(problem, pick(problem, start.choice))
    choice = dict(start.choice)
    for step in range(12):
        position = (other >> (3 * step)) % len(problem.units)
        option = problem.options[position][(other >> step) % len(problem.options[position])]
        changed = {**choice, problem.units[position].unit: option.name}
        fits = rows.fits(position, option)
        assert fits == evaluate(problem, changed).feasible
        if fits:
            rows.put(position, option)
            choice = changed


@quick
@given(seed=seeds)
def test_settling_never_loses_and_settles_once(seed: int) -> None:
    problem = small(seed)
    plan = greedy(problem)
    if isinstance(plan, Infeasible):
        return
    settled = settle(problem, plan.choice)
    assert evaluate(problem, settled).feasible
    assert evaluate(problem, settled).saved_seconds == plan.saved_seconds
    assert tie_key(problem, settled) <= tie_key(problem, plan.choice)
    assert settle(problem, settled) == settled


@quick
@given(seed=seeds, other=seeds)
def test_what_is_known_by_now_makes_the_same_problem_as_from_scratch(seed: int, other: int) -> None:
    """`now` and `after_forward` share options and skip validation: the result is that of `replace`, to the number."""
    rng = random.Random(other)
    problem = replace(small(seed), in_flight=1)
    exposures = {u.unit: rng.choice((0.0, 1.0, rng.uniform(0, 4), math.inf)) for u in problem.units}
    facts = {
        "risk_budget": rng.uniform(0, 0.1),
        "exposures": exposures,
        "budget_bytes": problem.budget_bytes + rng.randint(-9, 9),
        "base_backward_bytes": rng.randint(0, 99),
    }
    chosen = {name: value for name, value in facts.items() if rng.random() < 0.6}
    before = (problem.options, problem.risk_limit, replace(problem))
    quick_one, slow_one = problem.now(**chosen), replace(problem, **chosen)
    assert quick_one == slow_one
    assert (quick_one.options, quick_one.risk_limit) == (slow_one.options, slow_one.risk_limit)
    prepared = {u.unit: rng.choice(options).name for u, options in zip(problem.units, problem.options)}
    try:
        second = replace(problem, prepared=prepared, exposures=exposures)
    except UsageError:  # `allowed` forbids what it could still become
        with pytest.raises(UsageError):
            problem.after_forward(prepared, exposures)
    else:
        assert problem.after_forward(prepared, exposures) == second
        assert problem.after_forward(prepared, exposures).options == second.options
    assert (problem.options, problem.risk_limit, problem) == before
