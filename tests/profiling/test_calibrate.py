"""What calibration asks for, what it makes of the answers, and what it keeps apart."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import (
    BANDS,
    JUDGING_PASSES,
    Calibration,
    Intervention,
    Observation,
    Place,
    depth_band,
)
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.calibration_layout import as_dict, from_dict
from ds_hilore.profiling.regression import ENOUGH, Verdict

MLP = ("mlp", "int8:64")
QK = ("attention_qk", "bf16")
CODECS = {"dense": (MLP, QK), "narrow": (MLP,)}


def roster(count: int, classes: str = "d") -> list[tuple[UnitId, int, str]]:
    """`classes`: d or n, repeated."""
    names = {"d": "dense", "n": "narrow"}
    return [(UnitId(f"layers.{k}"), k, names[classes[k % len(classes)]]) for k in range(count)]


def observed(wanted: Intervention, exposure: float, error: float, kappa: float) -> Observation:
    """What an intervention gives where y = kappa E e."""
    return Observation(wanted.place, wanted.unit, wanted.microbatch, exposure, error, kappa * exposure * error)


def filled(place: Place, pairs: list[tuple[float, float]], calibration: Calibration | None = None) -> Calibration:
    """One observation per microbatch, of (exposure, gradient error), at an encoding error of 1."""
    calibration = calibration or Calibration()
    for microbatch, (exposure, error) in enumerate(pairs):
        calibration.note(Observation(place, UnitId("u"), microbatch, exposure, 1.0, error))
    return calibration


EXACT = [(1.0, 2.0), (3.0, 6.0), (2.0, 4.0), (5.0, 10.0)]
LOOSE = [(1.0, 1.0), (1.0, 3.0), (1.0, 2.0), (1.0, 1.5)]
BACKWARDS = [(1.0, 8.0), (2.0, 4.0), (4.0, 2.0), (8.0, 1.0)]


# -- depth ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 9))
@settings(deadline=None)
def test_bands_rise_with_depth_and_are_alike_in_size(units: int, bands: int) -> None:
    found = [depth_band(position, units, bands) for position in range(units)]
    assert found == sorted(found) and found[0] == 0 and found[-1] <= bands - 1
    sizes = Counter(found).values()
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(units, bands)


def test_a_unit_that_there_is_not_has_no_depth() -> None:
    for position, units, bands in ((3, 3, 3), (-1, 3, 3), (0, 0, 3), (0, 1, 0)):
        with pytest.raises(UsageError, match="in none of"):
            depth_band(position, units, bands)


# -- the schedule --------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.sampled_from(["d", "n", "dn", "dnn"]), st.integers(1, 3))
@settings(deadline=None)
def test_every_place_once_per_microbatch_and_every_unit_before_any_comes_twice(
    count: int, classes: str, rounds: int
) -> None:
    units = roster(count, classes)
    members: dict[Place, set[UnitId]] = {}
    for unit, position, unit_class in units:
        for group, codec in CODECS[unit_class]:
            members.setdefault(Place(group, codec, depth_band(position, count)), set()).add(unit)
    calibration = Calibration()
    visits: dict[Place, list[UnitId]] = {place: [] for place in members}
    longest = max(map(len, members.values()))
    for microbatch in range(rounds * longest):
        wanted = calibration.interventions(microbatch, units, CODECS)
        assert sorted(each.place for each in wanted) == sorted(members)  # not one per unit
        for each in wanted:
            assert each.microbatch == microbatch
            visits[each.place].append(each.unit)
    for place, units_of in members.items():
        size = len(units_of)
        for start in range(0, len(visits[place]) - size + 1, size):
            assert set(visits[place][start : start + size]) == units_of


@given(st.integers(1, 60), st.integers(1, 16))
@settings(deadline=None)
def test_first_visits_spread_over_the_band(count: int, few: int) -> None:
    """However few microbatches there are: no gap between visited units is longer than twice their share."""
    calibration = Calibration(bands=1)
    units = roster(count, "n")
    few = min(few, count)
    seen = {calibration.interventions(m, units, CODECS)[0].unit for m in range(few)}
    assert len(seen) == few
    marks = [*sorted(position for unit, position, _ in units if unit in seen), count]
    assert max(b - a for a, b in pairwise(marks)) <= 2 * math.ceil(count / few)


def test_what_is_tight_is_visited_no_more_and_the_rest_goes_on() -> None:
    calibration, units = Calibration(), roster(6, "n")
    generator = random.Random(3)
    asked: Counter[Place] = Counter()
    for microbatch in range(12):
        for wanted in calibration.interventions(microbatch, units, CODECS):
            asked[wanted.place] += 1
            factor = 1.0 if wanted.place.depth == 0 else math.exp(generator.gauss(0, 0.6))
            calibration.note(observed(wanted, generator.uniform(1, 2), 0.01, 5.0 * factor))
    assert asked[Place(*MLP, 0)] == ENOUGH
    assert asked[Place(*MLP, 1)] == asked[Place(*MLP, 2)] == 12


def test_all_tight_is_over() -> None:
    calibration, units = Calibration(), roster(3)
    made = 0
    for microbatch in range(16):
        wanted = calibration.interventions(microbatch, units, CODECS)
        made += len(wanted)
        for each in wanted:
            calibration.note(observed(each, 1.0 + microbatch, 0.01, 5.0))
    assert wanted == [] and made == ENOUGH * BANDS * 2


def test_what_overflowed_is_visited_no_more() -> None:
    calibration, units = Calibration(), roster(3, "n")
    first = calibration.interventions(0, units, CODECS)[0]
    calibration.note(Observation(first.place, first.unit, 0, 1.0, math.inf, 1.0))
    assert first.place not in [each.place for each in calibration.interventions(1, units, CODECS)]


# -- cost ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40),
    st.floats(0.01, 100.0),
    st.floats(0.01, 1.0),
    st.integers(1, 64),
)
@settings(deadline=None)
def test_cost_keeps_away_from_thirty_updates(count: int, update_s: float, share: float, microbatches: int) -> None:
    """With passes of up to a whole update each; nothing is ever tight."""
    calibration = Calibration(cost=Cost(update_seconds=update_s))
    for microbatch in range(microbatches):
        wanted = calibration.interventions(microbatch, roster(count), CODECS)
        if wanted:
            calibration.cost.note((1 + len(wanted)) * share * update_s, 1 + len(wanted))
    assert Cost.PLANNED_UPDATES < Cost.MOST_UPDATES == 30
    assert calibration.cost.seconds <= Cost.PLANNED_UPDATES * update_s * (1 + 1e-9)
    assert calibration.cost.updates == pytest.approx(calibration.cost.seconds / update_s)
    # and it was used: what is left, but for judging, is less than an intervention and its exact gradient, or nothing
    # stopped it
    all_of_it = microbatches * (1 + 2 * min(count, BANDS)) * share
    kept = (JUDGING_PASSES + 2) * share if calibration.cost.passes else JUDGING_PASSES + 2
    assert calibration.cost.seconds >= update_s * min(all_of_it, Cost.PLANNED_UPDATES - kept) * (1 - 1e-9)


def test_places_that_did_not_fit_are_next() -> None:
    """Two passes' room per microbatch at a time, for six places: all had their turn before any has two."""
    calibration, units = Calibration(), roster(3)
    turns: list[Place] = []
    for microbatch in range(9):
        calibration.cost = Cost(seconds=15.0, passes=15, slowest=1.0, update_seconds=1.0)
        turns += [each.place for each in calibration.interventions(microbatch, units, CODECS)]
    assert len(turns) == 18
    for start in range(0, 18, 6):
        assert len(set(turns[start : start + 6])) == 6


def test_passes_never_timed_count_as_whole_updates() -> None:
    """36 places at once would take longer than all of it may before the first pass was timed."""
    calibration = Calibration(cost=Cost(update_seconds=2.0))
    many = {"dense": [(f"group{k}", "bf16") for k in range(12)]}
    assert len(Calibration().interventions(0, roster(9), many)) == 36
    assert len(calibration.interventions(0, roster(9), many)) == 23 - JUDGING_PASSES
    calibration.cost.note(24.0, 24)  # half an update each: room for 24 more, one of them exact
    assert len(calibration.interventions(1, roster(9), many)) == 23 - JUDGING_PASSES
    assert len(set(calibration.places)) == 2 * (23 - JUDGING_PASSES)


def test_no_room_for_one_intervention_and_its_exact_gradient_is_over() -> None:
    calibration = Calibration(cost=Cost(seconds=Cost.PLANNED_UPDATES - 1.5, passes=30, slowest=1.0, update_seconds=1.0))
    assert calibration.interventions(0, roster(3), CODECS) == []
    assert not calibration.asked


def test_what_judging_takes_is_left() -> None:
    for passes, wanted in ((JUDGING_PASSES + 2.0, 1), (JUDGING_PASSES + 1.9, 0)):
        calibration = Calibration(cost=Cost(Cost.PLANNED_UPDATES - passes, passes=1, slowest=1.0, update_seconds=1.0))
        assert len(calibration.interventions(0, roster(3), CODECS)) == wanted


def test_without_update_times_nothing_is_capped() -> None:
    cost = Cost()
    cost.note(1e9, 3)
    assert cost.passes_left == math.inf and cost.updates is None


@pytest.mark.parametrize(("seconds", "passes"), [(-1.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 0)])
def test_impossible_costs_are_refused(seconds: float, passes: int) -> None:
    with pytest.raises(UsageError, match="cannot have taken"):
        Cost().note(seconds, passes)


# -- slopes --------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1.0), st.floats(1e-3, 1e3), st.integers(1, 24))
@settings(deadline=None)
def test_planted_slopes_are_found_and_add_up_over_groups(
    kappa: float, error: float, exposure: float, count: int
) -> None:
    """mlp at kappa, attention_qk at 7 kappa, deeper ones steeper."""
    calibration, units = Calibration(), roster(count)
    for microbatch in range(ENOUGH):
        for wanted in calibration.interventions(microbatch, units, CODECS):
            true = kappa * (1 + wanted.place.depth) * (7 if wanted.place.group == "attention_qk" else 1)
            calibration.note(observed(wanted, exposure * (1 + microbatch), error, true))
    assert calibration.disabled() == {}
    for _, position, _ in units:
        here = kappa * (1 + depth_band(position, count))
        assert calibration.risk(position, count, {MLP: 0.5}) == pytest.approx(0.5 * here)
        assert calibration.risk(position, count, {MLP: 0.5, QK: 0.1}) == pytest.approx((0.5 + 0.7) * here)
    assert calibration.risk(0, count, {}) == 0


@given(st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_kappa_is_per_exposure(c: float) -> None:
    one = filled(Place(*MLP), LOOSE).used(Place(*MLP))
    other = filled(Place(*MLP), [(c * x, y) for x, y in LOOSE]).used(Place(*MLP))
    assert other.kappa == pytest.approx(one.kappa / c)
    assert other.kappa_upper == pytest.approx(one.kappa_upper / c)


def test_risk_is_on_the_safe_side() -> None:
    calibration = filled(Place(*MLP), LOOSE)
    used = calibration.used(Place(*MLP))
    assert used.fit.usable and not used.pooled and used.kappa < used.kappa_upper
    assert calibration.risk(0, 3, {MLP: 0.1}) == pytest.approx(0.1 * used.kappa_upper)


def test_later_observations_change_the_slope() -> None:
    calibration = filled(Place(*MLP), EXACT)
    before = calibration.used(Place(*MLP)).kappa
    calibration.note(Observation(Place(*MLP), UnitId("u"), 9, 5.0, 1.0, 12.0))
    assert calibration.used(Place(*MLP)).kappa > before


# -- places that may not be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [
        (BACKWARDS, Verdict.CONTRADICTORY),
        ([(1.0, 0.0)] * 4, Verdict.CONTRADICTORY),
        ([*EXACT, (1.0, math.nan)], Verdict.NOT_FINITE),
        ([*EXACT, (math.inf, 1.0)], Verdict.NOT_FINITE),
    ],
)
def test_a_bad_place_is_disabled_and_named_and_its_neighbours_are_not(
    planted: list[tuple[float, float]], verdict: Verdict
) -> None:
    """Nor do they lend it their slope, nor does it spoil theirs."""
    calibration = filled(Place(*MLP, 1), planted)
    filled(Place(*MLP, 0), EXACT, calibration)
    filled(Place(*MLP, 2), EXACT[:1], calibration)
    filled(Place(*QK, 1), EXACT, calibration)
    used = calibration.used(Place(*MLP, 1))
    assert used.fit.verdict is verdict and not used.pooled
    assert calibration.disabled() == {Place(*MLP, 1): used.fit.reason}
    assert calibration.risk(1, 3, {MLP: 0.1}) is None
    assert calibration.risk(1, 3, {QK: 0.1, MLP: 0.1}) is None
    assert calibration.risk(1, 3, {QK: 0.1}) == pytest.approx(0.2)
    assert calibration.risk(0, 3, {MLP: 0.1}) == pytest.approx(0.2)
    borrowed = calibration.used(Place(*MLP, 2))
    assert borrowed.pooled and borrowed.kappa == pytest.approx(2.0)
    assert any(
        "not compressed: mlp=int8:64 at depth 1" in line and used.fit.reason in line for line in calibration.lines()
    )


def test_an_encoding_error_that_is_not_finite_is_not_used() -> None:
    calibration = filled(Place(*MLP), EXACT)
    for error in (math.nan, math.inf):
        assert calibration.risk(0, 3, {MLP: error}) is None


def test_nobody_knows_what_was_never_observed() -> None:
    assert Calibration().risk(0, 3, {MLP: 0.1}) is None
    assert filled(Place(*MLP), EXACT).risk(0, 3, {QK: 0.1}) is None


def test_asked_and_never_answered_is_disabled() -> None:
    calibration = Calibration()
    wanted = calibration.interventions(0, roster(1, "n"), CODECS)
    assert calibration.disabled() == {wanted[0].place: "nothing was observed"}


# -- pooling -------------------------------------------------------------------------------------------------------


def test_too_few_observations_borrow_from_all_depths_but_not_less_than_the_steepest() -> None:
    calibration = filled(Place(*MLP, 0), EXACT)
    filled(Place(*MLP, 2), [(x, 3 * y) for x, y in EXACT], calibration)
    filled(Place(*MLP, 1), EXACT[:1], calibration)
    middle = calibration.used(Place(*MLP, 1))
    assert middle.pooled and middle.fit.usable
    assert middle.fit.count == 9 and middle.fit.microbatches == 4
    assert 2.0 < middle.kappa < 6.0 <= middle.kappa_upper
    assert not calibration.used(Place(*MLP, 0)).pooled and not calibration.used(Place(*MLP, 2)).pooled
    assert "judged together" in calibration.lines()[1] and "depth 1" in calibration.lines()[1]


def test_a_pool_of_too_little_disables() -> None:
    calibration = filled(Place(*MLP, 0), EXACT[:1])
    filled(Place(*MLP, 1), EXACT[:1], calibration)
    assert set(calibration.disabled()) == {Place(*MLP, 0), Place(*MLP, 1)}


def test_a_pool_does_not_mix_groups_or_codecs() -> None:
    calibration = filled(Place("mlp", "int8:64", 0), EXACT)
    for other in (Place("mlp", "fp8_e4m3", 1), Place("residual", "int8:64", 1)):
        filled(other, EXACT[:1], calibration)
        assert not calibration.used(other).fit.usable


# -- judging and audits --------------------------------------------------------------------------------------------


def test_what_judges_never_fitted_and_the_other_way_round() -> None:
    calibration = filled(Place(*MLP), EXACT)
    with pytest.raises(UsageError, match="microbatch 2 has fitted"):
        calibration.note_judged(UnitId("u"), 2, 0.1, 0.1)
    calibration.note_judged(UnitId("u"), 4, 0.1, 0.1)
    with pytest.raises(UsageError, match="microbatch 4 has judged"):
        calibration.note(Observation(Place(*MLP), UnitId("u"), 4, 1.0, 1.0, 1.0))
    with pytest.raises(UsageError, match="microbatch 4 has judged"):
        calibration.interventions(4, roster(3), CODECS)
    assert len(calibration.observations) == 4 and len(calibration.judgements) == 1


def test_agreement_over_units_and_over_microbatches() -> None:
    """Units are predicted in their true order, microbatches in the reverse of it."""
    calibration = Calibration()
    for unit, size in enumerate((1.0, 10.0, 100.0)):
        for microbatch, (guess, truth) in enumerate(((1.0, 1.3), (1.1, 1.2), (1.2, 1.1))):
            calibration.note_judged(UnitId(f"u{unit}"), microbatch, size * guess, size * truth)
    found = calibration.agreement()
    assert found.units == pytest.approx(1.0) and found.microbatches == pytest.approx(-1.0) and found.count == 9
    calibration.note_judged(UnitId("u0"), 0, math.nan, 1.0)
    assert calibration.agreement() == found
    assert "Spearman 1.00 over units, -1.00 over microbatches" in calibration.lines()[-1]


def test_where_several_units_were_measured_together_microbatches_are_ranked_by_them() -> None:
    calibration = Calibration()
    for microbatch, error in enumerate((1.0, 2.0, 3.0)):
        calibration.note_judged(UnitId("u"), microbatch, error, 1.0 / error)
        calibration.note_judged(UnitId("v"), microbatch, 9.0, 9.0)
        calibration.note_judged(None, microbatch, error, error)
    found = calibration.agreement()
    assert found.microbatches == pytest.approx(1.0) and found.units == pytest.approx(1.0)
    assert from_dict(as_dict(calibration)).agreement() == found


def test_agreement_of_too_little_is_unknown() -> None:
    calibration = Calibration()
    assert calibration.agreement().units is None and calibration.agreement().count == 0
    assert len(calibration.lines()) == 1
    calibration.note_judged(UnitId("u"), 0, 1.0, 1.0)
    assert calibration.agreement().units is calibration.agreement().microbatches is None
    assert "unknown" in calibration.lines()[-1]


def test_audits_move_the_coherence_and_not_the_risk() -> None:
    calibration = filled(Place(*MLP), EXACT)
    before = calibration.risk(0, 3, {MLP: 0.1})
    assert calibration.coherence == 1.0
    calibration.note_audit(0.01, 0.03)
    assert calibration.coherence == pytest.approx(math.sqrt(5))
    assert calibration.risk(0, 3, {MLP: 0.1}) == before


# -- what is told --------------------------------------------------------------------------------------------------


def test_exposures_are_means_by_microbatch_in_order() -> None:
    calibration = Calibration()
    for microbatch, exposure in ((2, 5.0), (0, 1.0), (0, 3.0)):
        calibration.note(Observation(Place(*MLP), UnitId("u"), microbatch, exposure, 1.0, 1.0))
    assert calibration.exposures() == [2.0, 5.0]


def test_cost_is_said_in_seconds_and_updates() -> None:
    calibration = filled(Place(*MLP), EXACT)
    calibration.cost = Cost(seconds=12.0, passes=6, slowest=2.0, update_seconds=4.0)
    assert calibration.lines()[0].endswith(
        "1 of 1 places may be compressed, from 4 observations of 4 microbatches; 12.0 s (3.0 updates)"
    )
    assert calibration.lines(20.0)[0].endswith("20.0 s (5.0 updates)")
    calibration.cost = Cost()
    assert calibration.lines(20.0)[0].endswith("20.0 s")


@pytest.mark.parametrize("values", [(-1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, -1.0)])
def test_an_observation_below_zero_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(UsageError, match="not below 0"):
        Observation(Place(*MLP), UnitId("u"), 0, *values)
