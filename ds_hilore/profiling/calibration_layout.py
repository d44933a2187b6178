"""A calibration as JSON: to be stored with the profile, and to go on from.

Every number, text and list has a bound; what is not a finite number is stored as null, and disables its place again
when it is read.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import Calibration, Judgement, Observation, Place
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.coherence import Coherence
from ds_hilore.profiling.layout import Fingerprint, StoredFingerprint
from ds_hilore.profiling.strict import LARGEST, Amount, Count, Strict, Text

Name = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
Square = Annotated[float, Field(ge=0, le=Coherence.MEMORY * LARGEST**2 * 1.001)]


class StoredVisit(Strict):
    """One place and one of its units."""

    group: Name
    codec: Name
    depth: Annotated[int, Field(ge=0, le=63)]
    unit: Text
    call: Count

    @property
    def place(self) -> Place:
        return Place(self.group, self.codec, self.depth)

    @property
    def unit_id(self) -> UnitId:
        return UnitId(self.unit, self.call)


class StoredPass(StoredVisit):
    microbatch: Count
    exposure: Amount | None
    encoding_error: Amount | None
    gradient_error: Amount | None

    def read(self) -> Observation:
        values = (self.exposure, self.encoding_error, self.gradient_error)
        return Observation(self.place, self.unit_id, self.microbatch, *(_read(value) for value in values))


class StoredAsked(StoredVisit):
    times: Annotated[int, Field(ge=1, le=1 << 60)]


class StoredJudgement(Strict):
    unit: Text | None  # None: several together
    call: Count
    microbatch: Count
    predicted: Amount | None
    measured: Amount | None

    def read(self) -> Judgement:
        unit = None if self.unit is None else UnitId(self.unit, self.call)
        return Judgement(unit, self.microbatch, _read(self.predicted), _read(self.measured))


class StoredCost(Strict):
    seconds: Amount
    passes: Count
    slowest: Amount
    update_seconds: Amount | None


class StoredCoherence(Strict):
    """Sums of audits that faded."""

    measured: Square
    predicted: Square
    weight: Annotated[float, Field(ge=0, le=Coherence.MEMORY * 1.001)]

    @model_validator(mode="after")
    def _weighed(self) -> StoredCoherence:
        if (self.predicted > 0) != (self.weight > 0):
            raise ValueError("audits and their weight do not belong together")
        return self


class StoredCalibration(Strict):
    """A whole calibration. `format`: version of this layout, and of what its exposures mean (objective/reach.py)."""

    format: Literal[3]
    bands: Annotated[int, Field(ge=1, le=64)]
    cost: StoredCost
    audits: StoredCoherence
    raised: Annotated[float, Field(ge=1, le=LARGEST)]
    observations: Annotated[list[StoredPass], Field(max_length=1 << 14)]
    judgements: Annotated[list[StoredJudgement], Field(max_length=1 << 14)]
    asked: Annotated[list[StoredAsked], Field(max_length=1 << 14)]

    @model_validator(mode="after")
    def _consistent(self) -> StoredCalibration:
        if any(visit.depth >= self.bands for visit in (*self.observations, *self.asked)):
            raise ValueError("a place is deeper than there are bands")
        if len({(visit.place, visit.unit_id) for visit in self.asked}) != len(self.asked):
            raise ValueError("a unit of a place is listed twice")
        if {seen.microbatch for seen in self.observations} & {judged.microbatch for judged in self.judgements}:
            raise ValueError("a microbatch has both fitted and judged")
        return self

    @classmethod
    def of(cls, calibration: Calibration) -> StoredCalibration:
        """What was learnt, as it is stored."""
        cost, audits = calibration.cost, calibration.audits
        return cls(
            format=3,
            bands=calibration.bands,
            cost=StoredCost(
                seconds=cost.seconds, passes=cost.passes, slowest=cost.slowest, update_seconds=cost.update_seconds
            ),
            audits=StoredCoherence(measured=audits.measured, predicted=audits.predicted, weight=audits.weight),
            raised=calibration.raised,
            observations=[_stored_pass(seen) for seen in calibration.observations],
            judgements=[_stored_judgement(judged) for judged in calibration.judgements],
            asked=[
                StoredAsked(**_visit(place, unit), times=times) for (place, unit), times in calibration.asked.items()
            ],
        )

    def read(self) -> Calibration:
        """A calibration that goes on where this one was stored."""
        return Calibration(
            bands=self.bands,
            cost=Cost(**self.cost.model_dump()),
            audits=Coherence(**self.audits.model_dump()),
            raised=self.raised,
            observations=[seen.read() for seen in self.observations],
            judgements=[each.read() for each in self.judgements],
            asked=Counter({(visit.place, visit.unit_id): visit.times for visit in self.asked}),
        )


@dataclass(frozen=True)
class Progress:
    """How far a calibration is.

    Args:
        microbatches: that have fitted slopes.
        fitted: no more of them will.
        accepted: it is over, and plans may compress by it.
    """

    calibration: Calibration = field(default_factory=Calibration)
    microbatches: int = 0
    fitted: bool = False
    accepted: bool = False

    @property
    def point(self) -> list[int | bool | float]:
        """What all ranks must have in common to go on together: all of a calibration that they learn as one. Ranks add
        up the same errors, each by itself: their last digits do not count."""
        learnt, audits = self.calibration, self.calibration.audits
        together = (learnt.raised, audits.measured, audits.predicted, audits.weight)
        return [self.microbatches, self.fitted, self.accepted, *(float(f"{value:.4g}") for value in together)]


class StoredProgress(Strict):
    """A whole file: the calibration of one rank. `format`: version of this layout."""

    format: Literal[1]
    fingerprint: StoredFingerprint
    microbatches: Count
    fitted: bool
    accepted: bool
    calibration: StoredCalibration

    @model_validator(mode="after")
    def _in_order(self) -> StoredProgress:
        if self.accepted and not self.fitted:
            raise ValueError("accepted before it was fitted")
        if any(seen.microbatch >= self.microbatches for seen in self.calibration.observations):
            raise ValueError("more microbatches have fitted than were counted")
        return self

    @classmethod
    def of(cls, progress: Progress, fingerprint: Fingerprint) -> StoredProgress:
        """Where a calibration is, as it is stored."""
        return cls(
            format=1,
            fingerprint=StoredFingerprint(**asdict(fingerprint)),
            microbatches=progress.microbatches,
            fitted=progress.fitted,
            accepted=progress.accepted,
            calibration=StoredCalibration.of(progress.calibration),
        )

    def read(self) -> Progress:
        """A calibration that goes on where this one was stored."""
        return Progress(self.calibration.read(), self.microbatches, self.fitted, self.accepted)


def as_dict(calibration: Calibration) -> dict[str, Any]:
    """The calibration in what JSON knows."""
    return StoredCalibration.of(calibration).model_dump(mode="json")


def from_dict(stored: dict[str, Any]) -> Calibration:
    """The calibration that `as_dict` gave.

    Raises:
        pydantic.ValidationError: the dictionary is damaged, of another version, or contradicts itself.
    """
    return StoredCalibration.model_validate(stored).read()


def _visit(place: Place, unit: UnitId) -> dict[str, Any]:
    return {
        "group": place.group,
        "codec": place.codec,
        "depth": place.depth,
        "unit": unit.name,
        "call": unit.call,
    }


def _stored_pass(seen: Observation) -> StoredPass:
    return StoredPass(
        **_visit(seen.place, seen.unit),
        microbatch=seen.microbatch,
        exposure=_stored(seen.exposure),
        encoding_error=_stored(seen.encoding_error),
        gradient_error=_stored(seen.gradient_error),
    )


def _stored_judgement(judged: Judgement) -> StoredJudgement:
    return StoredJudgement(
        unit=None if judged.unit is None else judged.unit.name,
        call=0 if judged.unit is None else judged.unit.call,
        microbatch=judged.microbatch,
        predicted=_stored(judged.predicted),
        measured=_stored(judged.measured),
    )


def _stored(value: float) -> float | None:
    return float(value) if value <= LARGEST else None  # no number is not <= anything


def _read(value: float | None) -> float:
    return math.nan if value is None else value
