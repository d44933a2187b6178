"""Predictions judged on microbatches that fitted nothing, before any plan may compress (K5 of calibrate.py).

    judging = HeldOut(calibration)
    judging.wanted(usable, together)                  which units to compress on the next microbatch, pass by pass
    judging.note(treatments, predicted, measured)     what one pass gave
    judging.close(measured_square, predicted_square)  a round is over: sums over all ranks

A round holds if errors were no larger than predicted. One that does not raises all slopes by what was missing (K7), and
another round, of further microbatches, must hold then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import Calibration

#: Microbatches of a round, if their cost allows; at least `LEAST`.
MICROBATCHES, LEAST = 6, 2
#: Units that are compressed alone on each.
SINGLES = 3
#: Rounds until predictions are given up.
ROUNDS = 2
#: Slopes that were too low are raised by this more: what they are judged by next scatters as well.
MARGIN = 1.05

Treatments = Mapping[UnitId, Treatment]


class Outcome(Enum):
    """What follows from a round."""

    HOLDS = "holds"
    AGAIN = "again"  # slopes were raised
    FAILS = "fails"


@dataclass
class HeldOut:
    """Judges one calibration.

    Attributes:
        most: microbatches of a round.
        ratio: measured over predicted error of the newest round that was closed.
    """

    calibration: Calibration
    most: int = MICROBATCHES
    microbatches: int = 0  # of this round
    rounds: int = 0
    ratio: float | None = None
    _number: int = 0
    _asked: int = 0
    _together: list[tuple[float, float]] = field(default_factory=list)
    _alone: list[tuple[float, float]] = field(default_factory=list)

    def __str__(self) -> str:
        if self.ratio is None:
            return "held-out microbatches have judged nothing: no state may be compressed, or none had any exposure"
        return f"held-out microbatches have {self.ratio:.2f} times the error that was predicted"

    def begin(self) -> None:
        """A microbatch is judged; it has a number that neither fitted nor judged yet."""
        fitted = [seen.microbatch for seen in self.calibration.observations]
        judged = [each.microbatch for each in self.calibration.judgements]
        self._number = max([*fitted, *judged], default=-1) + 1
        self.microbatches += 1

    @property
    def out_of_room(self) -> bool:
        """Whether another microbatch would cost too much. What the first round takes at least is kept for it."""
        kept = self.rounds == 0 and self.microbatches < LEAST
        return not kept and self.calibration.cost.passes_left < 3

    @property
    def full(self) -> bool:
        """Whether the round has all its microbatches."""
        return self.microbatches >= max(LEAST, self.most)

    def wanted(self, usable: Sequence[tuple[UnitId, Sequence[Treatment]]], together: Treatments) -> list[Treatments]:
        """Which passes to make on the next microbatch: some units alone, each in its turn, then several together.

        Args:
            usable: units in forward order with the variants whose risk is known.
            together: those that a plan would compress; empty: those that were alone.
        """
        if not usable:
            return []
        later = 3 * max(0, LEAST - 1 - self.microbatches)  # what the round still takes at least
        room = self.calibration.cost.passes_left - later - 2  # the exact one, and several together
        count = min(SINGLES, len(usable), 1 if room < 1 else math.floor(min(room, SINGLES)))
        bits = len(usable).bit_length()
        spread = sorted(range(len(usable)), key=lambda rank: f"{rank:0{bits}b}"[::-1])
        chosen: list[Treatments] = []
        for turn in range(self._asked, self._asked + count):
            unit, variants = usable[spread[turn % len(spread)]]
            chosen.append({unit: variants[turn // len(spread) % len(variants)]})
        self._asked += count
        everyone = dict(together) or {unit: treatment for single in chosen for unit, treatment in single.items()}
        return [*chosen, everyone] if len(everyone) > 1 else chosen

    def note(self, treatments: Treatments, predicted: float, measured: float) -> None:
        """One pass of the microbatch that `begin` began: errors of its gradient, absolute."""
        unit = next(iter(treatments)) if len(treatments) == 1 else None
        self.calibration.note_judged(unit, self._number, predicted, measured)
        (self._together if unit is None else self._alone).append((predicted, measured))

    def squares(self) -> tuple[float, float]:
        """Sums of squares of this round, (measured, predicted): of units together where there were any."""
        errors = self._together or self._alone
        return _square([measured for _, measured in errors]), _square([predicted for predicted, _ in errors])

    def close(self, measured_square: float, predicted_square: float) -> Outcome:
        """The round is over. All ranks come to the same end.

        Args:
            measured_square, predicted_square: `squares`, added up over ranks.
        """
        self.rounds += 1
        self.microbatches = 0
        self._together, self._alone = [], []
        if measured_square == predicted_square == 0:  # no exposure: nothing was learnt
            return Outcome.AGAIN if self.rounds < ROUNDS else Outcome.FAILS
        coherent = predicted_square * self.calibration.coherence**2
        self.ratio = math.sqrt(measured_square / coherent) if coherent > 0 else math.inf
        if self.ratio <= 1:
            return Outcome.HOLDS
        if self.rounds >= ROUNDS or not self.ratio < math.inf:
            return Outcome.FAILS
        self.calibration.raised *= self.ratio * MARGIN
        return Outcome.AGAIN


def _square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)
