"""What storing a unit saves where its replay would be pruned."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.types import Action, Shape, UnitId, UnitProfile, Variant
from ds_hilore.profiling.fit import Rate
from ds_hilore.profiling.measure import Measurements, UnitFootprint, UnitRates
from ds_hilore.profiling.pruned import PRUNE_BELOW, Pruned, pruned

REPLAY = Variant("R", Action.RECOMPUTE, 10)
KEEPING = Variant("R:attention", Action.RECOMPUTE, 12, saved_seconds=1.0)
UNIT = UnitProfile(UnitId("layers.0", 0), "Layer", (REPLAY, Variant("H", Action.STORE, 50, saved_seconds=4.0), KEEPING))


def names(profile: UnitProfile) -> list[str]:
    return [variant.name for variant in profile.variants]


def test_half_dead_rows_are_best_replayed() -> None:
    """4 s of replay and 6 s of backward: a pruned R takes under 6 s, a stored unit 6."""
    assert names(pruned(UNIT, 0.5, replayed_s=10.0)) == ["R"]


def test_few_dead_rows_leave_a_part_of_the_gain() -> None:
    stored = pruned(UNIT, 0.8, replayed_s=10.0).variant("H")
    assert stored.saved_seconds == pytest.approx(4.0 - 10.0 * (1 - 0.8 / PRUNE_BELOW))


def test_encoding_counts() -> None:
    lossy = Variant("L:mlp=int8", Action.COMPRESS, 20, saved_seconds=4.0, prepare_seconds=3.5, risk=1.0)
    unit = UnitProfile(UNIT.unit, UNIT.unit_class, (REPLAY, lossy))
    assert names(pruned(unit, 0.8, replayed_s=10.0)) == ["R"]


@given(st.floats(0.0, 1.0), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_never_more_than_unpruned_and_always_r(share: float, saved: float, replayed_s: float) -> None:
    unit = UnitProfile(UNIT.unit, UNIT.unit_class, (REPLAY, Variant("H", Action.STORE, 50, saved_seconds=saved)))
    found = pruned(unit, share, replayed_s)
    assert found.variants[0] == REPLAY
    assert all(0 < variant.saved_seconds <= saved for variant in found.variants[1:])


@given(st.floats(0.0, 1.0))
def test_shares_are_rounded_up_to_one_of_few(live: float) -> None:
    rounded = Pruned.of(live)
    assert live <= rounded.live <= min(1.0, live + 0.125) and rounded.live * 8 == int(rounded.live * 8)


def learnt(backward_s: float | None, rates: Mapping[str, UnitRates] = MappingProxyType({})) -> Measurements:
    seen = Measurements(rates)
    shape = Shape(2, 5)
    seen.note_forward([UnitFootprint(UnitId("layers.0", 0), "Layer", shape, 10, 50)])
    seen.replay_receiver(UnitId("layers.0", 0))(4.0)
    if backward_s is not None:
        seen.note_seconds(UnitId("layers.0", 0), "R", shape, None, backward_s)
    return seen


def test_profiles_of_pruned_microbatches() -> None:
    seen, shape = learnt(10.0), Shape(2, 5)
    assert names(seen.profiles(shape)[0]) == ["R", "H"]
    assert names(seen.profiles(shape, Pruned(0.5))[0]) == ["R"]
    assert names(seen.profiles(shape)[0]) == ["R", "H"], "the two are kept apart"


def test_classes_that_are_not_pruned_stay_as_they_are() -> None:
    seen, shape = learnt(10.0), Shape(2, 5)
    assert seen.profiles(shape, Pruned(0.5, frozenset({"Layer"}))) == seen.profiles(shape)


def test_a_backward_that_was_not_timed_is_taken_to_last_as_long_as_a_replay() -> None:
    (unit,) = learnt(None).profiles(Shape(2, 5), Pruned(0.75))
    assert unit.variant("H").saved_seconds == pytest.approx(4.0 - 8.0 * (1 - 0.75 / PRUNE_BELOW))


def test_or_as_the_cost_model_has_it_at_the_speed_of_this_machine() -> None:
    rates = UnitRates(backward_s=Rate(per_token=3.0), replay_s=Rate(per_token=2.0))
    seen = learnt(None, {"Layer": rates})  # 10 tokens: 4 s of replay where 20 s were expected
    (unit,) = seen.profiles(Shape(2, 5), Pruned(0.75))
    assert unit.variant("H").saved_seconds == pytest.approx(4.0 - (4.0 + 30.0 / 5) * (1 - 0.75 / PRUNE_BELOW))
