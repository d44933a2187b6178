"""The price of risk: one number, lambda, splits an update's risk budget among microbatches and ranks (section 4).

Squared risk is additive, so the split is best where every microbatch buys risk up to the same price lambda, in saved
seconds per unit of r^2. Calm microbatches then take all they can use and violent ones little.

    demand = Demand.of(frontier.breakpoints, exposure, tokens)       # one per microbatch of this rank
    table = demand_table(demands)                                    # sum it over ranks: one small all-reduce
    account = PriceAccount(demands, pot(demands, table, total))      # total = B^2 of the update
    granted = account.grant(exposure)                                # B_m^2 of the next microbatch, true exposure
    plan = row.decide(reach_of(granted, exposure))
    account.spend(cost_of(plan.risk, exposure))                      # what is not spent is there for the next

Without announcements `TokenAccount` shares by tokens and carries over. In paper mode risks add linearly: pass
`linear=True`, and B wherever it says B^2.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ds_hilore.core.errors import UsageError
from ds_hilore.planning.dual import concave_hull

#: Prices of `demand_table`, in seconds per unit of risk cost: the same on every rank, 16 per decade.
_LOWEST_DECADE, _HIGHEST_DECADE, _PER_DECADE = -9, 15, 16
_RUNGS = range(_LOWEST_DECADE * _PER_DECADE, _HIGHEST_DECADE * _PER_DECADE)
_PRICES = tuple(10 ** (rung / _PER_DECADE) for rung in _RUNGS)
#: Length of a demand table.
TABLE_LENGTH = len(_PRICES) + 3
#: Prices this near to each other are the same: slopes of equal microbatches are rounded differently.
_SAME = 1e-9


class Step(NamedTuple):
    """Risk that pays `price` seconds per unit of cost."""

    price: float
    cost: float


@dataclass(frozen=True)
class Demand:
    """What one microbatch would do with risk.

    Args:
        hull: (cost at exposure 1, seconds) of its plans: concave, ascending; cost is r^2, or r in paper mode.
        exposure: predicted E, >= 0.
        tokens: optimised tokens.
        linear: paper mode.
    """

    hull: tuple[tuple[float, float], ...]
    exposure: float
    tokens: int = 0
    linear: bool = False

    def __post_init__(self) -> None:
        if not self.exposure >= 0 or self.tokens < 0:
            raise UsageError(f"exposure and tokens must be >= 0, got {self.exposure} and {self.tokens}")

    @classmethod
    def of(
        cls, breakpoints: Iterable[tuple[float, float]], exposure: float, tokens: int = 0, linear: bool = False
    ) -> Demand:
        """From (cost at exposure 1, seconds) of plans in any order (`Frontier.breakpoints`)."""
        return cls(tuple(concave_hull(breakpoints)), exposure, tokens, linear)

    def steps(self) -> list[Step]:
        """Gives what it would buy, dearest first. Nothing at an exposure that is infinite; what is free is no cost."""
        scale = cost_of(1.0, self.exposure, self.linear)
        if not 0 < scale < math.inf:
            return []
        steps = []
        for (low, seconds), (high, more_seconds) in pairwise(self.hull):
            step = Step((more_seconds - seconds) / (high - low) / scale, (high - low) * scale)
            if 0 < step.cost < math.inf and step.price < math.inf:  # else it is too cheap to count, or too dear
                steps.append(step)
        return steps


def cost_of(risk: float, exposure: float, linear: bool = False) -> float:
    """Risk cost of a plan whose risk at exposure 1 is `risk`: (risk * exposure)^2, or not squared in paper mode."""
    if risk == 0:
        return 0.0
    scaled = risk * exposure
    return scaled if linear else scaled * scaled  # a power of a float raises where a product is infinite


def reach_of(granted: float, exposure: float, linear: bool = False) -> float:
    """The B / E at which a microbatch with this grant decides; infinite at no exposure."""
    if exposure == 0:
        return math.inf
    return (granted if linear else math.sqrt(granted)) / exposure


def demand_table(demands: Sequence[Demand]) -> list[float]:
    """Gives what this rank would spend at each price of a fixed ladder, all prices above it counted, and its tokens.

    `TABLE_LENGTH` numbers, the same for every rank; elementwise sums of them are the table of several ranks.
    """
    table = [0.0] * TABLE_LENGTH
    for demand in demands:
        for step in demand.steps():
            table[_rung(step.price)] += step.cost
        table[-1] += demand.tokens
    for rung in reversed(range(TABLE_LENGTH - 2)):
        table[rung] += table[rung + 1]
    return table


def price_of_risk(table: Sequence[float], total: float) -> float:
    """lambda: the lowest price of the ladder at which all ranks together spend no more than `total`; 0 where risk
    binds nobody."""
    rung = _first_affordable(table, total)
    return 0.0 if rung == 0 else _PRICES[min(rung, len(_PRICES)) - 1]


def pot(demands: Sequence[Demand], table: Sequence[float], total: float) -> float:
    """Gives this rank's part of the update's risk cost `total`, from its own demands and the summed table.

    Every rank gets what it spends above lambda, the same share of what is bought at lambda itself, and by tokens what
    nobody asks for. The parts of all ranks add up to `total` (to no more, but for rounding).
    """
    _refuse_negative(total)
    own = demand_table(demands)
    rung = _first_affordable(table, total)
    left = max(0.0, total - table[rung])
    if rung > 0:
        at_rung = table[rung - 1] - table[rung]
        return own[rung] + left * (own[rung - 1] - own[rung]) / at_rung
    return own[0] + left * (own[-1] / table[-1] if table[-1] > 0 else 0.0)


def shares(demands: Sequence[Demand], total: float) -> list[float]:
    """Splits `total` among the demands exactly: dearest steps first, equal prices alike, by tokens what is left over.

    The sum is `total`, or less where nobody can use it and there are no tokens to share by.
    """
    _refuse_negative(total)
    steps = sorted(
        ((step.price, step.cost, place) for place, demand in enumerate(demands) for step in demand.steps()),
        key=lambda step: -step[0],
    )
    split = [0.0] * len(demands)
    left = total
    start = 0
    while start < len(steps):
        end = start
        while end < len(steps) and steps[end][0] >= steps[start][0] * (1 - _SAME):
            end += 1
        asked = math.fsum(cost for _, cost, _ in steps[start:end])
        part = min(1.0, left / asked)
        for _, cost, place in steps[start:end]:
            split[place] += part * cost
        left -= part * asked
        if part < 1.0:
            return split
        start = end
    tokens = sum(demand.tokens for demand in demands)
    return [s + max(0.0, left) * demand.tokens / tokens if tokens else s for s, demand in zip(split, demands)]


class RiskAccount:
    """What an update may spend on this rank, and has spent. Costs are r^2 (r in paper mode) of real microbatches."""

    def __init__(self, total: float) -> None:
        _refuse_negative(total)
        self.total = total
        self.spent = 0.0

    @property
    def left(self) -> float:
        return max(0.0, self.total - self.spent)

    def spend(self, cost: float) -> None:
        """Books what the plan of the microbatch really costs, after its grant."""
        _refuse_negative(cost)
        self.spent += cost


class PriceAccount(RiskAccount):
    """Grants by the price of risk: what is left is split anew, with what is known by now, before each microbatch.

    Args:
        demands: of this rank's microbatches, in order, with predicted exposures.
        total: this rank's pot.
    """

    def __init__(self, demands: Sequence[Demand], total: float) -> None:
        super().__init__(total)
        self._waiting = list(demands)

    def expected(self) -> float:
        """What the next microbatch may expect before its forward, under its predicted exposure."""
        return shares(self._waiting, self.left)[0] if self._waiting else self.left

    def grant(self, exposure: float | None = None, breakpoints: Iterable[tuple[float, float]] | None = None) -> float:
        """Gives the risk cost that the next microbatch may spend, and takes it off the list.

        Args:
            exposure: its true exposure, or None for the predicted one.
            breakpoints: of the q-plan that was prepared (`Prepared.breakpoints`), or None for those of all.
        """
        if not self._waiting:
            return self.left  # more microbatches than announced: what is left
        if exposure is not None:
            self._waiting[0] = replace(self._waiting[0], exposure=exposure)
        if breakpoints is not None:
            self._waiting[0] = replace(self._waiting[0], hull=tuple(concave_hull(breakpoints)))
        granted = min(self.left, shares(self._waiting, self.left)[0])
        self._waiting.pop(0)
        return granted

    def skip(self) -> None:
        """The next microbatch runs with exact actions only, whatever was foreseen of it."""
        self._waiting = self._waiting[1:]


class TokenAccount(RiskAccount):
    """Grants by tokens, for updates that were not announced: B_m^2 = B^2 * tokens_m / N, the unspent carried over.

    Args:
        total: B^2 of the whole update over all ranks.
        update_tokens: N of the whole update over all ranks.
    """

    def __init__(self, total: float, update_tokens: int) -> None:
        super().__init__(total)
        if update_tokens <= 0:
            raise UsageError(f"an update has tokens, got {update_tokens}")
        self._per_token = total / update_tokens
        self._earned = 0.0

    def grant(self, tokens: int) -> float:
        """Gives the risk cost that the next microbatch, of `tokens` optimised tokens, may spend."""
        self._earned = min(self.total, self._earned + self._per_token * tokens)
        return max(0.0, self._earned - self.spent)


def _rung(price: float) -> int:
    """Place in the table of steps at `price`: 0 is below the ladder."""
    return bisect_left(_PRICES, price)


def _first_affordable(table: Sequence[float], total: float) -> int:
    """The lowest rung such that what is bought from there up costs no more than `total`."""
    return next(rung for rung in range(len(_PRICES) + 2) if table[rung] <= total)


def _refuse_negative(cost: float) -> None:
    if not 0 <= cost < math.inf:
        raise UsageError(f"a risk cost must be finite and >= 0, got {cost}")
