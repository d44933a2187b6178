"""The plan frontier: every point holds, promises what it keeps, and is as near to the best as it certifies."""

from __future__ import annotations

import math
import random
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import LATTICE, Action, Plan, Solver
from ds_hilore.planning import frontier as frontier_module
from ds_hilore.planning.brute_force import brute_force
from ds_hilore.planning.frontier import Frontier, Grid, Prepared, first_frontier, gap
from ds_hilore.planning.greedy import greedy
from ds_hilore.planning.problem import Infeasible, Problem, check, evaluate
from ds_hilore.planning.program import SolverLimits
from ds_hilore.planning.refine import refine
from tests.planning.planning_problems import MIB, all_of, decoder, random_problem, replayed, stored, unit, unit_id

seeds = st.integers(0, 1 << 40)
quick = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
PROOF = SolverLimits(time_limit_s=30, relative_gap=0.0)


def before_forward(seed: int, max_units: int = 6, max_choices: int = 300) -> Problem:
    """A random first problem without units that may only be approximate."""
    return replace(random_problem(seed, max_units, max_choices), prepared=None, allowed={})


def _refined(problem: Problem, limits: SolverLimits = PROOF) -> Frontier | Infeasible:
    first = first_frontier(problem)
    return first if isinstance(first, Infeasible) else refine(first, limits, Grid(prepared=3, decided=4))


MAKERS = {"first": first_frontier, "refined": _refined}


def made(problem: Problem) -> Frontier:
    frontier = first_frontier(problem)
    assert isinstance(frontier, Frontier), frontier
    return frontier


def rows_of(frontier: Frontier | Infeasible) -> tuple[Prepared, ...]:
    return () if isinstance(frontier, Infeasible) else frontier.rows


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(seed=seeds)
def test_every_point_holds_and_keeps_its_promise(name: str, seed: int) -> None:
    problem = before_forward(seed)
    for row in rows_of(MAKERS[name](problem)):
        here = replace(problem, risk_budget=max(row.reach, row.plan.risk))
        assert check(here, row.plan).saved_seconds == row.plan.saved_seconds
        assert row.plan.risk <= row.reach * (1 + 1e-6)
        assert row.points[0].risk == 0
        for point, places in zip(row.points, row.places):
            second = replace(problem.after_forward(dict(row.plan.choice)), risk_budget=point.risk)
            evaluation = check(second, point)
            assert (evaluation.saved_seconds, evaluation.risk) == (point.saved_seconds, point.risk)
            assert evaluation.peak_bytes == point.peak_bytes <= problem.budget_bytes
            names = [options[place].name for options, place in zip(row.problem.options, places)]
            assert names == [point.choice[u.unit] for u in problem.units]
            assert point.bound_seconds is not None and point.bound_seconds >= point.saved_seconds


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(seed=seeds)
def test_more_reach_never_saves_less(name: str, seed: int) -> None:
    frontier = MAKERS[name](before_forward(seed))
    if isinstance(frontier, Infeasible):
        return
    rng = random.Random(seed)
    top = 2 * max(row.reach for row in frontier.rows)
    reaches = [0.0, *sorted(rng.uniform(0, top) for _ in range(20)), math.inf]
    for row in frontier.rows:
        for low, high in pairwise(row.points):
            assert low.risk < high.risk and low.saved_seconds < high.saved_seconds
        decided = [row.decide(reach) for reach in reaches]
        assert all(a.saved_seconds <= b.saved_seconds for a, b in pairwise(decided))
        assert all(plan.risk <= reach * (1 + 1e-6) for plan, reach in zip(decided, reaches))
        assert decided[0] is row.decide(math.nan) is row.decide(-1.0) is row.points[0]
    worth = [frontier.prepare(reach).worth(reach) for reach in reaches]
    assert all(a <= b for a, b in pairwise(worth))
    spread = (0.5, 1.0, 3.0)
    prepared = frontier.prepare(reaches[5], spread)
    expected = [sum(row.worth(reaches[5] / ratio) for ratio in spread) for row in frontier.rows]
    assert sum(prepared.worth(reaches[5] / ratio) for ratio in spread) == pytest.approx(max(expected), abs=1e-12)


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(seed=seeds)
def test_points_stay_inside_the_lattice_of_q(name: str, seed: int) -> None:
    for row in rows_of(MAKERS[name](before_forward(seed))):
        for profile in row.problem.units:
            prepared = profile.variant(row.plan.choice[profile.unit])
            for point in row.points:
                chosen = profile.variant(point.choice[profile.unit])
                assert chosen.action in LATTICE[prepared.action]
                assert chosen.action is not prepared.action or chosen.name == prepared.name


@pytest.mark.parametrize("chunk", range(14))
def test_frontiers_against_brute_force(chunk: int) -> None:
    """More than 500 random problems of up to 8 units, each q-plan at its reach and each a-plan at its risk.

    Nothing beats a certified bound; refined with a gap of 0, q-plans and a-plans *are* the best there is.
    """
    frontiers = points = 0
    for seed in range(chunk * 50, chunk * 50 + 50):
        problem = before_forward(seed, max_units=8, max_choices=400)
        first = first_frontier(problem)
        if isinstance(first, Infeasible):
            continue
        frontiers += 1
        refined = refine(first, PROOF, Grid(prepared=2, decided=2))
        for frontier in (first, refined):
            for row in frontier.rows:
                _compare(replace(problem, risk_budget=row.reach), row.plan, best=False)
                for point in row.points:
                    points += 1
                    second = row.problem.now(risk_budget=point.risk)
                    _compare(second, point, best=frontier is refined)
        for row in first.rows:
            here = replace(problem, risk_budget=row.reach)
            truth = brute_force(here)
            assert isinstance(truth, Plan)
            worth = refined.prepare(row.reach).worth(row.reach)
            assert worth >= truth.saved_seconds - 1e-9, (seed, row.reach)
            assert worth >= first.prepare(row.reach).worth(row.reach) - 1e-12
    assert frontiers >= 36 and points > 80


def _compare(problem: Problem, plan: Plan, best: bool) -> None:
    truth = brute_force(problem)
    assert isinstance(truth, Plan) and plan.bound_seconds is not None
    assert plan.saved_seconds <= truth.saved_seconds + 1e-12
    assert truth.saved_seconds <= plan.bound_seconds + 1e-9
    if plan.saved_seconds > 0:
        assert truth.saved_seconds <= plan.saved_seconds * (1 + gap(plan)) + 1e-9
    if best:
        assert plan.saved_seconds == pytest.approx(truth.saved_seconds, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(seed=seeds)
def test_decisions_on_true_exposures_hold(name: str, seed: int) -> None:
    """Any exposures, infinite and zero among them; no worse than any point that holds, never below the exact plan."""
    problem = before_forward(seed)
    rng = random.Random(seed)
    for row in rows_of(MAKERS[name](problem)):
        exposures = {u.unit: rng.choice((0.0, 1.0, math.inf, rng.uniform(0, 5))) for u in problem.units}
        here = row.problem.now(exposures=exposures, risk_budget=rng.choice((0.0, row.reach, rng.uniform(0, 0.05))))
        plan = row.decide_in(here)
        assert isinstance(plan, Plan)
        check(here, plan)
        truth = brute_force(here)
        assert isinstance(truth, Plan)
        assert plan.saved_seconds <= truth.saved_seconds + 1e-12
        for point in row.points:
            if evaluate(here, point.choice).feasible:
                assert plan.saved_seconds >= point.saved_seconds - 1e-12


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(seed=seeds, less=st.integers(0, 120), base=st.integers(0, 60))
def test_decisions_with_less_memory_hold_or_say_what_is_missing(name: str, seed: int, less: int, base: int) -> None:
    problem = before_forward(seed)
    for row in rows_of(MAKERS[name](problem)):
        here = row.problem.now(
            budget_bytes=problem.budget_bytes - less, base_backward_bytes=problem.base_backward_bytes + base
        )
        plan = row.decide_in(here.now(risk_budget=row.reach))
        if isinstance(plan, Infeasible):
            assert plan.missing_bytes > 0
            assert not evaluate(here, all_of(problem, "R")).feasible
        else:
            check(here.now(risk_budget=row.reach), plan)


def test_exposures_that_were_nothing_and_are_something_and_the_reverse() -> None:
    """A unit foreseen without exposure is compressed in every point, the first too; the truth decides."""
    problem = decoder(6, 3, share=2.0)
    nothing, something = unit_id(0), unit_id(5)
    frontier = made(replace(problem, exposures={nothing: 0.0}, allowed={nothing: ("L0", "R"), something: ("L0", "R")}))
    row = frontier.rows[-1]
    assert row.points[0].action_of(nothing) is Action.COMPRESS
    exposures = {u.unit: 1.0 for u in problem.units}
    exact = row.decide_in(row.problem.now(exposures=exposures, risk_budget=0.0))
    assert isinstance(exact, Plan) and exact.count(Action.COMPRESS) == 0
    assert exact.count(Action.STORE) == row.points[0].count(Action.STORE)
    free = row.decide_in(row.problem.now(exposures=dict.fromkeys(exposures, 0.0), risk_budget=0.0))
    assert isinstance(free, Plan) and free.count(Action.COMPRESS) == row.plan.count(Action.COMPRESS) >= 2


def test_less_memory_replays_what_saves_least() -> None:
    units = [unit(i, replayed(1), stored(11, seconds)) for i, seconds in enumerate((0.3, 0.1, 0.2))]
    row = made(Problem(tuple(units), budget_bytes=33)).rows[0]
    assert row.decide(0.0).count(Action.STORE) == 3
    for budget, kept in ((33, "012"), (32, "02"), (23, "02"), (22, "0"), (13, "0"), (3, "")):
        plan = row.decide_in(row.problem.now(budget_bytes=budget))
        assert isinstance(plan, Plan)
        assert {u for u, a in plan.actions.items() if a is Action.STORE} == {unit_id(int(k)) for k in kept}
    short = row.decide_in(row.problem.now(budget_bytes=2))
    assert isinstance(short, Infeasible) and short.missing_bytes == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_without_risk_one_plan_is_left(share: float) -> None:
    problem = decoder(36, 2, share=share, noise=0.05)
    for frontier in (made(problem), refine(made(problem))):
        (row,) = frontier.rows
        (point,) = row.points
        assert dict(point.choice) == dict(row.plan.choice)
        assert frontier.prepare(7.0, (0.1, 2.0)) is row
        assert row.decide(0.0) is row.decide(math.inf) is point
    assert made(problem).rows[0].plan.saved_seconds >= greedy(problem).saved_seconds * 0.999


def test_the_same_problem_gives_the_same_frontier() -> None:
    problem = decoder(12, 4, noise=0.05)
    assert made(problem) == made(replace(problem))
    bolder = made(replace(problem, risk_budget=0.3))  # not read
    assert [(row.plan, row.points) for row in bolder.rows] == [(row.plan, row.points) for row in made(problem).rows]
    limits = SolverLimits(time_limit_s=60, relative_gap=0.02)
    assert refine(made(problem), limits) == refine(made(problem), limits)


def test_it_is_frozen_data() -> None:
    frontier = made(decoder(4, 3))
    with pytest.raises(FrozenInstanceError):
        frontier.rows[0].reach = 1.0  # type: ignore[misc]


def test_nothing_fits() -> None:
    fits = decoder(5, 3, share=0.0)
    result = first_frontier(replace(fits, budget_bytes=fits.budget_bytes - 7))
    assert isinstance(result, Infeasible) and result.missing_bytes == 7


def test_wrong_problems_are_refused() -> None:
    problem = decoder(8, 3, share=0.4)
    with pytest.raises(UsageError, match="before forward"):
        first_frontier(problem.after_forward({}))
    with pytest.raises(UsageError, match=r"layers\.1 has approximate variants and may not be replayed"):
        first_frontier(replace(problem, allowed={unit_id(1): ("H", "L0")}))
    frontier = made(problem)
    assert len(frontier.rows) > 1
    with pytest.raises(UsageError, match="another q-plan"):
        frontier.rows[0].decide_in(frontier.rows[1].problem)
    with pytest.raises(UsageError, match="exposure of unit"):
        frontier.rows[0].problem.now(exposures={unit_id(0): -1.0})
    with pytest.raises(UsageError, match="not in the problem"):
        frontier.rows[0].problem.now(exposures={unit_id(9): 1.0})


def test_preparing_generously_pays_where_the_truth_may_be_calmer() -> None:
    """A prediction that affords nothing: with a spread, L is prepared for the half of microbatches that are calm."""
    frontier = made(decoder(8, 3, share=0.4))
    violent = 0.1 * min(row.reach for row in frontier.rows if row.reach > 0)
    assert frontier.prepare(violent).plan.count(Action.COMPRESS) == 0
    bold = frontier.prepare(violent, (0.02, 1.0))
    assert bold.plan.count(Action.COMPRESS) > 0
    assert bold.decide(violent).count(Action.COMPRESS) == 0
    assert bold.decide(violent / 0.02).saved_seconds > frontier.prepare(violent).decide(math.inf).saved_seconds


def test_a_climb_counts_each_step_from_what_the_unit_holds() -> None:
    """Equal units: as the programme, greedy mixes H and L under one risk and one memory row."""
    problem = decoder(80, 6, share=0.3)
    first = made(problem)
    refined = refine(first, SolverLimits(time_limit_s=30, relative_gap=0.002))
    for row in first.rows:
        assert first.prepare(row.reach).worth(row.reach) >= 0.95 * refined.prepare(row.reach).worth(row.reach)


def test_time_that_is_up_leaves_greedy() -> None:
    problem = decoder(30, 3, noise=0.05)
    ticks = iter(range(10_000))
    refined = refine(made(problem), SolverLimits(time_limit_s=0.5), clock=lambda: float(next(ticks)))
    for row in refined.rows:
        assert row.plan.solver is Solver.GREEDY
        assert gap(row.plan) < math.inf
    better = refine(made(problem), SolverLimits(time_limit_s=20, relative_gap=0.01))
    assert any(row.plan.solver is Solver.HIGHS for row in better.rows)
    for row in better.rows:
        assert min(gap(other.plan) for other in better.rows if other.reach == row.reach) <= 0.0101


def test_a_bound_is_needed_for_a_gap() -> None:
    assert gap(Plan()) == math.inf
    assert gap(Plan(saved_seconds=0.0, bound_seconds=0.0)) == 0.0
    assert gap(Plan(saved_seconds=0.0, bound_seconds=1.0)) == math.inf
    assert gap(Plan(saved_seconds=2.0, bound_seconds=3.0)) == 0.5


def test_counted_work_of_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few evaluations of whole plans and no solver: what makes the first answer a matter of milliseconds."""
    counted = {"evaluate_picked": 0, "make_plan_of": 0, "climb": 0}
    for name in counted:
        original = getattr(frontier_module, name)

        def counting(*args: object, name: str = name, original: object = original) -> object:
            counted[name] += 1
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(frontier_module, name, counting)
    frontier = made(decoder(160, 6, noise=0.05))
    assert len(frontier.rows) == 3
    assert counted["climb"] <= 6
    assert counted["evaluate_picked"] <= 9
    assert counted["make_plan_of"] <= 3 * (1 + 6)
    assert sum(v.held_bytes for v in frontier.problem.units[0].variants) > MIB
