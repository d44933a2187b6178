"""How far whole updates are off what the risks of their plans say: one factor, from audits (design section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGEST = 1e18  # relative errors beyond, or their inverse, are no measurement


@dataclass
class Coherence:
    """Measured error of whole updates against the root of the sum of the predicted squares; 1: units' errors are
    orthogonal and every kappa is right.

    Sums of squares, the past fading, with `PRIOR` audits that measured just what was predicted: an audit counts by what
    it predicted, and no run of audits moves the factor below sqrt(PRIOR / (MEMORY + PRIOR)), a quarter.
    """

    MEMORY = 16.0
    PRIOR = 1.0

    measured: float = 0.0
    predicted: float = 0.0
    weight: float = 0.0

    def note(self, predicted: float, measured: float) -> None:
        """One audit. What is not finite, or predicted no error to speak of, teaches nothing.

        Args:
            predicted: by the risks of plans, this factor not applied. Relative, as `measured`.
        """
        if not (1 / _LARGEST <= predicted <= _LARGEST and 0 <= measured <= _LARGEST):
            return
        kept = 1 - 1 / self.MEMORY
        self.measured = kept * self.measured + measured * measured
        self.predicted = kept * self.predicted + predicted * predicted
        self.weight = kept * self.weight + 1

    @property
    def factor(self) -> float:
        if self.predicted == 0:
            return 1.0
        prior = self.PRIOR * self.predicted / self.weight
        return math.sqrt((self.measured + prior) / (self.predicted + prior))
