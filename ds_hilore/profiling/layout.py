"""What a stored profile holds: its fields with a bound on every number, text and list.

A file that fits this layout can do no more harm than a wrong measurement: bytes that it understates are corrected by
the first microbatch that holds more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ds_hilore.core.types import UnitId
from ds_hilore.profiling.fit import BytesFit, Observation, Rate, SecondsFit
from ds_hilore.profiling.measure import RECOMPUTE, ClassFits, Measurements, Relation
from ds_hilore.profiling.strict import Amount, Count, Strict, Text
from ds_hilore.profiling.variants import StateFits

Size = Annotated[float, Field(ge=1, le=1e15)]


@dataclass(frozen=True)
class Fingerprint:
    """The setting that a profile was measured in. A profile of any other setting is not used.

    Args:
        model: digest of the model's config and of the shapes of its parameters.
        trained: digest of what is trained: adapters, or all.
        dtypes: of parameters and autocast, for example "bfloat16, adapters float32".
        attention: implementation, for example "sdpa".
        loss_path: "chunked" or "logits".
        state: what of a unit's state was measured, for example "exact", or "bf16, int8": the codecs that were tried.
        device: name of the device, and its memory where that matters.
        tensor_parallel: ranks that share each layer.
        torch, deepspeed, transformers, ds_hilore: versions, "" where not installed.
    """

    model: str
    trained: str
    dtypes: str
    attention: str
    loss_path: str
    state: str
    zero_stage: int
    world_size: int
    device: str
    torch: str
    deepspeed: str
    transformers: str
    ds_hilore: str
    tensor_parallel: int = 1

    def differences(self, stored: Fingerprint) -> list[str]:
        """Fields that differ, each as "name: this then, that now"."""
        return [
            f"{item.name}: {plain(getattr(stored, item.name))} then, {plain(getattr(self, item.name))} now"
            for item in fields(self)
            if getattr(self, item.name) != getattr(stored, item.name)
        ]


class StoredFingerprint(Strict):
    model: Text
    trained: Text
    dtypes: Text
    attention: Text
    loss_path: Text
    state: Text
    zero_stage: Count
    world_size: Count
    device: Text
    torch: Text
    deepspeed: Text
    transformers: Text
    ds_hilore: Text
    tensor_parallel: Count = 1

    def read(self) -> Fingerprint:
        return Fingerprint(**self.model_dump())


class StoredObservation(Strict):
    tokens: Size
    token_lengths: Size
    value: Amount


class StoredFit(Strict):
    """Observations of one quantity; `floor`: coefficients that bytes may not fall below."""

    count: Count
    observations: Annotated[list[StoredObservation], Field(max_length=SecondsFit.GROUPS * SecondsFit.GROUP_SIZE)]
    floor: tuple[Amount, Amount, Amount] = (0.0, 0.0, 0.0)

    @model_validator(mode="after")
    def _counted(self) -> StoredFit:
        if (self.count > 0) != bool(self.observations):
            raise ValueError("observations and their count do not belong together")
        return self

    @classmethod
    def of(cls, fit: BytesFit | SecondsFit) -> StoredFit:
        found = [StoredObservation(**point._asdict()) for point in fit.observations()]
        if isinstance(fit, SecondsFit):
            return cls(count=fit.count, observations=found)
        floor = (fit.floor.per_token, fit.floor.per_token_length, fit.floor.constant)
        return cls(count=fit.count, observations=found, floor=floor)

    def into(self, fit: BytesFit | SecondsFit) -> None:
        points = [Observation(point.tokens, point.token_lengths, point.value) for point in self.observations]
        if isinstance(fit, SecondsFit):
            fit.restore(points, self.count)
        else:
            fit.restore(points, Rate(*self.floor), self.count)


class StoredSeconds(Strict):
    forward: StoredFit
    backward: StoredFit


class StoredOperator(Strict):
    held: StoredFit
    seconds: StoredFit


class StoredCodec(Strict):
    group: Text
    codec: Text
    held: StoredFit
    encode: StoredFit
    decode: StoredFit
    squares: Amount
    count: Count


class StoredParts(Strict):
    """What the state of a class is made of (profiling/variants.py: StateFits)."""

    operators: Annotated[dict[Text, StoredOperator], Field(max_length=8)] = Field(default_factory=dict)
    groups: Annotated[dict[Text, StoredFit], Field(max_length=16)] = Field(default_factory=dict)
    codecs: Annotated[list[StoredCodec], Field(max_length=128)] = Field(default_factory=list)

    @classmethod
    def of(cls, parts: StateFits) -> StoredParts:
        return cls(
            operators={
                name: StoredOperator(held=StoredFit.of(fits.held), seconds=StoredFit.of(fits.seconds))
                for name, fits in parts.operators.items()
            },
            groups={name: StoredFit.of(fit) for name, fit in parts.groups.items()},
            codecs=[
                StoredCodec(
                    group=group,
                    codec=codec,
                    held=StoredFit.of(fits.held),
                    encode=StoredFit.of(fits.encode),
                    decode=StoredFit.of(fits.decode),
                    squares=fits.squares,
                    count=fits.count,
                )
                for (group, codec), fits in parts.codecs.items()
            ],
        )

    def into(self, parts: StateFits) -> None:
        for name, operator in self.operators.items():
            operator.held.into(parts.operator(name).held)
            operator.seconds.into(parts.operator(name).seconds)
        for name, fit in self.groups.items():
            fit.into(parts.group(name))
        for stored in self.codecs:
            fits = parts.codec(stored.group, stored.codec)
            stored.held.into(fits.held)
            stored.encode.into(fits.encode)
            stored.decode.into(fits.decode)
            fits.squares, fits.count = stored.squares, stored.count


class StoredClass(Strict):
    inputs: StoredFit
    state: StoredFit
    replay: StoredFit
    variants: Annotated[dict[Text, StoredSeconds], Field(max_length=32)]
    parts: StoredParts


class StoredUnit(Strict):
    name: Text
    call: Count
    unit_class: Text
    share: Annotated[float, Field(gt=0, le=1e9)]
    length: Annotated[int, Field(ge=1, le=1 << 40)] | None


class StoredStrike(Strict):
    unit_class: Text
    variant: Text
    reason: Text


class StoredPhase(Strict):
    """Peaks of one all-R microbatch (runtime/budget.py: PhasePeaks)."""

    segments: Count
    length: Count
    forward: Count
    loss: Count
    backward: Count


class StoredBaseline(Strict):
    """What an all-R update needs on a rank of this class (runtime/budget.py: Baseline)."""

    peak_bytes: Count
    device_bytes: Count
    phases: Annotated[list[StoredPhase], Field(min_length=1, max_length=1024)]


class StoredProfile(Strict):
    """A whole file. `format`: version of this layout."""

    format: Literal[3]
    fingerprint: StoredFingerprint
    units: Annotated[list[StoredUnit], Field(max_length=4096)]
    classes: Annotated[dict[Text, StoredClass], Field(max_length=256)]
    struck: Annotated[list[StoredStrike], Field(max_length=1024)] = Field(default_factory=list)
    baseline: StoredBaseline | None = None

    @model_validator(mode="after")
    def _complete(self) -> StoredProfile:
        if any(unit.unit_class not in self.classes for unit in self.units):
            raise ValueError("a unit has a class that is not described")
        if len({(unit.name, unit.call) for unit in self.units}) != len(self.units):
            raise ValueError("a unit is listed twice")
        return self

    @classmethod
    def of(
        cls, measurements: Measurements, fingerprint: Fingerprint, baseline: StoredBaseline | None = None
    ) -> StoredProfile:
        """What was measured, as it is stored."""
        return cls(
            format=3,
            fingerprint=StoredFingerprint(**asdict(fingerprint)),
            units=[_stored_unit(measurements, unit, name) for unit, name in measurements.roster],
            classes={name: _stored_class(fits) for name, fits in measurements.classes.items()},
            struck=[
                StoredStrike(unit_class=unit_class, variant=variant, reason=reason[:512])
                for (unit_class, variant), reason in measurements.struck.items()
            ],
            baseline=baseline,
        )

    def into(self, measurements: Measurements) -> None:
        """Puts what was stored into measurements that have seen nothing yet."""
        for name, stored in self.classes.items():
            fits = measurements.fits_of(name)
            stored.inputs.into(fits.inputs)
            stored.state.into(fits.state)
            stored.replay.into(fits.replay)
            stored.parts.into(fits.parts)
            for variant, seconds in stored.variants.items():
                pair = fits.seconds(variant)
                seconds.forward.into(pair.forward)
                seconds.backward.into(pair.backward)
        measurements.expect(
            [(UnitId(unit.name, unit.call), unit.unit_class, Relation(unit.share, unit.length)) for unit in self.units]
        )
        for strike in self.struck:
            if strike.variant != RECOMPUTE:
                measurements.strike(strike.unit_class, strike.variant, strike.reason)


def _stored_unit(measurements: Measurements, unit: UnitId, unit_class: str) -> StoredUnit:
    relation = measurements.relations[unit]
    return StoredUnit(
        name=unit.name, call=unit.call, unit_class=unit_class, share=relation.share, length=relation.length
    )


def _stored_class(fits: ClassFits) -> StoredClass:
    return StoredClass(
        inputs=StoredFit.of(fits.inputs),
        state=StoredFit.of(fits.state),
        replay=StoredFit.of(fits.replay),
        variants={
            name: StoredSeconds(forward=StoredFit.of(pair.forward), backward=StoredFit.of(pair.backward))
            for name, pair in fits.variants.items()
        },
        parts=StoredParts.of(fits.parts),
    )


def plain(value: object) -> str:
    """One line of printable text: a file must not be able to write lines into a log."""
    text = "".join(sign if sign.isprintable() else "?" for sign in str(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
