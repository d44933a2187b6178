"""The planner of `paper` mode: capture plans, and the dynamic programme against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Place, Plan, Solver, UnitProfile, Variant
from ds_hilore.planning.brute_force import brute_force
from ds_hilore.planning.frontier import Prepared, first_frontier
from ds_hilore.planning.greedy import lean_choice
from ds_hilore.planning.options import REPLAY
from ds_hilore.planning.paper import HEADROOMS, PaperFrontier, PaperPrepared, capture_plans, decide, paper_frontier
from ds_hilore.planning.problem import Infeasible, Problem, check, evaluate
from tests.planning.planning_problems import (
    MIB,
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

SEEDS = range(400)


def compressed(held: int, seconds: float, risk: float, prepare: float = 0.0) -> Variant:
    return Variant("L", Action.COMPRESS, held, saved_seconds=seconds, prepare_seconds=prepare, risk=risk)


def captured(*variants: tuple[Variant, ...], budget: int, risk_budget: float = 0.0, q: str = "L") -> Problem:
    """The problem after forward of units with these variants and R, all of them prepared as `q`."""
    units = tuple(unit(position, replayed(0), *each) for position, each in enumerate(variants))
    problem = Problem(units, budget_bytes=budget, risk_budget=risk_budget, linear_risk=True)
    return problem.after_forward({each.unit: q for each in units})


def of_paper(problem: Problem) -> Problem:
    """Linear, and without what the paper's planner may not choose: the rule said a second time."""
    allowed = {}
    for profile, options in zip(problem.units, problem.options):
        names = [option.name for option in options if not option.host_bytes]
        names = [n for n in names if profile.variant(n).action is not Action.COMPRESS or profile.variant(n).risk > 0]
        allowed[profile.unit] = tuple(names)
    return replace(problem, linear_risk=True, allowed=allowed)


def after_forward_problems() -> Iterator[Problem]:
    """Small random problems after forward that the paper's planner may be asked, with budgets from none to plenty."""
    for seed in SEEDS:
        problem = random_problem(seed, max_units=6, max_choices=500)
        if problem.prepared is None:
            names = [max(options, key=lambda option: option.held_bytes).name for options in problem.options]
            problem = problem.after_forward(dict(zip((profile.unit for profile in problem.units), names)))
        if all(any(not option.host_bytes for option in options) for options in problem.options):
            yield of_paper(problem)


@pytest.mark.parametrize("intervals", [16, 1024])
def test_feasible_never_above_the_optimum_and_within_what_rounding_loses(intervals: int) -> None:
    solved = compared = 0
    for problem in after_forward_problems():
        plan, best = decide(problem, intervals), brute_force(problem)
        if isinstance(plan, Infeasible):
            assert isinstance(lean_choice(problem), Infeasible)
            continue
        check(problem, plan)
        assert isinstance(best, Plan)
        assert plan.saved_seconds <= best.saved_seconds
        solved += plan.solver is Solver.DYNAMIC
        # every plan that leaves one interval a unit free in each row is also one by rounded weights
        count = len(problem.units)
        if not conversions_fit(problem):
            continue
        tighter = replace(
            problem,
            budget_bytes=problem.budget_bytes - math.ceil(max(0, headroom(problem)) * count / intervals),
            risk_budget=problem.risk_budget * (1 - count / intervals),
        )
        floor = brute_force(tighter)
        if isinstance(floor, Plan):
            assert plan.saved_seconds >= floor.saved_seconds - 1e-6
            compared += plan.solver is Solver.DYNAMIC and floor.saved_seconds > 0
    assert solved > 200
    assert compared > 50


def conversions_fit(problem: Problem) -> bool:
    most = sum(max(option.converting_bytes for option in options) for options in problem.options)
    return problem.base_backward_bytes + problem.conversion_bytes + most <= problem.budget_bytes


def headroom(problem: Problem) -> int:
    """Bytes left at the last unit's backward where all others hold the least and nothing of it is there."""
    held = sum(min(option.backward_held_bytes for option in options) for options in problem.options[:-1])
    return problem.budget_bytes - problem.base_backward_bytes - held


def test_conversions_are_made_where_any_fits_and_none_where_not() -> None:
    variants = (stored(100, 1.0), compressed(40, 0.9, risk=0.001))
    roomy = captured(variants, variants, budget=500, risk_budget=1.0, q="H")
    pressed = replace(roomy, base_backward_bytes=360)  # holds one and a compressed one
    assert letters(roomy, dict(decide_plan(roomy).choice)) == "HH"
    assert letters(pressed, dict(decide_plan(pressed).choice)) in ("HR", "RH")
    unpressed = replace(pressed, budget_bytes=560, base_backward_bytes=360, units=_with_workspace(pressed, 70))
    assert sorted(letters(unpressed, dict(decide_plan(unpressed).choice))) == ["H", "L"]


def _with_workspace(problem: Problem, workspace: int) -> tuple[UnitProfile, ...]:
    """Stored state of each unit needs that much more in its own backward."""
    return tuple(
        replace(
            profile,
            variants=tuple(
                replace(v, workspace_bytes=workspace if v.action is Action.STORE else 0) for v in profile.variants
            ),
        )
        for profile in problem.units
    )


def decide_plan(problem: Problem) -> Plan:
    plan = decide(problem)
    assert isinstance(plan, Plan)
    assert plan.solver is Solver.DYNAMIC
    check(problem, plan)
    return plan


def test_linear_risk_is_added_up() -> None:
    layer = (compressed(10, 1.0, risk=0.004),)
    # in squares all four would cost 0.008
    problem = captured(*[layer] * 4, budget=1000, risk_budget=0.0085)
    plan = decide_plan(problem)
    assert plan.count(Action.COMPRESS) == 2
    assert plan.risk == pytest.approx(0.008)


def test_weights_are_rounded_up() -> None:
    # two of 511.5 intervals and one of 1 each fit into 1024; rounded up they take 1026
    layers = [(compressed(1, 1.0, risk=risk),) for risk in (511.5, 511.5, 1.0)]
    assert decide_plan(captured(*layers, budget=1000, risk_budget=1024.0)).risk == 512.5
    layers = [(stored(held, 1.0),) for held in (1023, 1023, 2)]
    # a last unit of no bytes, in whose backward all others are held
    problem = captured(*layers, (stored(0, 0.5),), budget=2048, q="H")
    assert evaluate(problem, all_of(problem, "H")).feasible
    assert decide_plan(problem).saved_seconds == 2.5


def test_ties_go_to_the_smaller_risk() -> None:
    for risks in itertools.permutations((0.003, 0.002, 0.0020001)):
        problem = captured(*[(compressed(10, 0.1, risk=risk),) for risk in risks], budget=1000, risk_budget=0.0055)
        plan = decide_plan(problem)
        # one interval tells 0.002 from 0.003 but not from 0.0020001; all of them save the same
        assert plan.count(Action.COMPRESS) == 2
        assert plan.risk == pytest.approx(0.0040001, rel=1e-9)
    for risks in ((0.0020001, 0.002), (0.002, 0.0020001)):
        single = captured(*[(compressed(10, 0.1, risk=risk),) for risk in risks], budget=10, risk_budget=0.003)
        assert decide_plan(single).risk == 0.002


def test_equal_seconds_in_any_order_are_a_tie() -> None:
    # as floats, 0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1
    orders = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)]
    for first, second in (orders, orders[::-1]):
        layers = [(compressed(1, seconds, risk=0.002),) for seconds in first]
        layers += [(compressed(1, seconds, risk=0.001),) for seconds in second]
        problem = captured(*layers, budget=1000, risk_budget=0.0061)
        plan = decide_plan(problem)
        assert plan.risk <= 0.0061
        assert plan.saved_seconds == pytest.approx(max_seconds(problem))


def max_seconds(problem: Problem) -> float:
    best = brute_force(problem)
    assert isinstance(best, Plan)
    return best.saved_seconds


def test_a_unit_without_a_risk_slope_is_never_approximate() -> None:
    layers = ((stored(100, 1.0), compressed(10, 5.0, risk=0.0)), (stored(100, 1.0), compressed(10, 0.9, risk=0.001)))
    problem = captured(*layers, budget=120, risk_budget=1.0)
    assert letters(problem, dict(decide_plan(problem).choice)) == "RL"
    before = replace(problem, prepared=None)
    plans = capture_plans(before)
    assert not isinstance(plans, Infeasible)
    assert [letters(before, dict(plan.choice)) for plan in plans] == ["RR", "RL", "HL"]
    # a slope that this microbatch's exposure makes nothing of is a measured one
    unexposed = problem.now(exposures={unit_id(1): 0.0}, risk_budget=0.0)
    assert letters(unexposed, dict(decide_plan(unexposed).choice)) == "RL"
    with pytest.raises(UsageError, match=r"layers\.0"):
        decide(replace(problem, allowed={unit_id(0): ("L",)}))


def test_infinite_exposure_and_no_risk_budget_leave_nothing_approximate() -> None:
    layers = [(stored(100, 1.0), compressed(10, 0.9, risk=0.001))] * 2
    problem = captured(*layers, budget=1000, risk_budget=1.0)
    assert letters(problem, dict(decide_plan(problem).choice)) == "LL"
    violent = problem.now(exposures={unit_id(0): math.inf})
    assert letters(violent, dict(decide_plan(violent).choice)) == "RL"
    assert letters(problem, dict(decide_plan(problem.now(risk_budget=0.0)).choice)) == "RR"


def test_nothing_on_the_host() -> None:
    layer = (stored(100, 2.0, name="O", place=Place.HOST), stored(100, 1.0))
    units = (unit(0, replayed(0), *layer),)
    problem = Problem(units, budget_bytes=200, host_budget_bytes=200, linear_risk=True)
    plans = capture_plans(problem)
    assert not isinstance(plans, Infeasible)
    assert [letters(problem, dict(plan.choice)) for plan in plans] == ["R", "H", "H"]
    # stored on the host by somebody else, it can only be replayed
    assert letters(problem, dict(decide_plan(problem.after_forward({unit_id(0): "O"})).choice)) == "R"


def test_greedy_answers_where_rounding_up_leaves_nothing() -> None:
    # no replay fits; the last unit leaves 1200 bytes, in halves of which the others take 1 and 2
    held = (500, 700, 100)
    units = tuple(unit(i, replayed(0, workspace=4096), stored(bytes_, 1.0)) for i, bytes_ in enumerate(held))
    problem = Problem(units, budget_bytes=sum(held), linear_risk=True)
    problem = problem.after_forward(all_of(problem, "H"))
    plan = decide(problem, intervals=2)
    assert isinstance(plan, Plan)
    assert plan.solver is Solver.GREEDY
    assert plan.count(Action.STORE) == 3
    missing = decide(replace(problem, budget_bytes=sum(held) - 1))
    assert isinstance(missing, Infeasible)
    assert missing.missing_bytes > 0


@pytest.mark.parametrize("risk_budget", [0.0, 0.03, 1.0])
def test_capture_plans_keep_their_share_of_the_headroom(risk_budget: float) -> None:
    problem = replace(decoder(12, 3, share=0.5, noise=0.2, risk_budget=risk_budget), linear_risk=True)
    plans = capture_plans(problem)
    assert not isinstance(plans, Infeasible)
    least = evaluate(problem, all_of(problem, REPLAY)).peak_bytes
    for share, plan in zip(HEADROOMS, plans, strict=True):
        check(problem, plan)
        assert plan.peak_bytes <= least + share * (problem.budget_bytes - least)
        assert (plan.count(Action.COMPRESS) > 0) == (risk_budget > 0 and share > 0)
    seconds = [plan.saved_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]
    # what was not captured would not have fitted
    assert plans[-1].peak_bytes > problem.budget_bytes - 600 * MIB


def test_every_decision_of_a_frontier_holds_and_is_at_least_its_estimate_less_rounding() -> None:
    problem = replace(decoder(8, 3, share=0.5, noise=0.2), linear_risk=True)
    frontier = paper_frontier(problem)
    assert isinstance(frontier, PaperFrontier)
    for predicted in (0.0, 0.005, 0.02, math.inf):
        row = frontier.prepare(predicted, (0.5, 1.0, 2.0))
        check(problem.now(risk_budget=1.0), row.plan)
        for true in (math.nan, 0.0, predicted / 2, predicted, math.inf):
            plan = row.decide(true)
            limit = true if true > 0 else 0.0
            check(row.problem.now(risk_budget=min(limit, 1.0)), plan)
            again = row.decide_in(row.problem.now(risk_budget=min(limit, 1.0)))
            assert isinstance(again, Plan)
            assert again.choice == plan.choice or limit > 1
            smaller = row.worth(true * (1 - 8 / 1024)) + row.prepare_seconds
            # one unit's worth of memory may be lost to rounding: q fills the headroom to the last byte
            assert plan.saved_seconds >= smaller - 0.0125
            assert plan.saved_seconds - row.prepare_seconds <= row.worth(math.inf) + 0.0125


def test_prepare_weighs_what_may_come() -> None:
    # storing the first saves little; compressing it much, but encoding costs more than a violent truth gives back
    layer = (stored(100, 0.01), compressed(10, 1.0, risk=0.001, prepare=0.4))
    problem = Problem((unit(0, replayed(0), *layer),), budget_bytes=50, linear_risk=True)
    frontier = paper_frontier(problem)
    assert isinstance(frontier, PaperFrontier)
    assert frontier.prepare(0.001).plan.count(Action.COMPRESS) == 1
    assert frontier.prepare(0.0009).plan.count(Action.COMPRESS) == 0
    assert frontier.prepare(0.001, (0.5, 1.0, 3.0)).plan.count(Action.COMPRESS) == 1
    assert frontier.prepare(0.001, (1.0, 2.0, 3.0)).plan.count(Action.COMPRESS) == 0


def test_decisions_follow_bytes_and_exposures() -> None:
    problem = replace(decoder(6, 3, share=0.6), linear_risk=True)
    frontier = paper_frontier(problem)
    assert isinstance(frontier, PaperFrontier)
    row = frontier.prepare(0.02)
    plain = row.decide(0.02)
    higher = row.problem.now(risk_budget=0.02, base_backward_bytes=row.problem.base_backward_bytes + 400 * MIB)
    less = row.decide_in(higher)
    assert isinstance(less, Plan)
    check(higher, less)
    assert less.saved_seconds < plain.saved_seconds
    exposed = next(profile.unit for profile in problem.units if plain.actions[profile.unit] is Action.COMPRESS)
    other = row.decide_in(row.problem.now(risk_budget=0.02, exposures={exposed: 100.0}))
    assert isinstance(other, Plan)
    assert other.actions[exposed] is not Action.COMPRESS
    gone = row.decide_in(row.problem.now(budget_bytes=1))
    assert isinstance(gone, Infeasible)
    with pytest.raises(UsageError, match="another q-plan"):
        row.decide_in(row.problem.after_forward(all_of(problem, REPLAY)))


def test_made_alike_every_time() -> None:
    problem = replace(decoder(10, 4, share=0.4, noise=0.1), linear_risk=True)
    answers = []
    for _ in range(2):
        frontier = paper_frontier(problem)
        assert isinstance(frontier, PaperFrontier)
        row = frontier.prepare(0.03, (0.7, 1.3))
        answers.append((row.plan, row.decide(0.02), row.worth(0.02)))
    assert answers[0] == answers[1]


def test_nothing_is_solved_before_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[Problem] = []
    monkeypatch.setattr("ds_hilore.planning.paper._solve", lambda problem, *rest: solved.append(problem))
    frontier = paper_frontier(replace(decoder(4, 3, share=0.5), linear_risk=True))
    assert isinstance(frontier, PaperFrontier)
    row = frontier.prepare(0.01, (0.5, 2.0))
    row.worth(0.01)
    assert not solved
    row.decide(0.01)
    assert len(solved) == 1


def test_the_interface_is_that_of_a_frontier() -> None:
    problem = replace(decoder(3, 3, share=0.5), linear_risk=True)
    usual, paper = first_frontier(problem), paper_frontier(problem)
    assert not isinstance(usual, Infeasible)
    assert not isinstance(paper, Infeasible)
    rows: tuple[Prepared | PaperPrepared, ...] = (usual.prepare(0.01, (1.0,)), paper.prepare(0.01, (1.0,)))
    for row in rows:
        assert row.problem.prepared == row.plan.choice
        assert isinstance(row.decide(0.01), Plan)
        assert isinstance(row.decide_in(row.problem.now(risk_budget=0.01)), Plan)
        assert row.worth(0.01) >= row.worth(0.0)
        assert row.prepare_seconds >= 0


def test_refusals() -> None:
    before = replace(decoder(3, 3, share=0.5), linear_risk=True)
    with pytest.raises(UsageError, match="after forward"):
        decide(before)
    after = before.after_forward(all_of(before, "L0"))
    with pytest.raises(UsageError, match="before forward"):
        capture_plans(after)
    for squares in (replace(before, linear_risk=False), replace(after, linear_risk=False)):
        with pytest.raises(UsageError, match="linear_risk"):
            decide(squares) if squares.prepared is not None else paper_frontier(squares)
    with pytest.raises(UsageError, match="may not be replayed"):
        paper_frontier(replace(before, allowed={unit_id(0): ("H", "L0")}))
    short = paper_frontier(with_budget(before, -0.5))
    assert isinstance(short, Infeasible)
    assert short.missing_bytes > 0
