"""Calibration: what compressed state costs in gradient error, from interventions on a few real microbatches.

An intervention compresses one state group of one unit with one codec, everything else exact, and compares the
microbatch's gradient with the exact one. Its observation is y (norm of the difference) at x = E * e (exposure times
encoding error, design section 3). Units of like depth share a slope kappa: a *place* is (state group, codec, band of
depth). This module says which interventions to make and what follows from them; it knows no engine and no tensor.

    calibration.interventions(m, units, codecs)      what to do with microbatch m
    calibration.note(observation)                    what it gave
    calibration.risk(position, units, errors)        r of a unit at exposure 1, once it is over

NOTE [Calibration]
K1  Each microbatch visits each place once, whatever the number of units: the unit rotates within the band, in an order
    that spreads over it, and none comes twice before all came once.
K2  A place that is known well enough, or that overflowed, is visited no more.
K3  All of it takes no longer than `Cost.MOST_UPDATES` updates, and is planned for less. A pass that was never timed
    counts as a whole update.
K4  Slopes are judged by regression.py. A place that cannot be told from zero borrows the slope of all depths; one that
    contradicts itself or overflowed is disabled, and says why.
K5  Microbatches that judge predictions never fitted them (held_out.py); what that takes is kept aside of K3.
K6  Audits correct all slopes by one factor, the coherence. `risk` does not contain it: the budget is divided by it.
K7  Where held-out microbatches show larger errors than predicted, all slopes are raised, and judged anew.
K8  Units differ within a band: each has a factor, from what was seen of it in all its places (unit_factors.py).

Exposures and errors may be in any unit, the same throughout: kappa scales along.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.coherence import Coherence
from ds_hilore.profiling.regression import Fit, Point, Verdict, spearman, through_origin
from ds_hilore.profiling.unit_factors import unit_factors

#: Slopes that take part in that of all depths.
_SOUND = (Verdict.USABLE, Verdict.UNCERTAIN)

#: Passes that are kept for judging: two microbatches with their exact gradient, one unit, and several together.
JUDGING_PASSES = 6

#: Bands of depth: near the input, in the middle, near the loss.
BANDS = 3


@dataclass(frozen=True, order=True)
class Place:
    """What shares one kappa: a state group under a codec, in a band of depth."""

    group: str
    codec: str
    depth: int = 0

    def __str__(self) -> str:
        return f"{self.group}={self.codec} at depth {self.depth}"


def depth_band(position: int, units: int, bands: int = BANDS) -> int:
    """The band, from 0 near the input, of the unit that is the `position`-th of `units` in forward order.

    Raises:
        UsageError: there is no such unit.
    """
    if not 0 <= position < units or bands < 1:
        raise UsageError(f"unit {position} of {units} is in none of {bands} band(s)")
    return position * bands // units


@dataclass(frozen=True)
class Intervention:
    """One pass to make: on this microbatch, this unit's state is compressed as the place says."""

    microbatch: int
    unit: UnitId
    place: Place


@dataclass(frozen=True)
class Observation:
    """What one intervention gave.

    Args:
        exposure: E of the unit in this microbatch.
        encoding_error: e, root mean square of the relative error over the tensors of the group.
        gradient_error: y, norm of the gradient's difference from the exact one.

    Values may be infinite or no number, which disables the place; not negative.
    """

    place: Place
    unit: UnitId
    microbatch: int
    exposure: float
    encoding_error: float
    gradient_error: float

    def __post_init__(self) -> None:
        if self.exposure < 0 or self.encoding_error < 0 or self.gradient_error < 0:
            raise UsageError(f"exposures and errors are not below 0, got {self}")

    @property
    def point(self) -> Point:
        return Point(self.microbatch, self.exposure * self.encoding_error, self.gradient_error)


@dataclass(frozen=True)
class Judgement:
    """A prediction on a microbatch that fitted nothing, and what was measured there. `unit`: None: several together."""

    unit: UnitId | None
    microbatch: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Agreement:
    """Rank correlation of predicted risk with measured error, None where it does not vary. Others are averaged over."""

    units: float | None
    microbatches: float | None
    count: int


@dataclass(frozen=True)
class Used:
    """The slope that a place goes by. `pooled`: it is that of all depths, its own being too uncertain."""

    fit: Fit
    pooled: bool
    kappa_upper: float

    @property
    def kappa(self) -> float:
        return self.fit.kappa


@dataclass
class Calibration:
    """One rank's calibration. Everything that it learns is in its fields: see calibration_layout.py."""

    bands: int = BANDS
    cost: Cost = field(default_factory=Cost)
    audits: Coherence = field(default_factory=Coherence)
    observations: list[Observation] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    raised: float = 1.0  # K7: of all risks
    asked: Counter[tuple[Place, UnitId]] = field(default_factory=Counter)
    _used: dict[Place, Used] = field(
        default_factory=dict, repr=False, compare=False
    )  # solved once, until more is noted
    _factors: dict[UnitId, float] | None = field(default=None, repr=False, compare=False)  # so are these

    # -- what to do ------------------------------------------------------------------------------------------------

    def interventions(
        self,
        microbatch: int,
        units: Sequence[tuple[UnitId, int, str]],
        codecs: Mapping[str, Iterable[tuple[str, str]]],
    ) -> list[Intervention]:
        """Which interventions to make on a microbatch, beside its exact gradient (K1 to K3). None: it is over.

        Args:
            microbatch: counted through over the calibration, restarts included.
            units: with their position in forward order and their class.
            codecs: (state group, codec) pairs that are possible, by class of units.
        """
        self._refuse(microbatch, {judged.microbatch for judged in self.judgements}, "judged already")
        members: dict[Place, list[UnitId]] = {}
        for unit, position, unit_class in units:
            band = depth_band(position, len(units), self.bands)
            for group, codec in codecs.get(unit_class, ()):
                members.setdefault(Place(group, codec, band), []).append(unit)
        visits: Counter[Place] = Counter()
        for (place, _), times in self.asked.items():
            visits[place] += times
        wanted = [place for place in members if self._open(place)]
        wanted.sort(key=lambda place: visits[place])  # stable: where not all fit, those that were left out are next
        room = self.cost.passes_left - 1 - JUDGING_PASSES  # 1: the exact one
        if room < len(wanted):
            wanted = wanted[: max(0, math.floor(room))]
        return [self._ask(microbatch, place, members[place]) for place in wanted]

    def _open(self, place: Place) -> bool:
        fit = self.fit(place)
        return not fit.tight and fit.verdict is not Verdict.NOT_FINITE

    def _ask(self, microbatch: int, place: Place, members: Sequence[UnitId]) -> Intervention:
        bits = len(members).bit_length()
        spread = sorted(range(len(members)), key=lambda rank: f"{rank:0{bits}b}"[::-1])
        unit = members[min(spread, key=lambda rank: self.asked[(place, members[rank])])]
        self.asked[(place, unit)] += 1
        return Intervention(microbatch, unit, place)

    def withdraw(self, wanted: Iterable[Intervention]) -> None:
        """These were asked for, and will not be made: others are not put off for them."""
        for each in wanted:
            self.asked[(each.place, each.unit)] -= 1
        self.asked = +self.asked

    # -- what was seen ---------------------------------------------------------------------------------------------

    def note(self, observation: Observation) -> None:
        """One intervention was made.

        Raises:
            UsageError: its microbatch has judged predictions (K5).
        """
        self._refuse(observation.microbatch, {judged.microbatch for judged in self.judgements}, "judged already")
        self.observations.append(observation)
        self._used.clear()
        self._factors = None

    def note_judged(self, unit: UnitId | None, microbatch: int, predicted: float, measured: float) -> None:
        """A whole compressed unit, or several together (None), on a microbatch kept for judging: predicted and measured
        error.

        Raises:
            UsageError: the microbatch has fitted (K5).
        """
        self._refuse(microbatch, {seen.microbatch for seen in self.observations}, "fitted already")
        self.judgements.append(Judgement(unit, microbatch, predicted, measured))

    def note_audit(self, predicted: float, measured: float) -> None:
        """Error of a whole audited update, relative: see `Coherence.note`."""
        self.audits.note(predicted, measured)

    def _refuse(self, microbatch: int, others: set[int], what: str) -> None:
        if microbatch in others:
            raise UsageError(f"microbatch {microbatch} has {what}: what judges a prediction must not have made it")

    # -- what follows ----------------------------------------------------------------------------------------------

    @property
    def coherence(self) -> float:
        """Above 1 where errors are larger than predicted (K6)."""
        return self.audits.factor

    @property
    def places(self) -> list[Place]:
        """All places that were visited."""
        return sorted({seen.place for seen in self.observations} | {place for place, _ in self.asked})

    def fit(self, place: Place) -> Fit:
        """What the place's own observations say."""
        return through_origin(seen.point for seen in self.observations if seen.place == place)

    def used(self, place: Place) -> Used:
        """The slope to go by (K4): its fit says whether it may be used, and why not."""
        found = self._used.get(place)
        if found is None:
            own = self.fit(place)
            found = Used(own, False, own.kappa_upper)
            if own.verdict is Verdict.UNCERTAIN:
                found = self._pool(place) or found
            self._used[place] = found
        return found

    def _pool(self, place: Place) -> Used | None:
        """The slope over all depths; at least that of the steepest. None where it may not be used either."""
        alike = {
            seen.place
            for seen in self.observations
            if (seen.place.group, seen.place.codec) == (place.group, place.codec)
        }
        fits = {other: fit for other in alike if (fit := self.fit(other)).verdict in _SOUND}
        pool = through_origin(seen.point for seen in self.observations if seen.place in fits)
        if not pool.usable:
            return None
        return Used(pool, True, max(pool.kappa_upper, *(fit.kappa for fit in fits.values())))

    def factor(self, unit: UnitId) -> float:
        """Of all slopes, for one unit (K8)."""
        if self._factors is None:
            residuals: dict[UnitId, list[float]] = {}
            for seen in self.observations:
                used = self.used(seen.place)
                predicted = used.kappa * seen.point.x if used.fit.usable else 0.0
                if 0 < predicted < math.inf and 0 < seen.point.y < math.inf:
                    residuals.setdefault(seen.unit, []).append(math.log(seen.point.y / predicted))
            self._factors = unit_factors(residuals)
        return self._factors.get(unit, 1.0)

    def risk(
        self, position: int, units: int, errors: Mapping[tuple[str, str], float], unit: UnitId | None = None
    ) -> float | None:
        """r of a unit at exposure 1: sum of kappa * e over its compressed state groups, on the safe side.

        Args:
            position: of the unit in forward order, of `units`.
            errors: encoding error e by (state group, codec).
            unit: which one it is; None: any of its band.

        Returns:
            None where one of its places may not be used, or an error is not finite.
        """
        depth = depth_band(position, units, self.bands)
        used = [(self.used(Place(group, codec, depth)), error) for (group, codec), error in errors.items()]
        if not all(each.fit.usable for each, _ in used):
            return None
        own = self.raised * (1.0 if unit is None else self.factor(unit))
        risk = own * math.fsum(each.kappa_upper * error for each, error in used if error != 0)
        return risk if 0 <= risk < math.inf else None

    def disabled(self) -> dict[Place, str]:
        """Visited places that may not be used, with the reason."""
        return {place: used.fit.reason for place in self.places if not (used := self.used(place)).fit.usable}

    def exposures(self) -> list[float]:
        """Mean exposure of each microbatch that was seen, in order."""
        seen: dict[int, list[float]] = {}
        for observation in self.observations:
            seen.setdefault(observation.microbatch, []).append(observation.exposure)
        return [math.fsum(values) / len(values) for _, values in sorted(seen.items())]

    def agreement(self) -> Agreement:
        """How well predictions rank units, and microbatches, that did not make them.

        Errors of one unit add in squares, those of one microbatch too where none of several together was measured;
        what is not finite is left out.
        """
        good = [each for each in self.judgements if math.isfinite(each.predicted) and math.isfinite(each.measured)]
        together = any(each.unit is None for each in good)
        by_unit: dict[object, list[Judgement]] = {}
        by_microbatch: dict[object, list[Judgement]] = {}
        for each in good:
            if each.unit is not None:
                by_unit.setdefault(each.unit, []).append(each)
            if (each.unit is None) == together:
                by_microbatch.setdefault(each.microbatch, []).append(each)
        return Agreement(_agree(by_unit), _agree(by_microbatch), len(good))

    def lines(self, seconds: float | None = None) -> list[str]:
        """What to tell the user, one line each.

        Args:
            seconds: that calibration took, where `cost` was not told.
        """
        places, disabled = self.places, self.disabled()
        took = self.cost.seconds if seconds is None else seconds
        updates = f" ({took / self.cost.update_seconds:.1f} updates)" if self.cost.update_seconds else ""
        said = [
            f"calibration: {len(places) - len(disabled)} of {len(places)} places may be compressed, from "
            f"{len(self.observations)} observations of {len(self.exposures())} microbatches; {took:.1f} s{updates}"
        ]
        said += [f"not compressed: {place}: {reason}" for place, reason in disabled.items()]
        pooled = [str(place) for place in places if place not in disabled and self.used(place).pooled]
        if pooled:
            said.append(f"judged together with other depths, for want of observations: {', '.join(pooled)}")
        found = self.agreement()
        if found.count:
            said.append(
                f"predicted risk against {found.count} measured errors: Spearman {_shown(found.units)} over units, "
                f"{_shown(found.microbatches)} over microbatches"
            )
        return said


def _agree(judged: Mapping[object, Sequence[Judgement]]) -> float | None:
    predicted = [_mean_square([each.predicted for each in some]) for some in judged.values()]
    measured = [_mean_square([each.measured for each in some]) for some in judged.values()]
    return spearman(predicted, measured)


def _mean_square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values) / len(values)


def _shown(correlation: float | None) -> str:
    return "unknown" if correlation is None else f"{correlation:.2f}"
