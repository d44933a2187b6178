"""The base of the memory rows never promises less than what was seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.types import Shape
from ds_hilore.memory.base import BaseBytes, BaseObservation

MB = 10**6
BYTES = st.integers(-50 * MB, 500 * MB)
OBSERVATIONS = st.lists(
    st.builds(
        lambda tokens, floor, *rows: BaseObservation(tokens, floor, *(floor + row for row in rows)),
        st.integers(1, 100_000),
        st.integers(100 * MB, 2000 * MB),
        BYTES,
        BYTES,
        BYTES,
    ),
    min_size=1,
    max_size=8,
)


@given(OBSERVATIONS)
def test_covers_everything_that_was_observed(observations: list[BaseObservation]) -> None:
    base = BaseBytes.fit(observations)
    for seen in observations:
        forward, loss, backward = base.at(Shape(1, seen.tokens))
        assert forward >= seen.forward and loss >= seen.loss and backward >= seen.backward


@given(OBSERVATIONS, st.integers(1, 100_000), st.integers(0, 100_000))
def test_grows_with_tokens(observations: list[BaseObservation], tokens: int, more: int) -> None:
    base = BaseBytes.fit(observations)
    assert all(a <= b for a, b in zip(base.at(Shape(1, tokens)), base.at(Shape(1, tokens + more))))


@given(st.integers(0, 50 * MB), st.integers(1, 2000), st.integers(0, 500 * MB), st.integers(1, 10_000))
def test_two_sizes_tell_constant_and_slope(constant: int, slope: int, floor: int, tokens: int) -> None:
    def seen(count: int) -> BaseObservation:
        return BaseObservation(count, floor, *(floor + constant + slope * count,) * 3)

    base = BaseBytes.fit([seen(100), seen(5000)])
    expected = floor + constant + slope * tokens
    assert all(abs(found - expected) <= 1 + 1e-6 * expected for found in base.at(Shape(1, tokens)))


def test_one_size_is_kept_below_it_and_scaled_above_it() -> None:
    base = BaseBytes.fit([BaseObservation(100, 1000, 1010, 1100, 1050)])
    assert base.at(Shape(1, 50)) == base.at(Shape(2, 50)) == (1010, 1100, 1050)
    assert base.at(Shape(4, 50)) == (1020, 1200, 1100)


def test_phases_that_start_from_different_floors_are_foreseen_as_they_were() -> None:
    base = BaseBytes.fit([BaseObservation(100, 1000, 1300, 1300, 1300), BaseObservation(100, 1100, 1200, 1200, 1250)])
    assert base.at(Shape(1, 100)) == (1300, 1300, 1300)


@given(OBSERVATIONS, st.integers(0, 10**9), st.integers(1, 100_000))
def test_a_higher_floor_raises_every_row_by_as_much(
    observations: list[BaseObservation], count: int, tokens: int
) -> None:
    raised = BaseBytes.fit([seen.raised(count) for seen in observations])
    base = BaseBytes.fit(observations)
    for before, after in zip(base.at(Shape(1, tokens)), raised.at(Shape(1, tokens))):
        assert after == before + count or before == 0


def test_segments_and_length_count_as_tokens() -> None:
    base = BaseBytes.fit([BaseObservation(100, 0, 10, 10, 10)])
    assert base.at(Shape(10, 20)) == base.at(Shape(1, 200))


def test_nothing_seen_is_nothing_held() -> None:
    assert BaseBytes.fit([]).at(Shape(4, 50)) == (0, 0, 0)
