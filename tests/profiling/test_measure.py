"""What the first updates teach about units, and profiles for other shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Shape, UnitId, Variant
from ds_hilore.profiling.fit import Rate
from ds_hilore.profiling.measure import Measurements, Relation, UnitFootprint, UnitRates

A, B = UnitId("a"), UnitId("b")


def row(tokens: int) -> Shape:
    return Shape(1, tokens)


def footprint(unit: UnitId, kind: str, tokens: int, inputs: int, stored: int | None = None) -> UnitFootprint:
    return UnitFootprint(unit, kind, row(tokens), inputs, stored)


def learnt(tokens: int = 10, other: int | None = None) -> Measurements:
    """A of class "A" stored, B of class "B" not; `other`: tokens of B."""
    seen = Measurements()
    b_tokens = tokens if other is None else other
    seen.note_forward([footprint(A, "A", tokens, 4 * tokens, 20 * tokens), footprint(B, "B", b_tokens, 30)])
    seen.replay_receiver(A)(2.0)
    return seen


def held(seen: Measurements, tokens: int, unit: int = 0, variant: str = "R") -> int:
    return seen.profiles(row(tokens))[unit].variant(variant).held_bytes


def saved(seen: Measurements, shape: Shape) -> float:
    return seen.profiles(shape)[0].variant("H").saved_seconds


# -- bytes ---------------------------------------------------------------------------------------------------------


def test_variants_of_a_measured_class() -> None:
    first, second = learnt().profiles(row(10))
    replay, store = first.variants
    assert (replay.name, replay.action, replay.held_bytes, replay.workspace_bytes) == ("R", Action.RECOMPUTE, 40, 160)
    assert (store.name, store.action, store.held_bytes, store.workspace_bytes) == ("H", Action.STORE, 200, 0)
    assert (replay.saved_seconds, store.saved_seconds) == (0.0, 2.0)
    assert [variant.name for variant in second.variants] == ["R"]  # never stored
    assert (first.unit, first.unit_class, second.unit_class) == (A, "A", "B")


def test_a_class_that_was_stored_but_never_replayed_is_replayed() -> None:
    seen = Measurements()
    seen.note_forward([footprint(A, "A", 10, 40, 200)])
    assert [variant.name for variant in seen.profiles(row(10))[0].variants] == ["R"]
    assert seen.unmeasured_classes() == set()


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_profiles_scale_with_tokens(measured: int, asked: int) -> None:
    (first, _) = learnt(measured).profiles(row(asked))
    replay, store = first.variants
    assert abs(replay.held_bytes - 4 * asked) <= 1 and abs(store.held_bytes - 20 * asked) <= 2
    assert store.held_bytes == replay.held_bytes + replay.workspace_bytes
    assert store.saved_seconds == pytest.approx(2.0 * asked / measured)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 4))
def test_more_tokens_never_need_fewer_bytes(one: int, other: int, share: int) -> None:
    seen = learnt(12, other=12 * share)
    low, high = (seen.profiles(row(tokens)) for tokens in sorted((one, other)))
    for small, large in zip(low, high, strict=True):
        for less, more in zip(small.variants, large.variants, strict=True):
            assert less.held_bytes <= more.held_bytes and less.workspace_bytes <= more.workspace_bytes


def test_bytes_are_the_most_and_seconds_the_median_of_what_was_seen() -> None:
    seen = learnt()
    seen.note_forward([footprint(A, "A", 10, 50, 180), footprint(B, "B", 10, 10)])
    for seconds in (9.0, 1.0, 2.5, 2.2):
        seen.replay_receiver(A)(seconds)
    first, second = seen.profiles(row(10))
    assert (first.variant("R").held_bytes, first.variant("R").workspace_bytes) == (50, 160)
    assert (first.variant("H").held_bytes, first.variant("H").saved_seconds) == (210, pytest.approx(2.2))
    assert second.variant("R").held_bytes == 30


def test_what_storing_adds_is_taken_from_one_call() -> None:
    """The first unit holds a large input that is not the others': storing another adds its own state all the same."""
    seen = Measurements()
    seen.note_forward([footprint(A, "L", 10, 500), footprint(B, "L", 10, 40, 140)])
    seen.replay_receiver(B)(1.0)
    for unit in seen.profiles(row(10)):
        assert unit.variant("H").held_bytes - unit.variant("R").held_bytes == 100


def test_analytic_rates_carry_one_shape_to_others() -> None:
    """One measured shape fixes the scale; the proportions of the cost model say how it grows with the length."""
    rates = UnitRates(state_bytes=Rate(2.0, 0.5), input_bytes=Rate(1.0), replay_s=Rate(1.0, 0.25))
    seen = Measurements({"A": rates})
    seen.note_forward([UnitFootprint(A, "A", Shape(4, 100), 1600, 1600 + 10 * (2 * 400 + 400 * 50))])
    seen.replay_receiver(A)(3.0 * (400 + 400 * 25))
    for shape in (Shape(4, 100), Shape(1, 1000), Shape(64, 10)):
        tokens, product = shape.tokens, shape.tokens * shape.length
        unit = seen.profiles(shape)[0]
        assert unit.variant("R").held_bytes == 4 * tokens
        assert unit.variant("R").workspace_bytes == pytest.approx(10 * (2 * tokens + product / 2), rel=1e-6, abs=1)
        assert unit.variant("H").saved_seconds == pytest.approx(3.0 * (tokens + product / 4))


# -- other towers --------------------------------------------------------------------------------------------------


def test_units_of_other_lengths_keep_their_share() -> None:
    """A vision block's patches against the decoder's tokens."""
    seen = learnt(10, other=5)
    assert held(seen, 10, unit=1) == 30
    assert held(seen, 40, unit=1) == 120


def test_relations() -> None:
    text = Shape(2, 50)
    assert Relation.between(text, text).apply(Shape(3, 7)) == Shape(3, 7)
    images = Relation.between(text, Shape(6, 25))  # three images of 25 patches for each row of text
    assert images.apply(Shape(4, 50)) == Shape(12, 25)
    assert images.apply(Shape(2, 51)).tokens >= 1.5 * 102
    packed = Relation.between(text, Shape(1, 150))
    assert packed.apply(Shape(2, 100)).tokens == 300


# -- seconds -------------------------------------------------------------------------------------------------------


def test_seconds_of_the_whole_unit_go_before_those_of_its_replay() -> None:
    seen = learnt()
    assert seen.gain("A", "H", row(10)) is None
    seen.note_seconds(A, "R", row(10), 1.0, 5.0)
    seen.note_seconds(A, "H", row(10), 1.25, None)
    assert seen.gain("A", "H", row(10)) is None and saved(seen, row(10)) == 2.0
    seen.note_seconds(A, "H", row(10), None, 3.5)
    assert saved(seen, row(10)) == pytest.approx((1.0 + 5.0) - (1.25 + 3.5))
    assert saved(seen, row(20)) == pytest.approx(2 * 1.25)


def test_a_gain_pays_beyond_noise_only() -> None:
    seen = learnt()
    for k in range(20):
        wobble = 0.3 * ((7 * k) % 20 - 9.5) / 10
        seen.note_seconds(A, "R", row(10), 1.0, 3.0 + wobble)
        seen.note_seconds(A, "H", row(10), 1.0, 2.98 - wobble)
        seen.note_seconds(A, "H2", row(10), 1.0, 2.0 + wobble)
    small, large = (seen.gain("A", name, row(10)) for name in ("H", "H2"))
    assert small is not None and large is not None
    assert not small.pays and small.noise_s > 0
    assert large.pays and large.seconds == pytest.approx(1.0, abs=0.05) and large.count == 20


def test_one_observation_is_not_beyond_noise_unless_it_is_large() -> None:
    seen = learnt()
    seen.note_seconds(A, "R", row(10), 1.0, 3.0)
    seen.note_seconds(A, "H", row(10), 1.0, 2.8)
    gain = seen.gain("A", "H", row(10))
    assert gain is not None and gain.seconds == pytest.approx(0.2) and not gain.pays


def test_analytic_seconds_fill_what_was_not_replayed() -> None:
    rates = UnitRates(forward_s=Rate(1e-3), replay_s=Rate(7e-4))
    seen = Measurements({"A": rates})
    seen.note_forward([footprint(A, "A", 10, 40, 200)])
    assert saved(seen, row(10)) == pytest.approx(7e-3)
    seen.note_seconds(A, "H", row(10), 3e-2, None)  # this machine takes three times as long
    assert saved(seen, row(10)) == pytest.approx(3 * 7e-3)
    seen.replay_receiver(A)(1e-2)
    assert saved(seen, row(10)) == pytest.approx(1e-2)


def test_a_late_clock_tells_of_the_microbatch_that_was() -> None:
    """Events of a device are read an update later, when the unit has run with other shapes."""
    seen = learnt(10)
    receive = seen.replay_receiver(A)
    seen.note_forward([footprint(A, "A", 1000, 4000), footprint(B, "B", 1000, 10)])
    receive(2.0)  # of 10 tokens
    assert saved(seen, row(10)) == pytest.approx(2.0)


# -- striking out --------------------------------------------------------------------------------------------------


def test_a_struck_variant_is_left_out_and_r_stays() -> None:
    seen = learnt()
    before = seen.profiles(row(10))[0]
    seen.strike("A", "H", "slower than R")
    after = seen.profiles(row(10))[0]
    assert after.variants == (before.variant("R"),)
    assert isinstance(after.variant("R"), Variant) and seen.struck == {("A", "H"): "slower than R"}
    with pytest.raises(UsageError, match="recompute"):
        seen.strike("A", "R", "no")


# -- nothing to learn from -----------------------------------------------------------------------------------------


def test_of_unknown_units_and_empty_forwards_nothing_is_learnt() -> None:
    seen = Measurements()
    seen.note_forward([])
    seen.replay_receiver(A)(1.0)
    seen.note_seconds(A, "R", row(10), 1.0, 1.0)
    assert seen.profiles(row(10)) == () and seen.unmeasured_classes() == set() and seen.classes == {}
    seen = learnt()
    seen.note_forward([])
    assert [unit for unit, _ in seen.roster] == [A, B]


def test_classes_still_to_be_stored() -> None:
    seen = learnt()
    assert seen.unmeasured_classes() == {"B"}
    seen.note_forward([footprint(A, "A", 10, 40), footprint(B, "B", 10, 30, 60)])
    assert seen.unmeasured_classes() == set()


def test_a_unit_without_tokens() -> None:
    seen = Measurements()
    seen.note_forward([UnitFootprint(A, "A", Shape(0, 0), 8, 24)])
    seen.replay_receiver(A)(0.5)
    assert held(seen, 1, variant="H") == 24
    assert seen.profiles(Shape(0, 0))[0].variant("R").held_bytes == 0


def test_profiles_are_made_once_until_something_changes() -> None:
    seen = learnt()
    first = seen.profiles(row(10))
    seen.note_forward([footprint(A, "A", 10, 40), footprint(B, "B", 10, 30)])  # nothing new
    assert seen.profiles(row(10)) is first
    seen.note_forward([footprint(A, "A", 10, 44), footprint(B, "B", 10, 30)])
    assert seen.profiles(row(10))[0].variant("R").held_bytes == 44
    for tokens in range(1, 200):
        seen.profiles(row(tokens))
    assert len(seen._profiles) <= seen.MAX_CACHED
