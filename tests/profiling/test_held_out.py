"""What is judged before plans may compress, and what follows from it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import JUDGING_PASSES, Calibration, Observation, Place
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.held_out import LEAST, MARGIN, MICROBATCHES, SINGLES, HeldOut, Outcome

SMALL, LARGE = Treatment.parse("L:mlp=bf16"), Treatment.parse("L:mlp=int8")
UNITS = [UnitId(f"layers.{k}") for k in range(7)]
USABLE = [(unit, [SMALL, LARGE]) for unit in UNITS]
TOGETHER = {UNITS[0]: LARGE, UNITS[3]: SMALL}
PLACE = Place("mlp", "bf16")


def calibration(**cost: float) -> Calibration:
    made = Calibration(cost=Cost(**cost))  # type: ignore[arg-type]
    for microbatch in range(4):
        made.note(Observation(PLACE, UNITS[0], microbatch, 1.0 + microbatch, 0.01, 0.02 * (1 + microbatch)))
    return made


def judged(held_out: HeldOut, ratio: float, microbatches: int = LEAST) -> Outcome:
    """A round in which every error is `ratio` times the predicted one."""
    for _ in range(microbatches):
        wanted = held_out.wanted(USABLE, TOGETHER)
        held_out.begin()
        for treatments in wanted:
            held_out.note(treatments, 0.1, 0.1 * ratio)
    return held_out.close(*held_out.squares())


def test_units_take_turns_and_so_do_their_variants() -> None:
    held_out = HeldOut(calibration())
    alone: list[tuple[UnitId, Treatment]] = []
    while len(alone) < 2 * len(UNITS):
        *singles, several = held_out.wanted(USABLE, TOGETHER)
        assert several == TOGETHER and len(singles) == SINGLES
        alone += [pair for single in singles for pair in single.items()]
    first = alone[: len(UNITS)]
    assert {unit for unit, _ in first} == set(UNITS) and {treatment for _, treatment in first} == {SMALL}
    assert Counter(alone[: 2 * len(UNITS)]).most_common(1)[0][1] == 1, "another variant the next time"


def test_without_a_plan_those_alone_are_put_together() -> None:
    *singles, several = HeldOut(calibration()).wanted(USABLE, {})
    assert several == {unit: treatment for single in singles for unit, treatment in single.items()}
    assert HeldOut(calibration()).wanted(USABLE[:1], {}) == [{UNITS[0]: SMALL}]
    assert HeldOut(calibration()).wanted([], TOGETHER) == []


@given(st.floats(0, Cost.PLANNED_UPDATES), st.integers(1, 100))
def test_two_microbatches_are_judged_whatever_is_left(left: float, passes: int) -> None:
    """Of the updates that calibration may take; more of them only as far as there is room."""
    made = calibration(seconds=Cost.PLANNED_UPDATES - left, passes=passes, slowest=1.0, update_seconds=1.0)
    held_out = HeldOut(made)
    count = 0
    while not (held_out.full or held_out.out_of_room):
        wanted = held_out.wanted(USABLE, TOGETHER)
        held_out.begin()
        assert 2 <= len(wanted) <= SINGLES + 1
        made.cost.note(1.0 + len(wanted), 1 + len(wanted))
        count += 1
    assert LEAST <= count <= MICROBATCHES
    assert made.cost.seconds <= max(left, JUDGING_PASSES) + Cost.PLANNED_UPDATES - left + 1e-9


def test_judged_microbatches_have_fitted_nothing_and_are_counted_on() -> None:
    made = calibration()
    held_out = HeldOut(made)
    judged(held_out, 0.5)
    assert {each.microbatch for each in made.judgements} == {4, 5}
    assert {each.unit is None for each in made.judgements} == {True, False}


def test_predictions_that_hold() -> None:
    made = calibration()
    held_out = HeldOut(made)
    assert judged(held_out, 0.9) is Outcome.HOLDS
    assert held_out.ratio == pytest.approx(0.9) and made.raised == 1.0
    assert "0.90 times" in str(held_out)


def test_slopes_that_were_too_low_are_raised_and_judged_anew() -> None:
    made = calibration()
    before = made.risk(0, 1, {("mlp", "bf16"): 0.01})
    held_out = HeldOut(made)
    assert before is not None and judged(held_out, 1.5) is Outcome.AGAIN
    assert made.risk(0, 1, {("mlp", "bf16"): 0.01}) == pytest.approx(before * 1.5 * MARGIN)
    assert judged(held_out, 1.0 / MARGIN) is Outcome.HOLDS


@pytest.mark.parametrize("ratio", [1.01, math.inf, math.nan])
def test_predictions_that_never_hold_are_given_up(ratio: float) -> None:
    held_out = HeldOut(calibration())
    first = judged(held_out, ratio)
    assert first is (Outcome.AGAIN if ratio < math.inf else Outcome.FAILS)
    if first is Outcome.AGAIN:
        assert judged(held_out, ratio) is Outcome.FAILS


def test_audits_of_an_earlier_run_count() -> None:
    made = calibration()
    for _ in range(40):
        made.note_audit(0.01, 0.02)
    assert judged(HeldOut(made), 1.8) is Outcome.HOLDS, "budgets are divided by what audits have found"


def test_without_exposure_nothing_is_learnt() -> None:
    held_out = HeldOut(calibration())
    assert held_out.close(0.0, 0.0) is Outcome.AGAIN and held_out.close(0.0, 0.0) is Outcome.FAILS
    assert held_out.ratio is None and "nothing" in str(held_out)
    assert HeldOut(calibration()).close(1.0, 0.0) is Outcome.FAILS


def test_errors_together_count_where_there_are_any() -> None:
    held_out = HeldOut(calibration())
    held_out.begin()
    held_out.note({UNITS[0]: SMALL}, 1.0, 100.0)
    assert held_out.squares() == (10000.0, 1.0)
    held_out.note(TOGETHER, 3.0, 2.0)
    assert held_out.squares() == (4.0, 9.0)
