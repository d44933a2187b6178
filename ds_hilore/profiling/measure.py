"""What the first updates tell about each unit: bytes of its inputs and of its stored state, seconds of its replay.

Both grow with the tokens of the microbatch, so they are kept per token and a new shape needs no new measurement.
Seconds are the least of all observations (noise only adds), bytes the greatest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ds_hilore.core.types import Action, UnitId, UnitProfile, Variant


@dataclass(frozen=True)
class UnitFootprint:
    """Bytes that one call of a unit adds to those before it in forward order, and that go when its backward has run."""

    unit: UnitId
    unit_class: str
    tokens: int
    input_bytes: int
    stored_bytes: int | None = None  # inputs included; None where the call was not stored


@dataclass
class _ClassRates:
    """Per token. `state_bytes`: what storing adds to the inputs, of one and the same call."""

    input_bytes: float = 0.0
    state_bytes: float | None = None
    replay_seconds: float | None = None


@dataclass
class Measurements:
    """Collects footprints and replay times; gives profiles of the units for any number of tokens."""

    roster: list[tuple[UnitId, str]] = field(default_factory=list)  # units in forward order, with their class
    rates: dict[str, _ClassRates] = field(default_factory=dict)
    _tokens: dict[UnitId, int] = field(default_factory=dict)
    _class_of: dict[UnitId, str] = field(default_factory=dict)
    _share: dict[UnitId, float] = field(default_factory=dict)  # tokens of a unit per token of the first unit

    def note_forward(self, footprints: list[UnitFootprint]) -> None:
        """One microbatch's units, in forward order. Of none, nothing is learnt."""
        if not footprints:
            return
        self.roster = [(footprint.unit, footprint.unit_class) for footprint in footprints]
        self._class_of.update(self.roster)
        first = max(1, footprints[0].tokens)
        for footprint in footprints:
            tokens = max(1, footprint.tokens)
            self._tokens[footprint.unit] = tokens
            self._share[footprint.unit] = tokens / first
            rates = self.rates.setdefault(footprint.unit_class, _ClassRates())
            rates.input_bytes = max(rates.input_bytes, footprint.input_bytes / tokens)
            if footprint.stored_bytes is not None:
                state = (footprint.stored_bytes - footprint.input_bytes) / tokens
                rates.state_bytes = max(rates.state_bytes or 0.0, state)

    def replay_receiver(self, unit: UnitId) -> Callable[[float], None]:
        """What takes the seconds of the replay that begins now, whenever they are known.

        Of a call whose forward was not noted nothing is learnt.
        """
        unit_class = self._class_of.get(unit)
        if unit_class is None:
            return lambda seconds: None
        # A clock may tell after the next microbatch has begun: the tokens are those of now.
        return partial(self._note_replay, self.rates[unit_class], self._tokens[unit])

    @staticmethod
    def _note_replay(rates: _ClassRates, tokens: int, seconds: float) -> None:
        rate = seconds / tokens
        rates.replay_seconds = rate if rates.replay_seconds is None else min(rates.replay_seconds, rate)

    def unmeasured_classes(self) -> set[str]:
        """Classes of which no call was stored yet."""
        return {name for _, name in self.roster if self.rates[name].state_bytes is None}

    def profiles(self, tokens: int) -> tuple[UnitProfile, ...]:
        """The units as the planner sees them, for a microbatch whose first unit has `tokens` tokens.

        A class that was never stored, or never replayed, can only be replayed.
        """
        return tuple(self._profile(unit, name, tokens) for unit, name in self.roster)

    def _profile(self, unit: UnitId, unit_class: str, tokens: int) -> UnitProfile:
        rates = self.rates[unit_class]
        count = math.ceil(tokens * self._share[unit])
        inputs = math.ceil(rates.input_bytes * count)
        if rates.state_bytes is None or rates.replay_seconds is None:
            return UnitProfile(unit, unit_class, (Variant("R", Action.RECOMPUTE, inputs),))
        state = math.ceil(rates.state_bytes * count)
        return UnitProfile(
            unit,
            unit_class,
            (
                # a replay holds the same bundle, by the same recipes, while the unit's backward runs
                Variant("R", Action.RECOMPUTE, inputs, workspace_bytes=state),
                Variant("H", Action.STORE, inputs + state, saved_seconds=rates.replay_seconds * count),
            ),
        )
