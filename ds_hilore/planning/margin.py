"""How far predicted exposures were off, so that the next ones are used with the right margin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from ds_hilore.core.errors import UsageError

#: Ratios further off than this are one event, not a scale: an exposure of nothing has no logarithm.
_FARTHEST = math.log(1e3)


@dataclass
class ExposureMargin:
    """Mean and deviation of log(true / predicted exposure), the past fading.

    Before the first observation the truth is taken to lie within a factor of about `1 + prior` of the prediction.

    Args:
        memory: observations after which one has faded to 1/e.
        prior: relative spread assumed before anything is known; it counts as `prior_weight` observations.
    """

    memory: float = 64.0
    prior: float = 0.25
    prior_weight: float = 4.0
    mean: float = 0.0
    weight: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        if not (self.memory > 0 and self.prior >= 0 and self.prior_weight > 0):
            raise UsageError(
                f"memory and prior_weight must be above 0 and prior not below, got {self.memory}, "
                f"{self.prior_weight}, {self.prior}"
            )

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm, the prior counted in."""
        prior = math.log1p(self.prior) ** 2 * self.prior_weight
        return math.sqrt((self.squares + prior) / (self.weight + self.prior_weight))

    def observe(self, predicted: float, true: float) -> None:
        """Learns from one microbatch. Two exposures of 0 teach nothing; what is not finite is left out."""
        if not (0 <= predicted < math.inf and 0 <= true < math.inf) or predicted == true == 0:
            return
        off = _FARTHEST if predicted == 0 else -_FARTHEST if true == 0 else math.log(true) - math.log(predicted)
        off = min(_FARTHEST, max(-_FARTHEST, off))
        fading = math.exp(-1 / self.memory)
        self.weight = self.weight * fading + 1
        before = off - self.mean
        self.mean += before / self.weight
        self.squares = self.squares * fading + before * (off - self.mean)

    def ratios(self, count: int = 5) -> tuple[float, ...]:
        """Gives `count` equally likely values of true over predicted exposure, ascending: what `Frontier.prepare`
        weighs. With several of them, a q-plan is chosen that also serves a calmer truth."""
        if count < 1:
            raise UsageError(f"at least one ratio is needed, got {count}")
        normal = NormalDist()
        at = [normal.inv_cdf((place + 0.5) / count) for place in range(count)]
        return tuple(math.exp(self.mean + self.deviation * z) for z in at)
