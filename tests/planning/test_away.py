"""Host memory in plans: only where not everything can stay, only where it saves more, and with room for what moves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_hilore.core.types import Action, Place, Variant
from ds_hilore.planning.away import first_with_host, leanest, moving_bytes
from ds_hilore.planning.frontier import Frontier, first_frontier
from ds_hilore.planning.problem import Infeasible, Problem, Row, evaluate
from tests.planning.planning_problems import replayed, stored, unit

STATE, INPUT = 100, 10


def _away(seconds: float, host: int = STATE) -> Variant:
    return Variant("O", Action.STORE, host, STATE, STATE, saved_seconds=seconds, place=Place.HOST)


def _input_away(seconds: float = 0.0) -> Variant:
    return Variant("O:input", Action.RECOMPUTE, INPUT, STATE, INPUT, saved_seconds=seconds, place=Place.HOST)


def _problem(units: int, budget: int, host: int, seconds: float = 1.0, lost: float = 0.0) -> Problem:
    variants = (replayed(INPUT, STATE - INPUT), stored(STATE, 1.0), _away(seconds), _input_away(-lost))
    profiles = tuple(unit(position, *variants) for position in range(units))
    return Problem(profiles, budget, host_budget_bytes=host)


def _names(problem: Problem) -> list[str]:
    found = first_with_host(problem, first_frontier)[1]
    assert isinstance(found, Frontier)
    return list(found.rows[0].plan.choice.values())


def test_nothing_moves_where_everything_fits() -> None:
    assert _names(_problem(4, 4 * STATE, host=10**6, seconds=1.5)) == ["H"] * 4


def test_nothing_moves_where_there_is_no_host_memory() -> None:
    assert "O" not in _names(_problem(4, 250, host=0))


def test_what_does_not_fit_on_the_device_goes_to_the_host() -> None:
    """240 bytes: two stored, or all of them away beside the one that moves."""
    problem = _problem(4, 240, host=10**6)
    found = first_with_host(problem, first_frontier)[1]
    assert isinstance(found, Frontier) and found.rows[0].plan.saved_seconds == 4.0
    assert "O" in found.rows[0].plan.choice.values()
    assert _names(_problem(4, 240, host=2 * STATE)).count("O") <= 2


def test_nothing_moves_where_that_saves_no_more() -> None:
    assert "O" not in _names(_problem(4, 250, host=10**6, seconds=0.01, lost=0.5))


def test_inputs_go_where_not_even_replaying_everything_fits() -> None:
    problem = _problem(30, 250, host=10**6, seconds=-1.0, lost=0.1)
    assert isinstance(first_frontier(replace(problem, host_budget_bytes=0)), Infeasible)
    names = _names(problem)
    assert "O:input" in names and set(names) <= {"R", "O:input", "H"}


def test_room_for_what_moves_is_in_every_row() -> None:
    problem = _problem(30, 260, host=10**6)
    answered, found = first_with_host(problem, first_frontier)
    assert isinstance(found, Frontier) and moving_bytes(problem.units) == STATE
    assert answered.base_forward_bytes == answered.base_backward_bytes == STATE
    plan = found.rows[0].plan
    peaks = {peak.row: peak.bytes for peak in evaluate(problem, plan.choice).peaks}
    assert peaks[Row.FORWARD] + STATE <= 260 and peaks[Row.BACKWARD] + STATE <= 260


def test_where_nothing_fits_the_answer_is_about_the_device() -> None:
    problem = _problem(4, 50, host=10**6)
    answered, found = first_with_host(problem, first_frontier)
    assert isinstance(found, Infeasible)
    assert all(v.place is Place.DEVICE for each in answered.units for v in each.variants)
    assert set(leanest(problem, "O:input").values()) == {"O:input"}
    assert set(leanest(replace(problem, host_budget_bytes=3 * INPUT), "O:input").values()) == {"R"}


def test_moving_bytes_of_a_plan() -> None:
    units = _problem(2, 1, 1).units
    ids = [each.unit for each in units]
    assert moving_bytes(units, dict.fromkeys(ids, "H")) == moving_bytes(units, {}) == 0
    assert moving_bytes(units, {ids[0]: "O:input"}) == INPUT
    assert moving_bytes(units, {ids[0]: "O:input", ids[1]: "O"}) == STATE


@pytest.mark.parametrize("seed", range(20))
def test_host_memory_never_makes_a_plan_worse(seed: int) -> None:
    rng = random.Random(seed)
    units = []
    for position in range(rng.randint(2, 12)):
        state, held = rng.randint(50, 150), rng.randint(5, 20)
        variants = [replayed(held, state), stored(held + state, rng.uniform(0.5, 2.0))]
        size = held + state
        away = Variant("O", Action.STORE, size, size, size, saved_seconds=rng.uniform(-0.5, 2.0), place=Place.HOST)
        units.append(unit(position, *variants, *([away] if rng.random() < 0.7 else [])))
    problem = Problem(tuple(units), rng.randint(150, 900), host_budget_bytes=rng.choice((0, 200, 10**6)))
    without = first_with_host(replace(problem, host_budget_bytes=0), first_frontier)[1]
    answered, found = first_with_host(problem, first_frontier)
    if isinstance(without, Frontier):
        assert isinstance(found, Frontier)
        assert found.rows[0].plan.saved_seconds >= without.rows[0].plan.saved_seconds
    if isinstance(found, Frontier):
        plan = found.rows[0].plan
        evaluation = evaluate(problem, plan.choice)
        assert evaluation.feasible and evaluation.host_bytes <= problem.host_budget_bytes
        moving = moving_bytes(problem.units, plan.choice)
        assert moving <= answered.base_forward_bytes
