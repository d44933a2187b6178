"""Slopes through the origin, their intervals and verdicts; rank correlation."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.profiling.regression import ENOUGH, TIGHT, Fit, Point, Verdict, spearman, student, through_origin

VALUE = st.floats(1e-3, 1e3)
PAIRS = st.lists(st.tuples(VALUE, VALUE), min_size=2, max_size=16)
SCALE = st.integers(-60, 60).map(lambda power: 2.0**power)  # exact: no rounding beside that of the fit


def points(pairs: list[tuple[float, float]]) -> list[Point]:
    """One microbatch each."""
    return [Point(microbatch, x, y) for microbatch, (x, y) in enumerate(pairs)]


def noisy(generator: random.Random, count: int, kappa: float, noise: float, spread: float = 0.3) -> list[Point]:
    """y = kappa x but for a factor of mean 1; x is log-normal."""
    xs = [math.exp(generator.gauss(0, spread)) for _ in range(count)]
    return points([(x, kappa * x * math.exp(generator.gauss(-noise * noise / 2, noise))) for x in xs])


# -- the slope -----------------------------------------------------------------------------------------------------


@given(PAIRS)
@settings(deadline=None)
def test_slope_and_explained_share_are_the_closed_form(pairs: list[tuple[float, float]]) -> None:
    """In exact arithmetic."""
    exact = [(Fraction(x), Fraction(y)) for x, y in pairs]
    product, square = sum(x * y for x, y in exact), sum(x * x for x, _ in exact)
    fit = through_origin(points(pairs))
    assert fit.kappa == pytest.approx(float(product / square), rel=1e-12)
    assert fit.explained == pytest.approx(float(product**2 / square / sum(y * y for _, y in exact)), rel=1e-12)
    assert (fit.count, fit.microbatches) == (len(pairs), len(pairs))


@given(PAIRS)
@settings(deadline=None)
def test_standard_error_is_the_jackknife(pairs: list[tuple[float, float]]) -> None:
    """By fitting again without each microbatch, as the definition says."""

    def slope(some: list[tuple[float, float]]) -> float:
        return math.fsum(x * y for x, y in some) / math.fsum(x * x for x, _ in some)

    whole = slope(pairs)
    moves = [slope(pairs[:place] + pairs[place + 1 :]) - whole for place in range(len(pairs))]
    expected = math.sqrt((len(pairs) - 1) / len(pairs) * math.fsum(move * move for move in moves))
    fit = through_origin(points(pairs))
    # differences of slopes cancel in the definition, not in the code
    assert fit.standard_error == pytest.approx(expected, rel=1e-5, abs=1e-9 * (whole + max(map(abs, moves))))
    assert fit.half_interval == pytest.approx(student(len(pairs) - 1) * fit.standard_error)


def test_observations_of_one_microbatch_are_left_out_together() -> None:
    pairs = [(1.0, 1.0), (1.0, 1.2), (2.0, 1.8), (2.0, 2.5)]
    apart = through_origin(points(pairs))
    together = through_origin([Point(place // 2, x, y) for place, (x, y) in enumerate(pairs)])
    assert together.kappa == apart.kappa
    assert (together.microbatches, apart.microbatches) == (2, 4)
    first, second = (1.0 + 1.2) / 2, (2 * 1.8 + 2 * 2.5) / 8
    assert together.standard_error == pytest.approx(
        math.sqrt(((second - together.kappa) ** 2 + (first - together.kappa) ** 2) / 2)
    )


@given(PAIRS, SCALE, SCALE)
@settings(deadline=None)
def test_units_of_exposure_and_error_only_scale_the_slope(pairs: list[tuple[float, float]], c: float, d: float) -> None:
    """Exposure times c makes kappa 1/c of it, error times d makes it d times as large; verdicts stay."""
    plain = through_origin(points(pairs))
    scaled = through_origin(points([(c * x, d * y) for x, y in pairs]))
    assert scaled.kappa == pytest.approx(plain.kappa * d / c, rel=1e-12)
    assert scaled.kappa_upper == pytest.approx(plain.kappa_upper * d / c, rel=1e-9)
    assert (scaled.verdict, scaled.tight) == (plain.verdict, plain.tight)


@given(st.floats(1e-200, 1e200), st.floats(0.1, 10.0))
@settings(deadline=None)
def test_squares_neither_overflow_nor_vanish(scale: float, kappa: float) -> None:
    fit = through_origin(points([(scale * x, scale * x * kappa) for x in (1.0, 2.0, 3.0, 4.0)]))
    assert fit.tight and fit.kappa == pytest.approx(kappa)


def test_a_slope_that_is_no_float_is_refused() -> None:
    for pair in ((1e-300, 1e300), (1e300, 1e-300)):
        fit = through_origin(points([pair] * 4))
        assert fit.verdict is Verdict.NOT_FINITE and "too large or too small" in fit.reason


# -- the interval --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=3, max_size=6), st.integers(2, 5))
@settings(deadline=None)
def test_interval_shrinks_with_more_of_the_same(pairs: list[tuple[float, float]], times: int) -> None:
    few, many = through_origin(points(pairs)), through_origin(points(pairs * times))
    assume(few.half_interval > 1e-9)
    assert many.kappa == pytest.approx(few.kappa)
    assert many.half_interval < few.half_interval


def test_interval_covers_the_truth_even_where_one_microbatch_dominates() -> None:
    """Textbook intervals of the same data, which take equal noise everywhere, cover it far less often."""
    generator = random.Random(7)
    covered = textbook = 0
    for _ in range(800):
        seen = noisy(generator, 8, kappa=3.0, noise=0.3, spread=1.0)
        fit = through_origin(seen)
        covered += abs(fit.kappa - 3.0) <= fit.half_interval
        square = sum(p.x * p.x for p in seen)
        rest = sum((p.y - fit.kappa * p.x) ** 2 for p in seen)
        textbook += abs(fit.kappa - 3.0) <= student(7) * math.sqrt(rest / 7 / square)
    assert covered >= 0.84 * 800
    assert textbook <= 0.74 * 800


def test_one_microbatch_tells_no_interval() -> None:
    """Nor do several of which only one has exposure."""
    for pairs in ([(2.0, 1.0)], [(2.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]):
        fit = through_origin(points(pairs))
        assert fit.kappa == 0.5 and fit.microbatches == 1 and fit.half_interval == math.inf
        assert fit.verdict is Verdict.UNCERTAIN and "1 microbatch" in fit.reason


def test_tight_needs_enough_microbatches_and_a_narrow_interval() -> None:
    exact = [(1.0, 2.0), (3.0, 6.0), (2.0, 4.0), (5.0, 10.0)]
    assert len(exact) == ENOUGH
    assert through_origin(points(exact)).tight
    assert through_origin(points(exact)).kappa_upper == pytest.approx(2.0)
    three = through_origin(points(exact[:3]))
    assert three.usable and not three.tight
    generator = random.Random(1)
    for _ in range(200):
        fit = through_origin(noisy(generator, 8, kappa=1.0, noise=0.2))
        assert fit.tight == (fit.usable and fit.half_interval <= TIGHT * fit.kappa)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (7, 2.36462), (15, 2.13145), (47, 2.01174)],
)
def test_student(degrees: int, expected: float) -> None:
    assert student(degrees) == pytest.approx(expected, rel=1.5e-3)


def test_student_needs_a_degree_of_freedom() -> None:
    with pytest.raises(UsageError, match="degree of freedom"):
        student(0)


# -- verdicts ------------------------------------------------------------------------------------------------------


@given(PAIRS, st.sampled_from([math.nan, math.inf]), st.booleans(), st.integers(0, 100))
@settings(deadline=None)
def test_one_value_that_is_not_finite_spoils_the_fit(
    pairs: list[tuple[float, float]], bad: float, in_x: bool, at: int
) -> None:
    at %= len(pairs)
    pairs[at] = (bad, 1.0) if in_x else (1.0, bad)
    fit = through_origin(points(pairs))
    assert fit.verdict is Verdict.NOT_FINITE and f"microbatch {at} " in fit.reason
    assert not fit.usable and not fit.tight


def test_errors_that_fall_with_exposure_are_contradictory() -> None:
    fit = through_origin(points([(1.0, 8.0), (2.0, 4.0), (4.0, 2.0), (8.0, 1.0)]))
    assert fit.verdict is Verdict.CONTRADICTORY and "do not follow" in fit.reason
    # three of them are too few to say so; neither are they used
    assert through_origin(points([(1.0, 8.0), (2.0, 4.0), (4.0, 2.0)])).verdict is Verdict.UNCERTAIN


def test_errors_without_exposure_are_contradictory() -> None:
    seen = [(0.0, 1.0), (0.0, 1.0), (1.0, 0.1), (1.0, 0.1), (1.0, 0.1), (1.0, 0.1)]
    assert through_origin(points(seen)).verdict is Verdict.CONTRADICTORY


def test_no_error_at_all_is_contradictory_and_no_exposure_is_uncertain() -> None:
    silent = through_origin(points([(1.0, 0.0), (2.0, 0.0)]))
    assert silent.verdict is Verdict.CONTRADICTORY and "no gradient" in silent.reason
    calm = through_origin(points([(0.0, 0.0)] * 6))
    assert calm.verdict is Verdict.UNCERTAIN and calm.microbatches == 0 and "exposure" in calm.reason
    assert through_origin([]) == Fit() and not Fit().usable


@given(PAIRS)
@settings(deadline=None)
def test_what_is_usable_is_told_from_zero_and_its_upper_end_is_within_a_factor_of_two(
    pairs: list[tuple[float, float]],
) -> None:
    fit = through_origin(points(pairs))
    assert fit.usable == (fit.reason == "")
    if fit.usable:
        assert fit.kappa <= fit.kappa_upper < 2 * fit.kappa
    else:
        assert fit.half_interval >= fit.kappa or fit.explained < 0.5


def test_below_zero_is_a_bug_of_the_caller() -> None:
    for pair in ((-1.0, 1.0), (1.0, -1.0)):
        with pytest.raises(UsageError, match="not below 0"):
            through_origin(points([pair]))


# -- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 1e9], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # 1 - 6 * (1 + 1 + 1 + 1) / (5 * 24)
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
        # textbook: IQ against hours of television, 1 - 6 * 194 / 990
        ([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17], -29 / 165),
        # ties: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / math.sqrt(4.5 * 5)),
    ],
)
def test_spearman_of_known_values(one: list[float], other: list[float], expected: float) -> None:
    assert spearman(one, other) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=20))
@settings(deadline=None)
def test_spearman_is_symmetric_bounded_and_blind_to_rising_functions(pairs: list[tuple[int, int]]) -> None:
    one, other = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = spearman(one, other)
    if len(set(one)) < 2 or len(set(other)) < 2:
        assert found is None
        return
    assert found is not None and abs(found) <= 1 + 1e-12
    assert spearman(other, one) == pytest.approx(found)
    assert spearman([math.exp(a) for a in one], other) == pytest.approx(found)
    assert spearman([-a for a in one], other) == pytest.approx(-found)


def test_spearman_refuses_what_has_no_rank() -> None:
    with pytest.raises(UsageError, match="pairs"):
        spearman([1.0], [1.0, 2.0])
    with pytest.raises(UsageError, match="no number"):
        spearman([1.0, math.nan], [1.0, 2.0])
