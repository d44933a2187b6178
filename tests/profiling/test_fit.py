"""Fits of bytes and of seconds over shapes."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import Shape
from ds_hilore.profiling.fit import BytesFit, Rate, SecondsFit, whole

SHAPES = st.builds(Shape, st.integers(1, 64), st.integers(1, 8192))
COEFFICIENT = st.floats(0.0, 1e6)
BYTES = st.integers(0, 1 << 40)
PRIORS = st.builds(Rate, st.floats(0.0, 1e6), st.floats(0.0, 1e4))


def shapes_apart(shapes: list[Shape]) -> bool:
    """Whether three coefficients can be told apart from these shapes."""
    lengths = {shape.length for shape in shapes}
    tokens = {shape.tokens for shape in shapes}
    return max(lengths) >= 2 * min(lengths) and max(tokens) >= 2 * min(tokens)


# -- bytes ---------------------------------------------------------------------------------------------------------


@given(COEFFICIENT, st.floats(0.0, 1e3), st.lists(SHAPES, min_size=3, max_size=20, unique=True), PRIORS, SHAPES)
@settings(deadline=None)
def test_planted_bytes_are_found_whatever_the_prior(
    per_token: float, per_length: float, seen: list[Shape], prior: Rate, asked: Shape
) -> None:
    """Between and near the shapes that were seen: within 1 %."""
    assume(shapes_apart(seen))
    assume(min(s.tokens for s in seen) <= asked.tokens <= max(s.tokens for s in seen))
    assume(min(s.length for s in seen) <= asked.length <= max(s.length for s in seen))
    true = Rate(1.0 + per_token, per_length)
    fit = BytesFit(prior)
    for shape in seen:
        fit.note(shape, true.of(shape))
    assert fit.of(asked) == pytest.approx(true.of(asked), rel=0.01, abs=2)


def test_three_coefficients_exactly() -> None:
    true = Rate(100.0, 3.0, 5000.0)
    fit = BytesFit(Rate(1.0, 5.0))
    for shape in (Shape(2, 512), Shape(4, 512), Shape(1, 2048), Shape(1, 100)):
        fit.note(shape, true.of(shape))
    for shape in (Shape(1, 1), Shape(8, 4096), Shape(3, 777)):
        assert fit.of(shape) == pytest.approx(true.of(shape), rel=1e-5, abs=1)
    assert fit.spread < 1e-5 and fit.count == 4


@given(st.lists(st.tuples(SHAPES, BYTES), min_size=1, max_size=60), PRIORS)
@settings(deadline=None)
def test_what_was_observed_is_never_under_predicted(seen: list[tuple[Shape, int]], prior: Rate) -> None:
    """However little the observations fit together, and after many were forgotten."""
    fit = BytesFit(prior)
    for shape, value in seen:
        fit.note(shape, value)
    assert all(fit.of(shape) >= value for shape, value in seen)
    assert len(fit.observations()) <= BytesFit.SHAPES


def test_memory_is_bounded_and_the_envelope_holds_over_many_shapes() -> None:
    fit = BytesFit(Rate(1.0))
    true, rng = Rate(50.0, 2.0, 300.0), random.Random(3)
    shapes = [Shape(rng.randint(1, 8), rng.randint(64, 4096)) for _ in range(2000)]
    for shape in shapes:
        fit.note(shape, true.of(shape))
    assert len(fit.observations()) == BytesFit.SHAPES and fit.count == 2000
    assert all(fit.of(shape) >= true.of(shape) for shape in shapes)
    over = sorted(fit.of(shape) / true.of(shape) for shape in shapes)
    assert over[1000] <= 1.02 and over[-1] <= 1.10


@given(st.lists(st.tuples(SHAPES, BYTES), min_size=1, max_size=12), PRIORS, SHAPES, SHAPES)
@settings(deadline=None)
def test_more_tokens_never_need_fewer_bytes_nor_less_time(
    seen: list[tuple[Shape, int]], prior: Rate, one: Shape, other: Shape
) -> None:
    small = Shape(min(one.segments, other.segments), min(one.length, other.length))
    large = Shape(max(one.segments, other.segments), max(one.length, other.length))
    sizes, times = BytesFit(prior), SecondsFit(prior)
    for shape, value in seen:
        sizes.note(shape, value)
        times.note(shape, value * 1e-9)
    assert sizes.of(small) <= sizes.of(large)
    assert times.of(small) <= times.of(large)


@given(st.builds(Rate, st.floats(0.1, 1e6), st.floats(0.0, 1e3)), SHAPES, st.lists(SHAPES, max_size=5), BYTES)
def test_one_shape_gives_the_scale_and_the_prior_the_proportions(
    prior: Rate, seen: Shape, asked: list[Shape], value: int
) -> None:
    fit = BytesFit(prior)
    fit.note(seen, value)
    for shape in [seen, *asked]:
        expected = value * prior.of(shape) / prior.of(seen)
        assert fit.of(shape) == pytest.approx(expected, rel=1e-4, abs=2)


def test_shapes_of_one_length_leave_the_proportions_to_the_prior() -> None:
    fit = BytesFit(Rate(10.0, 0.1))
    for segments in (1, 2, 7):
        fit.note(Shape(segments, 100), 40.0 * segments * 100)
    assert fit.of(Shape(3, 100)) == 12_000
    assert fit.of(Shape(1, 300)) == pytest.approx(2 * (10.0 * 300 + 0.1 * 300 * 300), rel=1e-5)


def test_nothing_seen_and_nothing_held() -> None:
    assert BytesFit().of(Shape(2, 100)) == 0 and SecondsFit().of(Shape(2, 100)) == 0.0
    fit = BytesFit(Rate())  # a prior of nothing is none
    fit.note(Shape(1, 10), 0)
    assert fit.of(Shape(9, 9)) == 0
    fit.note(Shape(1, 10), 70)
    assert fit.of(Shape(1, 20)) == 140


@given(st.integers(0, 1 << 42), st.floats(-1e-15, 1e-15))
def test_whole_numbers_stay_through_the_rounding_of_floats(number: int, error: float) -> None:
    assert whole(number * (1 + error)) == number
    assert whole(number + 0.1) == number + 1


# -- seconds -------------------------------------------------------------------------------------------------------


def noisy(rng: random.Random, seconds: float) -> float:
    """One in six takes twice as long; else up to 8 % is added."""
    return seconds * (2.0 if rng.random() < 1 / 6 else 1.0 + 0.08 * rng.random())


@given(st.floats(1e-7, 1e-3), st.floats(0.0, 5.0), st.floats(0.0, 20.0), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_planted_seconds_are_found_among_outliers(
    per_token: float, quadratic: float, prior_share: float, seed: int
) -> None:
    """Within 12 %, of which noise that only adds makes 4 %; the prior's proportions are wrong."""
    true = Rate(per_token, quadratic * per_token / 1000)
    fit = SecondsFit(Rate(1.0, prior_share / 1000))
    rng = random.Random(seed)
    shapes = [Shape(2, 256), Shape(2, 1024), Shape(8, 512), Shape(1, 4096)]
    for _ in range(120):
        shape = rng.choice(shapes)
        fit.note(shape, noisy(rng, true.of(shape)))
    for shape in [*shapes, Shape(4, 700), Shape(1, 2048)]:
        assert fit.of(shape) == pytest.approx(1.04 * true.of(shape), rel=0.12)
    assert fit.count == 120 and 0 < fit.spread < 0.2


def test_exact_seconds_override_the_prior() -> None:
    true = Rate(1e-5, 4e-9, 2e-3)
    fit = SecondsFit(Rate(1.0))
    for _ in range(3):
        for shape in (Shape(1, 128), Shape(2, 512), Shape(8, 256), Shape(1, 2048), Shape(1, 8192)):
            fit.note(shape, true.of(shape))
    for shape in (Shape(1, 256), Shape(4, 1000), Shape(2, 4096)):
        assert fit.of(shape) == pytest.approx(true.of(shape), rel=0.01)


def test_the_typical_value_of_one_shape() -> None:
    fit = SecondsFit()
    for seconds in (1.0, 1.02, 2.5, 1.01, 0.99):
        fit.note(Shape(1, 100), seconds)
    assert fit.of(Shape(1, 100)) == pytest.approx(1.01)
    assert 0.005 < fit.spread < 0.05 and fit.standard_error < fit.spread


def test_a_few_observations_are_not_trusted_beyond_their_noise() -> None:
    fit = SecondsFit()
    assert fit.standard_error == float("inf")
    fit.note(Shape(1, 100), 1.0)
    assert fit.standard_error >= 0.1


def test_seconds_that_make_no_sense_are_not_noted() -> None:
    fit = SecondsFit()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        fit.note(Shape(1, 100), seconds)
    assert fit.count == 0


def test_the_memory_of_seconds_is_bounded_and_follows_the_newest() -> None:
    fit, rng = SecondsFit(), random.Random(5)
    for number in range(5000):
        shape = Shape(1, rng.randint(64, 8192))
        fit.note(shape, shape.tokens * (1e-3 if number < 2500 else 2e-3))
    assert len(fit.observations()) <= SecondsFit.GROUPS * SecondsFit.GROUP_SIZE
    assert fit.of(Shape(1, 1000)) == pytest.approx(2.0, rel=0.05)


def test_solving_is_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is asked for after every observation is solved a logarithmic number of times."""
    solved = []
    real = SecondsFit._solve
    monkeypatch.setattr(SecondsFit, "_solve", lambda self: (solved.append(1), real(self))[1])
    fit = SecondsFit()
    for _ in range(1000):
        fit.note(Shape(1, 100), 1.0)
        fit.of(Shape(1, 100))
    assert len(solved) <= 60


@given(st.lists(st.tuples(SHAPES, st.floats(1e-9, 1e3)), min_size=1, max_size=40), SHAPES)
@settings(deadline=None)
def test_what_was_stored_predicts_the_same(seen: list[tuple[Shape, float]], asked: Shape) -> None:
    sizes, times = BytesFit(), SecondsFit()
    for shape, value in seen:
        sizes.note(shape, round(value))
        times.note(shape, value)
    again_sizes, again_times = BytesFit(), SecondsFit()
    again_sizes.restore(sizes.observations(), sizes.floor, sizes.count)
    again_times.restore(times.observations(), times.count)
    assert again_sizes.of(asked) == sizes.of(asked) and again_sizes.count == sizes.count
    fresh = SecondsFit()
    fresh.restore(times.observations(), times.count)
    assert again_times.of(asked) == fresh.of(asked) and again_times.count == times.count
