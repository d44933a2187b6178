"""What the running job tells about each unit: bytes of its inputs and of its stored state, seconds of its variants.

All of it is fitted over shapes, per class of units (fit.py), so a new shape needs no new measurement. Bytes are upper
envelopes, seconds typical values. Seconds that were never measured come from the analytic rates, where there are any;
bytes never do: a class of which no call was stored can only be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ds_hilore.core.errors import UsageError
from ds_hilore.core.treatment import REPLAYED, STORED, Treatment
from ds_hilore.core.types import Action, Shape, UnitId, UnitProfile, Variant
from ds_hilore.profiling.fit import BY_TOKEN, BytesFit, Rate, SecondsFit
from ds_hilore.profiling.host_link import LinkSpeed
from ds_hilore.profiling.pruned import Pruned, pruned
from ds_hilore.profiling.variants import StateFits, Whole, variants

#: Name of the variant that all gains are counted from.
RECOMPUTE = REPLAYED.name
STORE = STORED.name


@dataclass(frozen=True)
class UnitFootprint:
    """Bytes that one call of a unit adds to those before it in forward order, and that go when its backward has run."""

    unit: UnitId
    unit_class: str
    shape: Shape
    input_bytes: int
    stored_bytes: int | None = None  # inputs included; None where the call was not stored

    @property
    def tokens(self) -> int:
        return self.shape.tokens


@dataclass(frozen=True)
class UnitRates:
    """Analytic costs of a class of units: bytes, and seconds on a device (cost_model.py).

    `state_bytes` is what storing adds to the inputs; `backward_s` is of a stored unit, a replayed one adds `replay_s`.
    """

    input_bytes: Rate = BY_TOKEN
    state_bytes: Rate = BY_TOKEN
    forward_s: Rate = BY_TOKEN
    backward_s: Rate = BY_TOKEN
    replay_s: Rate = BY_TOKEN


@dataclass
class VariantSeconds:
    """Observed seconds of a variant's forward and backward, replay included."""

    forward: SecondsFit
    backward: SecondsFit

    @property
    def both(self) -> bool:
        return self.forward.count > 0 and self.backward.count > 0


@dataclass
class ClassFits:
    """All fits of one class of units. `state`: what storing adds to the inputs, of one and the same call; `parts`: what
    that state is made of."""

    rates: UnitRates
    inputs: BytesFit
    state: BytesFit
    replay: SecondsFit
    variants: dict[str, VariantSeconds] = field(default_factory=dict)
    parts: StateFits = field(default_factory=StateFits)

    @classmethod
    def around(cls, rates: UnitRates) -> ClassFits:
        return cls(rates, BytesFit(rates.input_bytes), BytesFit(rates.state_bytes), SecondsFit(rates.replay_s))

    def seconds(self, variant: str) -> VariantSeconds:
        found = self.variants.get(variant)
        if found is None:
            backward = self.rates.backward_s
            if variant == RECOMPUTE:
                backward = backward + self.rates.replay_s
            found = self.variants[variant] = VariantSeconds(SecondsFit(self.rates.forward_s), SecondsFit(backward))
        return found

    def solved(self) -> tuple[Rate, ...]:
        """All rates as they stand: equal as long as no prediction has changed."""
        timed = [rate for pair in self.variants.values() for rate in (pair.forward.rate, pair.backward.rate)]
        return (self.inputs.rate, self.state.rate, self.replay.rate, *timed, *self.parts.solved())


@dataclass(frozen=True)
class Gain:
    """Seconds that a variant saves against R in the whole of forward and backward, as observed; `noise_s`: one
    standard error of that."""

    seconds: float
    noise_s: float
    count: int  # observations of the variant

    @property
    def pays(self) -> bool:
        """Positive beyond noise."""
        return self.seconds > 2 * self.noise_s


@dataclass(frozen=True)
class Relation:
    """Shape of a unit relative to that of the first unit: other towers of a model work on other lengths.

    `length`: None where the unit's segments grow with the first unit's, else the length that its segments have
    (patches of an image).
    """

    share: float = 1.0  # tokens per token of the first unit
    length: int | None = None

    @classmethod
    def between(cls, first: Shape, own: Shape) -> Relation:
        share = max(1, own.tokens) / max(1, first.tokens)
        return cls(share, None if own.segments in (1, first.segments) else max(1, own.length))

    def apply(self, first: Shape) -> Shape:
        if self.share == 1.0 and self.length is None:
            return first
        tokens = math.ceil(first.tokens * self.share)
        length = self.length if self.length is not None else max(1, math.ceil(first.length * self.share))
        return Shape(math.ceil(tokens / length), length)


@dataclass
class Measurements:
    """Collects footprints and times; gives profiles of the units for any shape.

    Attributes:
        rates: analytic costs by class of units; a class that is not in it grows with its tokens.
        roster: units in forward order, with their class.
        classes: fits by class.
        relations: shapes of units relative to the first.
        struck: reasons by (class, variant).
        risk: r at exposure 1 of a unit under a compressing treatment; None where that may not be used.
        least_encoded_bytes: state groups that are smaller are not compressed.
        link: to host memory; None where nothing may be sent there.
    """

    rates: Mapping[str, UnitRates] = field(default_factory=dict)
    roster: list[tuple[UnitId, str]] = field(default_factory=list)
    classes: dict[str, ClassFits] = field(default_factory=dict)
    relations: dict[UnitId, Relation] = field(default_factory=dict)
    struck: dict[tuple[str, str], str] = field(default_factory=dict)
    risk: Callable[[UnitId, Treatment], float | None] = lambda unit, treatment: None
    least_encoded_bytes: int = 0
    link: LinkSpeed | None = None
    _shapes: dict[UnitId, Shape] = field(default_factory=dict)
    _class_of: dict[UnitId, str] = field(default_factory=dict)
    _profiles: dict[tuple[Shape, Pruned | None], tuple[UnitProfile, ...]] = field(default_factory=dict)
    _stamp: tuple[tuple[Rate, ...], ...] = ()

    MAX_CACHED = 64

    # -- observations ----------------------------------------------------------------------------------------------

    def note_forward(self, footprints: list[UnitFootprint]) -> None:
        """One microbatch's units, in forward order. Of none, nothing is learnt."""
        if not footprints:
            return
        roster = [(footprint.unit, footprint.unit_class) for footprint in footprints]
        if roster != self.roster:
            self.roster = roster
            self._class_of.update(roster)
            self._profiles.clear()
        first = footprints[0].shape
        for footprint in footprints:
            unit, shape = footprint.unit, footprint.shape
            self._shapes[unit] = shape
            relation = Relation.between(first, shape)
            if relation != self.relations.get(unit):
                self.relations[unit] = relation
                self._profiles.clear()
            fits = self.fits_of(footprint.unit_class)
            fits.inputs.note(shape, footprint.input_bytes)
            if footprint.stored_bytes is not None:
                fits.state.note(shape, footprint.stored_bytes - footprint.input_bytes)

    def expect(self, units: list[tuple[UnitId, str, Relation]]) -> None:
        """The units that will run, as a stored profile knows them; the first noted forward takes their place."""
        self.roster = [(unit, unit_class) for unit, unit_class, _ in units]
        self.relations = {unit: relation for unit, _, relation in units}
        self._class_of.update(self.roster)
        self._profiles.clear()

    def fits_of(self, unit_class: str) -> ClassFits:
        """The fits of a class, made at its first sight."""
        fits = self.classes.get(unit_class)
        if fits is None:
            fits = self.classes[unit_class] = ClassFits.around(self.rates.get(unit_class, UnitRates()))
        return fits

    def replay_receiver(self, unit: UnitId) -> Callable[[float], None]:
        """What takes the seconds of the replay that begins now, whenever they are known.

        Of a call whose forward was not noted nothing is learnt.
        """
        unit_class, shape = self._class_of.get(unit), self._shapes.get(unit)
        if unit_class is None or shape is None:
            return lambda seconds: None
        # A clock may tell after the next microbatch has begun: the shape is that of now.
        return partial(self.classes[unit_class].replay.note, shape)

    def note_seconds(
        self, unit: UnitId, variant: str, shape: Shape, forward_s: float | None, backward_s: float | None
    ) -> None:
        """Seconds of one call of a unit that ran as `variant`; None for a phase that was not observed.

        Args:
            shape: of the unit's own inputs.
            backward_s: replay or decoding included.
        """
        unit_class = self._class_of.get(unit)
        if unit_class is None:
            return
        seconds = self.fits_of(unit_class).seconds(variant)
        if forward_s is not None:
            seconds.forward.note(shape, forward_s)
        if backward_s is not None:
            seconds.backward.note(shape, backward_s)

    def strike(self, unit_class: str, variant: str, reason: str) -> None:
        """Leaves a variant of a class out of all further profiles.

        Raises:
            UsageError: the variant is R, which every unit must keep.
        """
        if variant == RECOMPUTE:
            raise UsageError(f"{unit_class}: recompute cannot be struck out, it is what every unit falls back on")
        self.struck[(unit_class, variant)] = reason
        self.outdate()

    def outdate(self) -> None:
        """Risks or strikes have changed: profiles are made anew."""
        self._profiles.clear()

    # -- answers ---------------------------------------------------------------------------------------------------

    def unmeasured_classes(self) -> set[str]:
        """Classes of which no call was stored yet."""
        return {name for _, name in self.roster if self.classes[name].state.count == 0}

    def timed(self) -> list[tuple[str, str]]:
        """Classes and variants of them, R apart, of which whole seconds were observed."""
        return [(name, v) for name, fits in self.classes.items() for v in fits.variants if v != RECOMPUTE]

    def gain(self, unit_class: str, variant: str, shape: Shape) -> Gain | None:
        """What a variant is measured to save; None where it or R was not observed in both phases."""
        fits = self.classes.get(unit_class)
        if fits is None or variant not in fits.variants or RECOMPUTE not in fits.variants:
            return None
        ours, theirs = fits.variants[variant], fits.variants[RECOMPUTE]
        if not (ours.both and theirs.both):
            return None
        seconds = (
            theirs.forward.of(shape) + theirs.backward.of(shape) - ours.forward.of(shape) - ours.backward.of(shape)
        )
        parts = (ours.forward, ours.backward, theirs.forward, theirs.backward)
        noise = math.sqrt(sum((part.of(shape) * part.standard_error) ** 2 for part in parts))
        return Gain(seconds, noise, min(ours.forward.count, ours.backward.count))

    def replay_seconds(self, unit_class: str, shape: Shape) -> float | None:
        """Seconds of one replay: measured, else analytic at the speed that was measured of other work, else None."""
        fits = self.classes[unit_class]
        if fits.replay.count:
            return fits.replay.of(shape)
        if unit_class not in self.rates:
            return None
        return fits.rates.replay_s.of(shape) * self._slowness(shape)

    def _replayed_backward_s(self, unit_class: str, shape: Shape, replay_s: float) -> float:
        """Backward of R, replay included: observed, else analytic, else twice the replay: backward
        takes no less than forward."""
        fits = self.classes[unit_class]
        timed = fits.variants.get(RECOMPUTE)
        if timed is not None and timed.backward.count:
            return timed.backward.of(shape)
        if unit_class in self.rates:
            return replay_s + fits.rates.backward_s.of(shape) * self._slowness(shape)
        return 2 * replay_s

    def _slowness(self, shape: Shape) -> float:
        """Measured over analytic seconds of what was observed of any class; 1 where nothing was."""
        for name, fits in self.classes.items():
            if name not in self.rates:
                continue
            pairs = [(fits.replay, fits.rates.replay_s)]
            pairs += [(seconds.forward, fits.rates.forward_s) for seconds in fits.variants.values()]
            for fit, rate in pairs:
                if fit.count and rate.of(shape) > 0:
                    return fit.of(shape) / rate.of(shape)
        return 1.0

    def profiles(self, shape: Shape, pruning: Pruned | None = None) -> tuple[UnitProfile, ...]:
        """The units as the planner sees them, for a microbatch whose first unit has this shape.

        A class that was never stored, or of whose replay nothing is known, can only be replayed.

        Args:
            pruning: how its replays are pruned; None: not at all.
        """
        stamp = tuple([fits.solved() for fits in self.classes.values()])
        if stamp != self._stamp or len(self._profiles) >= self.MAX_CACHED:
            self._profiles.clear()
            self._stamp = stamp
        found = self._profiles.get((shape, pruning))
        if found is None:
            found = tuple([self._profile(k, *unit, shape, pruning) for k, unit in enumerate(self.roster)])
            self._profiles[(shape, pruning)] = found
        return found

    def _profile(
        self, position: int, unit: UnitId, unit_class: str, first: Shape, pruning: Pruned | None
    ) -> UnitProfile:
        fits = self.classes[unit_class]
        shape = self.relations[unit].apply(first)
        inputs = fits.inputs.of(shape)
        replay_s = self.replay_seconds(unit_class, shape)
        if fits.state.count == 0 or replay_s is None:
            return UnitProfile(unit, unit_class, (Variant(RECOMPUTE, Action.RECOMPUTE, inputs),))
        whole = Whole(
            shape,
            inputs,
            fits.state.of(shape),
            replay_s,
            gain=partial(self._gained, unit_class, shape),
            risk=partial(self.risk, unit),
            least_encoded_bytes=self.least_encoded_bytes,
            link=self.link,
            position=position,
        )
        kept = [found for found in variants(whole, fits.parts) if (unit_class, found.name) not in self.struck]
        profile = UnitProfile(unit, unit_class, tuple(kept))
        if pruning is None or unit_class in pruning.unpruned:
            return profile
        return pruned(profile, pruning.live, self._replayed_backward_s(unit_class, shape, replay_s))

    def _gained(self, unit_class: str, shape: Shape, variant: str) -> float | None:
        gain = self.gain(unit_class, variant, shape)
        return None if gain is None else gain.seconds
