"""Bytes and seconds as functions of a microbatch's shape, from what was observed of other shapes.

Both are linear in three features, with coefficients that are never negative:

    value(shape) = constant + per_token * tokens + per_token_length * tokens * length

Projections and norms cost by token, attention scores by token and length, launching kernels a constant. The analytic
cost model (cost_model.py) gives the *proportions*: while one shape was seen only its scale is fitted, so that a second
shape needs no new measurement, and every further shape moves the proportions as far as it contradicts them.

NOTE [Fits]
F1  Bytes are an upper envelope: no prediction is below what was observed of that shape, forgotten or not.
F2  Seconds are typical: groups of near-equal shapes count with their median, and are weighed by least absolute
    relative error, so that outliers (noise only adds; twice the time is common) move nothing.
F3  The prior is a ridge around the proportions, as strong as the noise of the data: exact data override it.
F4  Memory is bounded whatever is observed; `note` does no arithmetic but comparisons, solving waits for `rate`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from ds_hilore.core.types import Shape


@dataclass(frozen=True)
class Rate:
    """A quantity (bytes, seconds, FLOPs) as a linear function of a shape. Coefficients are not negative."""

    per_token: float = 0.0
    per_token_length: float = 0.0
    constant: float = 0.0

    def of(self, shape: Shape) -> float:
        return self.at(shape.tokens, shape.tokens * shape.length)

    def at(self, tokens: float, token_lengths: float) -> float:
        return self.constant + self.per_token * tokens + self.per_token_length * token_lengths

    def __add__(self, other: Rate) -> Rate:
        return Rate(
            self.per_token + other.per_token,
            self.per_token_length + other.per_token_length,
            self.constant + other.constant,
        )

    def times(self, factor: float) -> Rate:
        return Rate(self.per_token * factor, self.per_token_length * factor, self.constant * factor)

    def max(self, other: Rate) -> Rate:
        """At least both, whatever the shape."""
        return Rate(
            max(self.per_token, other.per_token),
            max(self.per_token_length, other.per_token_length),
            max(self.constant, other.constant),
        )


#: Less than this is nothing, in bytes and in seconds.
TINY = 1e-12

#: The proportions where nothing is known of a unit: everything grows with the tokens.
BY_TOKEN = Rate(per_token=1.0)


class Observation(NamedTuple):
    """One value of a shape. `token_lengths` = tokens * length."""

    tokens: float
    token_lengths: float
    value: float

    @classmethod
    def of(cls, shape: Shape, value: float) -> Observation:
        tokens = max(1, shape.tokens)
        return cls(float(tokens), float(tokens * max(1, shape.length)), float(value))


def proportions(rate: Rate) -> Rate:
    """The rate with coefficients that sum to 1, for fits, to which its scale means nothing."""
    total = rate.at(1.0, 1.0)
    return rate.times(1.0 / total) if 1e-100 < total < 1e100 else BY_TOKEN


def whole(value: float) -> int:
    """The least whole number that is not below `value`, but for the rounding of floats."""
    nearest = round(value)
    return nearest if abs(value - nearest) <= min(1e-9 * value, 0.01) else math.ceil(value)


# -- bytes ---------------------------------------------------------------------------------------------------------


class BytesFit:
    """Upper envelope of bytes (F1). Least squares in relative error, lifted until it covers what was seen.

    Args:
        prior: proportions of the parts; its scale does not matter.
    """

    SHAPES = 24  # remembered one by one; what is forgotten beyond is kept by a floor under the coefficients
    TRUST = 1e-8  # bytes are not noisy: the prior decides only what the data leave open

    def __init__(self, prior: Rate = BY_TOKEN) -> None:
        self.prior = proportions(prior)
        self.count = 0
        self.floor = Rate()
        self._points: dict[tuple[float, float], float] = {}
        self._rate: Rate | None = None

    def note(self, shape: Shape, value: float) -> None:
        """One observation; `value` must be finite and not negative."""
        point = Observation.of(shape, value)
        self.count += 1
        key = (point.tokens, point.token_lengths)
        known = self._points.get(key)
        if known is not None and point.value <= known:
            return
        if known is None and len(self._points) >= self.SHAPES:
            if self.rate.at(*key) >= point.value:
                self.floor = self.floor.max(self.rate)
                return
            self.floor = self.floor.max(self.rate)
            del self._points[self._least_telling()]
        self._points[key] = point.value
        self._rate = None

    def _least_telling(self) -> tuple[float, float]:
        """The remembered shape that another one is most alike."""

        def distance(one: tuple[float, float], other: tuple[float, float]) -> float:
            return abs(math.log(one[0] / other[0])) + abs(math.log(one[1] / other[1]))

        return min(combinations(self._points, 2), key=lambda pair: distance(*pair))[0]

    @property
    def rate(self) -> Rate:
        if self._rate is None:
            self._rate = self._fitted()
        return self._rate

    def _fitted(self) -> Rate:
        points = self.observations()
        fitted = solve([(point, 1.0) for point in points], self.prior, self.TRUST).max(self.floor)
        return fitted.times(max([1.0, *(_ratio(point, fitted) for point in points)]))

    def of(self, shape: Shape) -> int:
        """Bytes for a shape: at least what was ever observed of it, and never less for more tokens."""
        return whole(self.rate.of(shape))

    def observations(self) -> list[Observation]:
        return [Observation(*key, value) for key, value in self._points.items()]

    def restore(self, observations: Iterable[Observation], floor: Rate, count: int) -> None:
        """Continues from what another run has stored."""
        self._points = {
            (p.tokens, p.token_lengths): p.value if p.value > TINY else 0.0 for p in list(observations)[: self.SHAPES]
        }
        self.floor, self.count, self._rate = floor, count, None

    @property
    def spread(self) -> float:
        """Greatest share by which a remembered observation is over-predicted."""
        over = [self.rate.at(p.tokens, p.token_lengths) / p.value - 1 for p in self.observations() if p.value > 0]
        return max(over, default=0.0)


# -- seconds -------------------------------------------------------------------------------------------------------


class SecondsFit:
    """Typical seconds (F2), with their number and spread.

    Args:
        prior: proportions of the parts; its scale does not matter.
    """

    GROUPS = 16  # of near-equal shapes: tokens and length within 1/8 of a power of two
    GROUP_SIZE = 31  # newest observations of a group: enough that a run of outliers is no majority
    PRIOR_SPREAD = 0.5  # the analytic proportions may be off by about this share
    UNKNOWN_NOISE = 0.1  # relative noise of an observation until groups tell

    def __init__(self, prior: Rate = BY_TOKEN) -> None:
        self.prior = proportions(prior)
        self.count = 0
        self._groups: dict[tuple[int, int], deque[Observation]] = {}
        self._solved: tuple[Rate, float] | None = None  # rate and spread
        self._solved_for = 0

    def note(self, shape: Shape, seconds: float) -> None:
        """One observation; of none that is not positive and finite anything is learnt."""
        if TINY < seconds < math.inf:
            self._put(Observation.of(shape, seconds))
            self.count += 1

    def _put(self, observation: Observation) -> None:
        length = observation.token_lengths / observation.tokens
        key = (round(8 * math.log2(observation.tokens)), round(8 * math.log2(length)))
        group = self._groups.pop(key, None)
        if group is None:
            group = deque(maxlen=self.GROUP_SIZE)
            self._solved = None
            if len(self._groups) >= self.GROUPS:
                del self._groups[next(iter(self._groups))]  # the one that was not seen for the longest time
        group.append(observation)
        self._groups[key] = group

    @property
    def rate(self) -> Rate:
        return self._solution()[0]

    @property
    def spread(self) -> float:
        """Relative distance of a typical observation from the fit (scaled median absolute deviation)."""
        return self._solution()[1]

    @property
    def standard_error(self) -> float:
        """Relative uncertainty of the fit's level; that of unknown noise where too little was seen to tell."""
        if self.count == 0:
            return math.inf
        remembered = sum(len(group) for group in self._groups.values())
        noise = self.spread if remembered >= 5 else max(self.spread, self.UNKNOWN_NOISE)
        return 1.25 * noise / math.sqrt(remembered)  # 1.25: of a median against a mean

    def of(self, shape: Shape) -> float:
        """Typical seconds for a shape; 0 where nothing was observed."""
        return self.rate.of(shape)

    def observations(self) -> list[Observation]:
        return [observation for group in self._groups.values() for observation in group]

    def restore(self, observations: Iterable[Observation], count: int) -> None:
        """Continues from what another run has stored."""
        self._groups.clear()
        self._solved = None
        for observation in observations:
            if observation.value > TINY:
                self._put(observation)
        self.count = count if self._groups else 0

    def _solution(self) -> tuple[Rate, float]:
        # Solved anew for a new group of shapes, else when an eighth more was seen: seldom, and ever more seldom.
        if self._solved is None or self.count > self._solved_for + self._solved_for // 8:
            self._solved, self._solved_for = self._solve(), self.count
        return self._solved

    def _solve(self) -> tuple[Rate, float]:
        if not self._groups:
            return Rate(), 0.0
        medians = [(_median(list(group), self.prior), float(len(group))) for group in self._groups.values()]
        noise = self._noise()
        rate = solve(medians, self.prior, (noise / self.PRIOR_SPREAD) ** 2, robust=max(noise, 1e-3))
        return rate, _deviation([p.value / rate.at(p.tokens, p.token_lengths) for p in self.observations()], 1.0)

    def _noise(self) -> float:
        """Relative spread within groups, which no fit can be blamed for."""
        ratios: list[float] = []
        for group in self._groups.values():
            if len(group) >= 3:
                middle = _median(list(group), self.prior)
                per_prior = middle.value / self.prior.at(middle.tokens, middle.token_lengths)
                ratios += [p.value / self.prior.at(p.tokens, p.token_lengths) / per_prior for p in group]
        return max(1e-4, _deviation(ratios, 1.0)) if ratios else self.UNKNOWN_NOISE


def _median(group: list[Observation], prior: Rate) -> Observation:
    """The observation whose value per prior is the (lower) median of the group's."""
    ordered = sorted(group, key=lambda p: p.value / prior.at(p.tokens, p.token_lengths))
    return ordered[(len(ordered) - 1) // 2]


def _deviation(ratios: list[float], middle: float) -> float:
    """Median absolute deviation, scaled to be the standard deviation of normal noise."""
    distances = sorted(abs(ratio - middle) for ratio in ratios)
    return 1.4826 * distances[len(distances) // 2] if distances else 0.0


def _ratio(point: Observation, rate: Rate) -> float:
    predicted = rate.at(point.tokens, point.token_lengths)
    return point.value / predicted if predicted > 0 else 1.0


# -- solving -------------------------------------------------------------------------------------------------------

Vector = tuple[float, float, float]
_NOTHING = 1e-9  # an unknown this little below 0 is 0
_CONSTANT_TRUST = 100.0  # a constant must be shown by the data: the prior against it is this much stronger


def solve(points: Sequence[tuple[Observation, float]], prior: Rate, trust: float, robust: float | None = None) -> Rate:
    """Non-negative coefficients with the least weighted squares of relative errors, near the prior's proportions.

    Args:
        points: observations with weights.
        prior: `proportions`.
        trust: weight of the prior's proportions (F3).
        robust: errors beyond this relative size count by their absolute value instead of their square.
    """
    if not any(point.value > 0 for point, _ in points):
        return Rate()
    frame = _Frame.around(points, prior)
    rows = [frame.row(point) for point, _ in points]
    weights = [weight for _, weight in points]
    found = _nearest(rows, weights, frame.start, trust)
    for _ in range(12 if robust is not None and len(points) > 1 else 0):
        errors = [abs(sum(a * x for a, x in zip(row, found)) - target) for row, target in rows]
        tempered = [w / max(1.0, error / (robust or 1.0)) for w, error in zip(weights, errors)]
        before, found = found, _nearest(rows, tempered, frame.start, trust)
        if max(abs(one - other) for one, other in zip(before, found)) < 1e-6:
            break
    return frame.rate(found)


@dataclass(frozen=True)
class _Frame:
    """Dimensionless unknowns: shares of the per-token value at a typical shape, so that one ridge suits all three."""

    value: float  # per token, at the typical shape
    tokens: float
    length: float
    start: Vector

    @classmethod
    def around(cls, points: Sequence[tuple[Observation, float]], prior: Rate) -> _Frame:
        seen = [point for point, _ in points]
        tokens = sum(p.tokens for p in seen) / len(seen)
        length = sum(p.token_lengths for p in seen) / sum(p.tokens for p in seen)
        ratios = sorted(p.value / prior.at(p.tokens, p.token_lengths) for p in seen if p.value > 0)
        scaled = prior.times(ratios[(len(ratios) - 1) // 2])
        value = scaled.at(tokens, tokens * length) / tokens
        start = (scaled.per_token, scaled.per_token_length * length, scaled.constant / tokens)
        return cls(value, tokens, length, (start[0] / value, start[1] / value, start[2] / value))

    def row(self, point: Observation) -> tuple[Vector, float]:
        """Features and target of one observation, divided by its value."""
        unit = self.value / max(point.value, 1e-3 * self.value * point.tokens)
        features = (point.tokens * unit, point.token_lengths / self.length * unit, self.tokens * unit)
        return features, point.value / self.value * unit

    def rate(self, found: Vector) -> Rate:
        return Rate(found[0] * self.value, found[1] * self.value / self.length, found[2] * self.value * self.tokens)


def _nearest(rows: Sequence[tuple[Vector, float]], weights: Sequence[float], start: Vector, trust: float) -> Vector:
    """Ridge regression around `start` with all unknowns >= 0: the best of the 7 ways to leave unknowns at 0."""
    trusts = (trust, trust, trust * _CONSTANT_TRUST)
    matrix = [[sum(w * r[i] * r[j] for (r, _), w in zip(rows, weights)) for j in range(3)] for i in range(3)]
    right = [sum(w * r[i] * target for (r, target), w in zip(rows, weights)) for i in range(3)]
    for i in range(3):
        matrix[i][i] += trusts[i]
        right[i] += trusts[i] * start[i]
    best: tuple[float, Vector] = (math.inf, (0.0, 0.0, 0.0))
    for size in (3, 2, 1):
        for free in combinations(range(3), size):
            solved = _solved(matrix, right, free)
            if solved is None or min(solved) < -_NOTHING:
                continue
            found = (max(0.0, solved[0]), max(0.0, solved[1]), max(0.0, solved[2]))
            if size == 3:
                return found  # nothing is better than what no bound holds back
            curve = sum(found[i] * matrix[i][j] * found[j] for i in free for j in free)
            cost = curve - 2 * sum(found[i] * right[i] for i in free)
            # costs are no more exact than this; of equals the one with more unknowns keeps the prior's small parts
            if cost < best[0] - 1e-14 * abs(cost):
                best = (cost, found)
    return best[1]


def _solved(matrix: list[list[float]], right: list[float], free: tuple[int, ...]) -> Vector | None:
    """The unknowns in `free` from their normal equations, by elimination; the others are 0."""
    rows = [[*(matrix[i][j] for j in free), right[i]] for i in free]
    for k in range(len(free)):
        pivot = rows[k][k]
        if pivot <= 1e-14 * matrix[free[k]][free[k]]:
            return None
        for below in rows[k + 1 :]:
            factor = below[k] / pivot
            for column in range(k, len(free) + 1):
                below[column] -= factor * rows[k][column]
    found = [0.0, 0.0, 0.0]
    for k in reversed(range(len(free))):
        rest = sum(rows[k][j] * found[free[j]] for j in range(k + 1, len(free)))
        found[free[k]] = (rows[k][len(free)] - rest) / rows[k][k]
    return found[0], found[1], found[2]
