"""Whether two training runs that should learn the same did: the judgement alone, on plain numbers.

Seeds are paired: both runs of a seed have the same prompts, the same random numbers and the same settings, and differ
in nothing but how state reached backward. Scores are in points, 100 for a policy that is always right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Limits:
    """What still counts as the same.

    Args:
        mean_points: largest mean difference of the final scores over seeds, either way.
        worst_points: how far below exact a single seed may end.
        cosine: smallest cosine of the two gradients of one probe batch under the same parameters.
        seeds: pairs that a judgement needs.
    """

    mean_points: float = 0.6
    worst_points: float = 2.0
    cosine: float = 0.999
    seeds: int = 3


@dataclass(frozen=True)
class Pair:
    """What both runs of one seed came to.

    Args:
        exact, hilore: final scores in points.
        cosines: of hilore's gradient with the exact one, one for each look at a probe batch.
        compressed: share of units, over all updates, whose backward read compressed state.
    """

    seed: int
    exact: float
    hilore: float
    cosines: tuple[float, ...]
    compressed: float

    @property
    def difference(self) -> float:
        """Points that hilore ends above exact."""
        return self.hilore - self.exact


@dataclass(frozen=True)
class Verdict:
    """The judgement. `reasons` against parity: none where it holds. Figures are NaN where nothing was there."""

    mean_difference: float
    worst_difference: float
    lowest_cosine: float
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.reasons

    def lines(self) -> list[str]:
        """For people."""
        said = [
            f"mean difference {self.mean_difference:+.2f} points, worst seed {self.worst_difference:+.2f}, "
            f"lowest cosine {self.lowest_cosine:.6f}"
        ]
        return said + ([f"NOT the same: {reason}" for reason in self.reasons] or ["the same, within the limits"])


def judge(pairs: Sequence[Pair], limits: Limits = Limits()) -> Verdict:
    """Compares paired runs. What cannot be judged (no number, no probe, nothing compressed) is no parity."""
    differences = [pair.difference for pair in pairs]
    cosines = [cosine for pair in pairs for cosine in pair.cosines]
    mean = fmean(differences) if differences else math.nan
    # NaN has no place in an order: it would hide behind whatever it is compared with.
    worst = min(differences, default=math.nan) if all(map(math.isfinite, differences)) else math.nan
    lowest = min(cosines, default=math.nan) if all(map(math.isfinite, cosines)) else math.nan
    reasons = []
    if len({pair.seed for pair in pairs}) < limits.seeds:
        reasons.append(f"{len({pair.seed for pair in pairs})} seed(s), {limits.seeds} are needed")
    if not abs(mean) <= limits.mean_points:
        reasons.append(f"the mean difference is {mean:+.2f} points, allowed are {limits.mean_points} either way")
    if not worst >= -limits.worst_points:
        reasons.append(f"a seed ends {-worst:.2f} points below exact, allowed are {limits.worst_points}")
    if not lowest >= limits.cosine:
        reasons.append(f"a gradient has cosine {lowest:.6f} with the exact one, at least {limits.cosine} is needed")
    if any(not pair.cosines for pair in pairs):
        reasons.append("a seed has no probe of its gradients")
    if any(not pair.compressed > 0 for pair in pairs):
        reasons.append("in a seed nothing was compressed, so nothing was compared")
    return Verdict(mean, worst, lowest, tuple(reasons))
