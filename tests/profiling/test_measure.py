"""What the first updates teach about units, and profiles for other numbers of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.types import Action, UnitId
from ds_hilore.profiling.measure import Measurements, UnitFootprint

A, B = UnitId("a"), UnitId("b")


def learnt(tokens: int = 10, other: int | None = None) -> Measurements:
    """A of class "A" stored, B of class "B" not; `other`: tokens of B."""
    seen = Measurements()
    b_tokens = tokens if other is None else other
    seen.note_forward([UnitFootprint(A, "A", tokens, 4 * tokens, 20 * tokens), UnitFootprint(B, "B", b_tokens, 30)])
    seen.replay_receiver(A)(2.0)
    return seen


def test_variants_of_a_measured_class() -> None:
    first, second = learnt().profiles(10)
    replay, store = first.variants
    assert (replay.name, replay.action, replay.held_bytes, replay.workspace_bytes) == ("R", Action.RECOMPUTE, 40, 160)
    assert (store.name, store.action, store.held_bytes, store.workspace_bytes) == ("H", Action.STORE, 200, 0)
    assert (replay.saved_seconds, store.saved_seconds) == (0.0, 2.0)
    assert [variant.name for variant in second.variants] == ["R"]  # never stored
    assert (first.unit, first.unit_class, second.unit_class) == (A, "A", "B")


def test_a_class_that_was_stored_but_never_replayed_is_replayed() -> None:
    seen = Measurements()
    seen.note_forward([UnitFootprint(A, "A", 10, 40, 200)])
    assert [variant.name for variant in seen.profiles(10)[0].variants] == ["R"]
    assert seen.unmeasured_classes() == set()


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_profiles_scale_with_tokens(measured: int, asked: int) -> None:
    (first, _) = learnt(measured).profiles(asked)
    replay, store = first.variants
    assert abs(replay.held_bytes - 4 * asked) <= 1 and abs(store.held_bytes - 20 * asked) <= 2
    assert store.held_bytes == replay.held_bytes + replay.workspace_bytes
    assert abs(store.saved_seconds - 2.0 * asked / measured) <= 1e-9 * store.saved_seconds


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 4))
def test_more_tokens_never_need_fewer_bytes(one: int, other: int, share: int) -> None:
    seen = learnt(12, other=12 * share)
    low, high = (seen.profiles(tokens) for tokens in sorted((one, other)))
    for small, large in zip(low, high, strict=True):
        for less, more in zip(small.variants, large.variants, strict=True):
            assert less.held_bytes <= more.held_bytes and less.workspace_bytes <= more.workspace_bytes


def test_units_of_other_lengths_keep_their_share() -> None:
    """A vision block's patches against the decoder's tokens."""
    seen = learnt(10, other=5)
    assert seen.profiles(10)[1].variants[0].held_bytes == 30
    assert seen.profiles(40)[1].variants[0].held_bytes == 120


def test_bytes_are_the_most_and_seconds_the_least_of_what_was_seen() -> None:
    seen = learnt()
    seen.note_forward([UnitFootprint(A, "A", 10, 50, 180), UnitFootprint(B, "B", 10, 10)])
    for seconds in (3.0, 1.0, 2.0):
        seen.replay_receiver(A)(seconds)
    first, second = seen.profiles(10)
    assert (first.variant("R").held_bytes, first.variant("R").workspace_bytes) == (50, 160)
    assert (first.variant("H").held_bytes, first.variant("H").saved_seconds) == (210, 1.0)
    assert second.variant("R").held_bytes == 30


def test_what_storing_adds_is_taken_from_one_call() -> None:
    """The first unit holds a large input that is not the others': storing another adds its own state all the same."""
    seen = Measurements()
    seen.note_forward([UnitFootprint(A, "L", 10, 500), UnitFootprint(B, "L", 10, 40, 140)])
    seen.replay_receiver(B)(1.0)
    for unit in seen.profiles(10):
        assert unit.variant("H").held_bytes - unit.variant("R").held_bytes == 100


def test_a_late_clock_tells_of_the_microbatch_that_was() -> None:
    """Events of a device are read an update later, when the unit has run with other numbers of tokens."""
    seen = learnt(10)
    receive = seen.replay_receiver(A)
    seen.note_forward([UnitFootprint(A, "A", 1000, 4000), UnitFootprint(B, "B", 1000, 10)])
    receive(1.0)  # of 10 tokens
    assert seen.profiles(10)[0].variant("H").saved_seconds == 1.0


def test_of_unknown_units_and_empty_forwards_nothing_is_learnt() -> None:
    seen = Measurements()
    seen.note_forward([])
    seen.replay_receiver(A)(1.0)
    assert seen.profiles(10) == () and seen.unmeasured_classes() == set()
    seen = learnt()
    seen.note_forward([])
    assert [unit for unit, _ in seen.roster] == [A, B]


def test_classes_still_to_be_stored() -> None:
    seen = learnt()
    assert seen.unmeasured_classes() == {"B"}
    seen.note_forward([UnitFootprint(A, "A", 10, 40), UnitFootprint(B, "B", 10, 30, 60)])
    assert seen.unmeasured_classes() == set()


def test_a_unit_without_tokens() -> None:
    seen = Measurements()
    seen.note_forward([UnitFootprint(A, "A", 0, 8, 24)])
    seen.replay_receiver(A)(0.5)
    assert seen.profiles(1)[0].variant("H").held_bytes == 24
