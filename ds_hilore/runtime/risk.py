"""What an update may cost in gradient error, and what its microbatches do cost (design sections 3 and 4).

Everything is absolute here: exposures E are those of this microbatch's omega (objective/reach.py), kappa is error of a
gradient per E and relative error of state, the budget B is `max_gradient_error` times a running norm of the reduced
update. Scaling the loss scales all of them alike. Squares add up: over tokens, units, microbatches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.types import Shape, UnitId
from ds_hilore.objective.reach import CAUSAL, Reach, exposures
from ds_hilore.planning.margin import ExposureMargin
from ds_hilore.planning.price import Demand, PriceAccount, TokenAccount
from ds_hilore.recovery.encoded import Statistic
from ds_hilore.recovery.live import HostCopy
from ds_hilore.recovery.unit import UnitCall
from ds_hilore.runtime.forecast import Forecast
from ds_hilore.runtime.pricing import demanded, split
from ds_hilore.runtime.update import Coefficients

#: Updates after which a norm counts for 1/e: norms of updates differ by factors from one to the next.
MEMORY = 16.0


@dataclass(frozen=True)
class RiskRules:
    """What the configuration says of gradient error.

    Args:
        limit: relative error that a whole update's gradient may have; 0: exact actions only.
        static: exposures are frozen at the mean of calibration (mode static_risk).
        ranks: that share an update.
        microbatches: of one update on one rank.
        linear: risks of units, microbatches and ranks add up as they are, not in squares, and audits correct nothing
            (mode paper).
    """

    limit: float = 0.0
    static: bool = False
    ranks: int = 1
    microbatches: int = 1
    linear: bool = False

    def cost(self, risk: float) -> float:
        """What a risk adds to those of others."""
        return risk if self.linear else risk * risk

    def risk(self, cost: float) -> float:
        """The risk of so much cost together."""
        return cost if self.linear else math.sqrt(cost)


@dataclass(frozen=True)
class Exposed:
    """A microbatch's coefficients as far as plans need them, on the host.

    Attributes:
        exposure: E of units whose state reaches all that follows; infinite where a coefficient is not finite.
        tokens: those with a coefficient.
        unusable: units of which something encoded was not finite (rule C6 of the codecs).
        by_unit: E of units whose state reaches less.
    """

    exposure: float
    tokens: int
    unusable: frozenset[UnitId] = frozenset()
    by_unit: Mapping[UnitId, float] = field(default_factory=dict)

    def of(self, unit: UnitId) -> float:
        """E of a unit."""
        return self.by_unit.get(unit, self.exposure)


@dataclass(frozen=True)
class RiskNow:
    """What the final plan of one microbatch may spend: B_m, and the exposure of each unit."""

    budget: float
    exposures: Mapping[UnitId, float]


@dataclass
class RiskKeeper:
    """One rank's account of gradient error.

    Attributes:
        typical: running mean exposure of its microbatches over the root of their tokens.
        trusted: predictions have held on microbatches that did not make them; else nothing is risked.
        price: lambda of an announced update, seconds per risk cost; None where budgets go by tokens.
        foreseen: exposure that the newest microbatch was planned for; 0 where none was foreseen.
    """

    rules: RiskRules
    norm: float = 0.0
    typical: float = 0.0
    tokens: float = 0.0
    correction: float = 1.0
    frozen: float | None = None
    margin: ExposureMargin = field(default_factory=ExposureMargin)
    spent: list[float] = field(default_factory=list)
    price: float | None = None
    trusted: bool = True
    foreseen: float = 0.0
    _account: TokenAccount | PriceAccount | None = None
    _forecasts: list[Forecast | None] = field(default_factory=list)
    _demands: list[Demand] = field(default_factory=list)
    _part: float = 0.0  # of the update's risk cost, for those demands
    _predicted: float = 0.0
    _norms: int = 0
    _seen: int = 0

    @property
    def active(self) -> bool:
        return self.rules.limit > 0 and self.norm > 0

    @property
    def budget(self) -> float:
        """B of one rank's part of an update, absolute."""
        whole = self.rules.limit * self.norm
        return whole / self.rules.ranks if self.rules.linear else whole * self.correction / math.sqrt(self.rules.ranks)

    @property
    def priced(self) -> bool:
        """Whether announced updates are split by the price of risk: the same on every rank, for the whole run."""
        return self.rules.limit > 0 and not self.rules.static and not self.rules.linear

    def announce(self, forecasts: Sequence[Forecast | None]) -> None:
        """All microbatches of this rank's next update are known (begin_update); None: exact actions only."""
        if not self.spent:
            self._account, self.price, self._demands = None, None, []
        self._forecasts = list(forecasts) if self.priced else []

    @property
    def announced(self) -> bool:
        """Whether an announced update is about to begin, of which no price of risk is known yet."""
        return bool(self._forecasts)

    def set_price(self, breakpoints: Iterable[tuple[float, float]], plane: ControlPlane | None = None) -> None:
        """Sets the price of risk for an announced update that is about to begin (design section 4): what its plans gain
        by how much risk. Without an announcement, or where one has not reached the host yet or foresees nothing
        (advantages that are no numbers), budgets go by tokens.

        Args:
            breakpoints: `Frontier.breakpoints` of its shape; nothing where there are no plans yet.
            plane: of the ranks that split the update's risk, all of which call this. Then nothing but the forecasts is
                waited for. None: this rank is alone with its share.

        Raises:
            RankMismatch: another rank has announced nothing.
        """
        waiting, self._forecasts = self._forecasts, []
        told = [each for each in waiting if each is not None]
        points: list[tuple[float, float]] = []
        if self._account is None and self.active and (plane is not None or all(each.ready for each in told)):
            points = list(breakpoints) if all(each.usable for each in told) else []
        scale = math.exp(self.margin.mean)
        exposures = [None if each is None else scale * each.exposure for each in waiting] if points else []
        counts = [0 if each is None else each.tokens for each in waiting] if points else []
        demands, part = demanded(exposures, counts, points), self.budget**2
        if plane is not None:
            found = split(plane, demands, part)
            demands = [] if found is None else demands
            part, self.price = (part, None) if found is None else found
        if demands:
            self._demands, self._part = demands, part
            self._account = PriceAccount(demands, part)

    def expect(self, tokens: int, forecast: Forecast | None = None) -> tuple[float, Sequence[float]]:
        """Before forward: the B / E that the microbatch may expect, and equally likely ratios of true to predicted E.

        Args:
            tokens: positions of the microbatch.
            forecast: what was announced of it.
        """
        self._predicted = 0.0
        unforeseeable = forecast is not None and forecast.ready and not forecast.usable
        if not self.active or self.typical <= 0 or unforeseeable or not self.trusted:
            return 0.0, (1.0,)
        share = self.rules.risk(self.rules.cost(self.budget) / self.rules.microbatches)
        self._predicted = self.typical * self.rules.risk(self.tokens or tokens)
        if isinstance(self._account, PriceAccount) and forecast is not None:
            share, self._predicted = math.sqrt(self._account.expected()), forecast.exposure
            if self._predicted == 0:
                return math.inf, (1.0,)
        if self.rules.static:
            return share / (self.frozen or self._predicted), (1.0,)
        return share / self._predicted, self.margin.ratios()

    def decide(self, exposed: Exposed, units: Iterable[UnitId]) -> RiskNow:
        """After forward: what this microbatch may spend, given its real coefficients."""
        exposure = exposed.exposure
        if self._account is None:
            local = max(1, round(self.tokens * self.rules.microbatches) or exposed.tokens)
            self._account = TokenAccount(self.rules.cost(self.budget), local)
        if isinstance(self._account, PriceAccount):
            granted = self._account.grant(exposure if math.isfinite(exposure) else None)
        else:
            granted = self._account.grant(exposed.tokens)
        frozen = None
        if self.rules.static and self.frozen is not None and math.isfinite(exposure):
            frozen = self.frozen
            granted = self.rules.cost(self.budget) / self.rules.microbatches
        exposures = {unit: exposed.of(unit) if frozen is None else frozen for unit in units}
        exposures.update(dict.fromkeys(exposures.keys() & exposed.unusable, math.inf))
        return RiskNow(self.rules.risk(granted) if self.trusted else 0.0, exposures)

    def pass_by(self, exposed: Exposed | None) -> None:
        """A microbatch runs with exact actions, or as forced: it spends nothing, and may have told its exposure."""
        if isinstance(self._account, PriceAccount):
            self._account.skip()
        if exposed is None:
            self._predicted = 0.0
        else:
            self.observe(exposed)

    def note(self, exposed: Exposed, risk: float) -> None:
        """A microbatch was decided at this risk (absolute)."""
        if self._account is not None:
            self._account.spend(self.rules.cost(risk))
        self.spent.append(risk)
        self.observe(exposed)

    def corrected(self, risk: float) -> None:
        """The microbatch that was noted last turned out to be at this risk, a higher one."""
        before, self.spent[-1] = self.spent[-1], risk
        if self._account is not None:
            self._account.spend(max(0.0, self.rules.cost(risk) - self.rules.cost(before)))

    def observe(self, exposed: Exposed) -> None:
        """A microbatch's exposure, whatever was done with it."""
        predicted, self._predicted = self._predicted, 0.0  # of this one; those that are forced have none
        self.foreseen = predicted
        if not math.isfinite(exposed.exposure) or exposed.tokens == 0:
            return
        if predicted > 0:
            self.margin.observe(predicted, exposed.exposure)
        self._seen += 1
        fade = max(1 / self._seen, 1 / MEMORY)
        self.typical += fade * (exposed.exposure / self.rules.risk(exposed.tokens) - self.typical)
        self.tokens += fade * (exposed.tokens - self.tokens)

    def freeze(self, exposures: Sequence[float]) -> None:
        """The mean exposure of calibration, for static risk."""
        finite = [exposure for exposure in exposures if math.isfinite(exposure)]
        self.frozen = math.fsum(finite) / len(finite) if finite else None

    def end_update(self, norm: float | None) -> float:
        """The optimizer has stepped on a gradient of this norm (None: not known).

        Returns:
            This rank's predicted error of the update, relative.
        """
        predicted = self.rules.risk(math.fsum(map(self.rules.cost, self.spent)))
        relative = predicted / self.norm if self.norm > 0 else 0.0
        self._forget()
        if norm is not None and math.isfinite(norm) and norm > 0:
            self._norms += 1
            fade = max(1 / self._norms, 1 / MEMORY)
            # the mean of squares: budgets are of squares
            self.norm = math.sqrt(self.norm**2 + fade * (norm**2 - self.norm**2))
        return relative

    def abort(self) -> None:
        """The update starts again, as it was announced."""
        forecasts, demands, price = self._forecasts, self._demands, self.price
        self._forget()
        self._forecasts = forecasts
        if demands:
            self._demands, self.price = demands, price
            self._account = PriceAccount(demands, self._part)

    def _forget(self) -> None:
        """What was foreseen of microbatches that never came, or ran as forced, says nothing of the next ones."""
        self.spent.clear()
        self._account, self.price = None, None
        self._predicted = 0.0
        self._forecasts, self._demands = [], []


def read(
    coefficients: Sequence[Coefficients],
    calls: Sequence[UnitCall],
    reaches: Mapping[str, Reach] | None = None,
    shape: Shape | None = None,
    linear: bool = False,
) -> Exposed:
    """Brings what is needed of a microbatch's coefficients and of its encoded state to the host, in one copy.

    Without coefficients nothing is known of the exposure, which is infinite then.

    Args:
        reaches: by unit name, of units whose state does not reach all that follows.
        shape: of the units, to tell how many positions lie before those with coefficients.
        linear: exposures are sums of |omega| (mode paper).
    """
    reach_of = _reaches([call.unit for call in calls], reaches or {}, shape)
    distinct = tuple(dict.fromkeys((CAUSAL, *reach_of.values())))
    flagged = [(call.unit, statistic) for call in calls for statistic in call.statistics]
    parts = [_facts(each, distinct, shape, linear) for each in coefficients]
    parts += [_flag(statistic) for _, statistic in flagged]
    if not parts:
        return Exposed(math.inf, 0)
    device = parts[0].device
    values = HostCopy(torch.cat([part.to(device) for part in parts])).get().tolist()
    width = 2 + len(distinct)
    facts = [values[width * k : width * (k + 1)] for k in range(len(coefficients))]
    finite = bool(facts) and all(fact[0] for fact in facts)
    columns = zip(distinct, *(fact[2:] for fact in facts))
    together = math.fsum if linear else _root_of_squares
    found = {reach: together(column) if finite else math.inf for reach, *column in columns}
    flags = values[width * len(coefficients) :]
    return Exposed(
        found[CAUSAL],
        int(sum(fact[1] for fact in facts)),
        frozenset(unit for (unit, _), usable in zip(flagged, flags) if not usable),
        {unit: found[reach] for unit, reach in reach_of.items()},
    )


def _reaches(units: Iterable[UnitId], reaches: Mapping[str, Reach], shape: Shape | None) -> dict[UnitId, Reach]:
    """Those of units that do not reach all that follows in this shape: windows that hold it are none."""
    found = {unit: reaches[unit.name] for unit in units if unit.name in reaches}
    longest = math.inf if shape is None else shape.length
    return {
        unit: reach for unit, reach in found.items() if reach.route is not None or (reach.span or longest) < longest
    }


def _root_of_squares(values: Sequence[float]) -> float:
    return math.hypot(*values)


def _facts(each: Coefficients, reaches: Sequence[Reach], shape: Shape | None, linear: bool) -> Tensor:
    """[2 + reaches] float64: whether finite, tokens, exposures."""
    rows, tokens = each.omega.shape
    # coefficients of a row's last tokens; what predicts the first of them is the last position of its prompt
    before = max(0, shape.length - tokens - 1) if shape is not None and shape.segments == rows else 0
    live = (each.mask != 0).sum() if each.mask is not None else torch.full_like(each.omega[:1, :1], each.omega.numel())
    flags = torch.stack([each.facts.finite.double(), live.double().reshape(())])
    if linear:
        return torch.cat([flags, each.facts.exposure.double().expand(len(reaches))])
    with torch.no_grad():
        return torch.cat([flags, exposures(each.omega, reaches, each.mask, before=before)])


def _flag(statistic: Statistic) -> Tensor:
    """[1] float64: 1 where what was encoded may be used."""
    return statistic.squares.sum().isfinite().double().reshape(1)
