"""Prices of bytes and of risk: what no plan can beat, and how a good one weighs its steps.

With a price mu per byte of one memory row and lambda per unit of the risk row, each unit alone picks what is best for
it, and no feasible plan saves more than

    D(mu, lambda) = sum_u max_k (seconds[k, u] - mu * bytes[k, u] - lambda * risk[k, u]) + mu * memory + lambda * limit

for any mu, lambda >= 0 (Lagrange). D is convex; its least value is the linear programme's. It is looked for on a grid
of prices that all risk budgets of a problem share, then closer around the best point.

Only the row that leaves least room is priced; leaving out the others can only raise the bound. NumPy, because this
runs inside an update: some hundred thousand terms take a millisecond.
"""

# K options of a unit, U units, M prices of bytes, L prices of risk

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hilore.planning.options import Option
from ds_hilore.planning.problem import RISK_TOLERANCE, Problem

_Array = NDArray[np.float64]

_GRID = 16
_ZOOMS = 9
#: Prices above the lowest of all that matter by less than this ratio are not looked at.
_SPREAD = 1e-5
#: A bound is a sum of floats in another order than the plan's own.
_ROUNDING = 1e-12


class Bound(NamedTuple):
    """No feasible plan saves more than `seconds`, by these prices: seconds per byte and per unit of the risk row."""

    seconds: float
    per_byte: float
    per_risk: float


class Dual:
    """The prices of one problem under any risk budget."""

    def __init__(self, problem: Problem) -> None:
        memory, limit_bytes = _tightest_row(problem)
        options = problem.options
        self._scale_bytes = float(max(1, limit_bytes))
        self._memory = limit_bytes / self._scale_bytes
        self._seconds_KU = _table([[option.seconds for option in choices] for choices in options], -math.inf)
        self._bytes_KU = _table(memory, 0.0) / self._scale_bytes
        risk_KU = _table([[option.risk_cost for option in choices] for choices in options], 0.0)
        unaffordable = ~np.isfinite(risk_KU)
        self._seconds_KU[unaffordable] = -math.inf
        risk_KU[unaffordable] = 0.0
        self._scale_risk = float(risk_KU.max()) or 1.0
        self._risk_KU = risk_KU / self._scale_risk
        binds = self._bytes_KU.max(axis=0).sum() > self._memory
        self._byte_prices_M = _prices(self._seconds_KU, self._bytes_KU) if binds else np.zeros(1)
        self._risk_prices_L = _prices(self._seconds_KU, self._risk_KU)
        self._best_ML = self._served(self._seconds_KU, self._byte_prices_M, self._risk_prices_L)

    def bound(self, risk_limit: float) -> Bound:
        """Gives the least bound found for a problem with this right side of the risk row (B^2, or B if linear)."""
        limit = risk_limit * (1 + RISK_TOLERANCE) / self._scale_risk
        bytes_M, risk_L = self._byte_prices_M, self._risk_prices_L
        # an option that breaks the risk row alone is in no plan
        seconds_KU = np.where(self._risk_KU <= limit, self._seconds_KU, -math.inf)
        value_ML = self._best_ML + bytes_M[:, None] * self._memory + risk_L * limit
        least, m, n = _least(value_ML)
        best = (least, bytes_M[m], risk_L[n])
        for _ in range(_ZOOMS):
            bytes_M, risk_L = _around(bytes_M, m), _around(risk_L, n)
            value_ML = self._served(seconds_KU, bytes_M, risk_L) + bytes_M[:, None] * self._memory + risk_L * limit
            least, m, n = _least(value_ML)
            best = min(best, (least, bytes_M[m], risk_L[n]))
        seconds = float(best[0]) + _ROUNDING * float(np.abs(self._finite_seconds()).sum())
        return Bound(seconds, float(best[1]) / self._scale_bytes, float(best[2]) / self._scale_risk)

    def choose(self, bound: Bound, risk_limit: float, dearer: float) -> list[int]:
        """Gives what each unit picks, as places of its options, at prices `dearer` times `bound`'s: a little above 1
        it is mostly a plan that fits, with little room left."""
        limit = risk_limit * (1 + RISK_TOLERANCE) / self._scale_risk
        per_byte = bound.per_byte * self._scale_bytes * dearer
        per_risk = bound.per_risk * self._scale_risk * dearer
        value_KU = self._seconds_KU - per_byte * self._bytes_KU - per_risk * self._risk_KU
        value_KU[self._risk_KU > limit] = -math.inf
        places: list[int] = value_KU.argmax(axis=0).tolist()
        return places

    def _served(self, seconds_KU: _Array, bytes_M: _Array, risk_L: _Array) -> _Array:
        """sum_u max_k of what the options are worth at every pair of prices."""
        best_MLU: _Array | None = None
        for seconds_U, bytes_U, risk_U in zip(seconds_KU, self._bytes_KU, self._risk_KU):
            after_bytes_MU = seconds_U - np.multiply.outer(bytes_M, bytes_U)
            value_MLU = after_bytes_MU[:, None, :] - np.multiply.outer(risk_L, risk_U)
            best_MLU = value_MLU if best_MLU is None else np.maximum(best_MLU, value_MLU, out=best_MLU)
        assert best_MLU is not None
        served_ML: _Array = best_MLU.sum(axis=-1)
        return served_ML

    def _finite_seconds(self) -> _Array:
        return np.where(np.isfinite(self._seconds_KU), self._seconds_KU, 0.0)


def risk_bounds(problem: Problem, risk_limits: Sequence[float]) -> list[float]:
    """Gives, for each right side of the risk row, what no plan can save more than; memory rows are left out.

    The linear programme of one row, exactly: from the calmest options up, the steps along each unit's concave hull of
    seconds over risk are taken in order of density, the last one in part.
    """
    calm = 0.0
    steps: list[tuple[float, float, float]] = []
    for options in problem.options:
        hull = concave_hull([(option.risk_cost, option.seconds) for option in options])
        calm += hull[0][1] if hull else 0.0
        for (risk, seconds), (more_risk, more_seconds) in itertools.pairwise(hull):
            steps.append((-(more_seconds - seconds) / (more_risk - risk), more_risk - risk, more_seconds - seconds))
    steps.sort()
    bounds = []
    for limit in risk_limits:
        left, seconds = limit * (1 + RISK_TOLERANCE), calm
        for _, risk, gain in steps:
            if risk > left:
                seconds += gain * left / risk
                break
            left -= risk
            seconds += gain
        bounds.append(seconds + _ROUNDING * (abs(calm) + sum(gain for _, _, gain in steps)))
    return bounds


def concave_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Gives the points (cost, gain) of the least concave curve that none lies above, while it rises, by cost."""
    hull: list[tuple[float, float]] = []
    for cost, gain in sorted((cost, -gain) for cost, gain in points if cost < math.inf):
        point = (cost, -gain)
        if hull and point[1] <= hull[-1][1]:
            continue
        while len(hull) > 1 and _rise(hull[-2], point) >= _rise(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _rise(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def _tightest_row(problem: Problem) -> tuple[list[list[int]], int]:
    """Bytes above the least by unit and option, and room for them, in the row where room is least against need."""
    _, last, limit_bytes = min(_rows(problem), key=lambda row: row[0])
    elsewhere = problem.in_flight - 1
    loads = [
        [_load(option, position, last) + elsewhere * option.held_bytes for option in options]
        for position, options in enumerate(problem.options)
    ]
    return [[load - min(each) for load in each] for each in loads], limit_bytes - sum(min(each) for each in loads)


def _load(option: Option, position: int, last: int | None) -> int:
    """What the option adds to M2 (`last` is None) or to M3 at the unit `last`, other microbatches aside."""
    if last is None:
        return option.held_bytes
    if position == last:
        return option.own_backward_bytes
    return option.backward_held_bytes if position < last else 0


def _rows(problem: Problem) -> Iterator[tuple[float, int | None, int]]:
    """(room against need, unit of M3 or None for M2, limit in bytes) of the loss and backward rows."""

    def tightness(limit: int, least: int, most: int) -> float:
        return (limit - least) / (most - least) if most > least else math.inf

    held = [[option.held_bytes for option in choices] for choices in problem.options]
    kept = [[option.backward_held_bytes for option in choices] for choices in problem.options]
    own = [[option.own_backward_bytes for option in choices] for choices in problem.options]
    others = problem.in_flight - 1
    # held by other microbatches in flight, whichever row it is
    lean, full = others * sum(map(min, held)), others * sum(map(max, held))
    if problem.prepared is None:
        limit = problem.budget_bytes - problem.base_loss_bytes
        yield tightness(limit, lean + sum(map(min, held)), full + sum(map(max, held))), None, limit
    least_before = [0, *itertools.accumulate(map(min, kept))]
    most_before = [0, *itertools.accumulate(map(max, kept))]
    limit = problem.budget_bytes - problem.base_backward_bytes - sum(unit.grad_bytes for unit in problem.units)
    for last, unit in enumerate(problem.units):
        least, most = least_before[last] + min(own[last]), most_before[last] + max(own[last])
        yield tightness(limit, lean + least, full + most), last, limit
        limit += unit.grad_bytes


def _table(by_unit: Sequence[Sequence[float]], filling: float) -> _Array:
    """Numbers by option and unit; units with fewer options are filled up."""
    columns: Any = itertools.zip_longest(*by_unit, fillvalue=filling)
    return np.array(list(columns), dtype=np.float64)


def _prices(seconds_KU: _Array, cost_KU: _Array) -> _Array:
    """Zero, and a geometric grid over every price at which some unit changes its mind."""
    slopes = [np.zeros(0)]
    for one, other in itertools.combinations(range(len(seconds_KU)), 2):
        with np.errstate(divide="ignore", invalid="ignore"):
            slope_U = (seconds_KU[one] - seconds_KU[other]) / (cost_KU[one] - cost_KU[other])
        slopes.append(slope_U[np.isfinite(slope_U) & (slope_U > 0)])
    positive = np.concatenate(slopes)
    if not positive.size:
        return np.zeros(1)
    top = float(positive.max()) * 1.01
    bottom = max(float(positive.min()) * 0.99, top * _SPREAD)
    return np.concatenate([np.zeros(1), np.geomspace(bottom, top, _GRID)])


def _least(value_ML: _Array) -> tuple[float, int, int]:
    m, n = divmod(int(value_ML.argmin()), value_ML.shape[1])
    return float(value_ML[m, n]), m, n


def _around(prices: _Array, place: int) -> _Array:
    """Five prices from the neighbour below to the one above."""
    low, high = prices[max(0, place - 1)], prices[min(len(prices) - 1, place + 1)]
    return np.linspace(low, high, 5) if high > low else prices[place : place + 1]
