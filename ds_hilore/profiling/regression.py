"""Least squares through the origin with an interval that may be trusted, and rank correlation. Plain floats.

NOTE [Slopes]
S1  The slope is the plain least-squares one: kappa = sum(x y) / sum(x x), of all observations.
S2  Its standard error is the jackknife's over *microbatches*: how far the slope moves when one of them is left out.
    Observations of one microbatch share their exposure, and exposures differ by orders of magnitude; the textbook
    error would take one large microbatch for certainty, here it is what cannot be left out.
S3  The interval is Student's, with a degree of freedom less than there are microbatches that say something (x > 0).
S4  One observation that is not finite spoils a fit: state that overflows once will do so again.
S5  Nothing depends on the units of x and y, nor can squares of them overflow: both are scaled by their largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist, correlation
from typing import NamedTuple

from ds_hilore.core.errors import UsageError

#: Half of the 95 % interval may be this share of the slope where it is to count as tight ...
TIGHT = 0.2
#: ... over at least so many microbatches. Fewer are also too few to call a relation contradictory.
ENOUGH = 4
#: Less of sum(y y) than this explained by the slope: what was predicted is not what happened. Errors that scatter by
#: a factor of two around the line still leave 0.6.
LEAST_EXPLAINED = 0.5

_PROBABILITY = 0.975  # both sides together leave 5 %


class Verdict(Enum):
    """Whether a slope may be used."""

    USABLE = "usable"
    UNCERTAIN = "uncertain"  # too little was seen to tell it from zero; other depths may help
    CONTRADICTORY = "contradictory"  # what was seen does not follow the prediction
    NOT_FINITE = "not finite"  # something overflowed, or is no number


class Point(NamedTuple):
    """One observation of y at x. Both are >= 0 or not finite."""

    microbatch: int
    x: float
    y: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.x) and math.isfinite(self.y)


@dataclass(frozen=True)
class Fit:
    """A slope through the origin.

    Attributes:
        kappa: the slope; 0 where there is none.
        standard_error: of the slope, S2; infinite where it cannot be told.
        half_interval: half of the 95 % interval.
        count: observations.
        microbatches: that they come from and that say something (x > 0).
        explained: share of sum(y y) that the slope explains, R^2 through the origin.
        reason: why it may not be used; "" where it may.
    """

    kappa: float = 0.0
    standard_error: float = math.inf
    half_interval: float = math.inf
    count: int = 0
    microbatches: int = 0
    explained: float = 0.0
    verdict: Verdict = Verdict.UNCERTAIN
    reason: str = "nothing was observed"

    @property
    def usable(self) -> bool:
        return self.verdict is Verdict.USABLE

    @property
    def kappa_upper(self) -> float:
        """The upper end of the interval: less than twice `kappa` where the fit is usable."""
        return self.kappa + self.half_interval

    @property
    def tight(self) -> bool:
        """More microbatches would change little."""
        return self.usable and self.microbatches >= ENOUGH and self.half_interval <= TIGHT * self.kappa


def through_origin(points: Iterable[Point]) -> Fit:
    """Fits y = kappa x and judges it (NOTE [Slopes]).

    Raises:
        UsageError: an x or y is below zero.
    """
    points = list(points)
    below = next((point for point in points if point.x < 0 or point.y < 0), None)
    if below is not None:
        raise UsageError(f"exposures and errors are not below 0, got {below}")
    broken = next((point for point in points if not point.finite), None)
    if broken is not None:
        return _unusable(points, Verdict.NOT_FINITE, f"microbatch {broken.microbatch} gave a value that is not finite")
    if not points:
        return Fit()
    unit_x, unit_y = max(point.x for point in points), max(point.y for point in points)
    if unit_x == 0:
        return _unusable(points, Verdict.UNCERTAIN, "no microbatch had any exposure")
    if unit_y == 0:
        return _unusable(points, Verdict.CONTRADICTORY, "compressing it changed no gradient at all")
    scaled = [Point(point.microbatch, point.x / unit_x, point.y / unit_y) for point in points]
    fit = _judged(_fitted(scaled), len(points))
    scale = unit_y / unit_x
    if fit.kappa > 0 and not 0 < fit.kappa * scale < math.inf:
        return _unusable(points, Verdict.NOT_FINITE, "errors per exposure are too large or too small for a number")
    return replace(
        fit,
        kappa=fit.kappa * scale,
        standard_error=fit.standard_error * scale,
        half_interval=fit.half_interval * scale,
    )


def _unusable(points: Sequence[Point], verdict: Verdict, reason: str) -> Fit:
    return Fit(
        count=len(points),
        microbatches=len({point.microbatch for point in points if 0 < point.x < math.inf}),
        verdict=verdict,
        reason=reason,
    )


class _Slope(NamedTuple):
    kappa: float
    standard_error: float
    microbatches: int
    explained: float


def _fitted(points: Sequence[Point]) -> _Slope:
    """S1 and S2, for points of which the largest x and the largest y are 1."""
    squares: dict[int, float] = {}
    products: dict[int, float] = {}
    for point in points:
        squares[point.microbatch] = squares.get(point.microbatch, 0.0) + point.x * point.x
        products[point.microbatch] = products.get(point.microbatch, 0.0) + point.x * point.y
    total, product = math.fsum(squares.values()), math.fsum(products.values())
    kappa = product / total
    telling = [microbatch for microbatch, square in squares.items() if square > 0]
    explained = product * product / (total * math.fsum(point.y * point.y for point in points))
    moves = []
    for microbatch in telling:
        rest = math.fsum(square for other, square in squares.items() if other != microbatch)
        if rest == 0:
            return _Slope(kappa, math.inf, len(telling), explained)
        # how far the slope moves without this one; as a residual, since differences of slopes would cancel
        moves.append((products[microbatch] - kappa * squares[microbatch]) / rest)
    spread = math.fsum(move * move for move in moves)
    return _Slope(kappa, math.sqrt((len(telling) - 1) / len(telling) * spread), len(telling), explained)


def _judged(slope: _Slope, count: int) -> Fit:
    half = student(slope.microbatches - 1) * slope.standard_error if slope.microbatches > 1 else math.inf
    verdict, reason = Verdict.USABLE, ""
    if slope.kappa <= 0 or (slope.explained < LEAST_EXPLAINED and slope.microbatches >= ENOUGH):
        verdict = Verdict.CONTRADICTORY
        reason = f"errors do not follow exposure: {slope.explained:.0%} of them explained"
    elif half >= slope.kappa:
        verdict = Verdict.UNCERTAIN
        reason = f"not told from zero by {slope.microbatches} microbatch(es) with exposure"
    return Fit(
        slope.kappa, slope.standard_error, half, count, slope.microbatches, min(1.0, slope.explained), verdict, reason
    )


def student(degrees: int) -> float:
    """Student's t for a 95 % interval, within 0.15 %.

    Exact for one and two degrees of freedom; beyond, the normal quantile with the correction for small samples in
    powers of 1 / degrees (Fisher and Cornish's expansion; Abramowitz and Stegun 26.7.5), which is 0.12 % too low at
    three and closer after.

    Raises:
        UsageError: there are no degrees of freedom.
    """
    if degrees < 1:
        raise UsageError(f"an interval needs at least one degree of freedom, got {degrees}")
    if degrees == 1:
        return math.tan(math.pi * (_PROBABILITY - 0.5))
    if degrees == 2:
        return (2 * _PROBABILITY - 1) / math.sqrt(2 * _PROBABILITY * (1 - _PROBABILITY))
    z = NormalDist().inv_cdf(_PROBABILITY)
    corrections = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(corrections))


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ranks of ties averaged; None where one of both does not vary.

    Raises:
        UsageError: the sequences differ in length, or hold what is no number.
    """
    if len(one) != len(other):
        raise UsageError(f"pairs are wanted, got {len(one)} and {len(other)} values")
    if any(math.isnan(value) for value in (*one, *other)):
        raise UsageError("what is no number has no rank; leave such pairs out")
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + end - 1) / 2
        start = end
    return ranks
