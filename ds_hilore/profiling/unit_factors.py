"""How far single units lie off the slope that they share: what was seen of each, shrunk towards the shared slope.

A unit was seen a few times at most, and those scatter. In the random-effects model log(observed / predicted) = a unit's
own deviation + scatter, the best predictor of the deviation is the unit's mean times n b / (n b + w): n its
observations, b the variance between units and w that within them, both estimated from all units.

Source: Searle, Casella, McCulloch, "Variance Components" (1992), section 3.6 (ANOVA estimators of unbalanced data) and
3.4 (prediction of random effects).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from ds_hilore.core.types import UnitId

#: Factors are whole powers of this: units stay alike to the planner, which orders like ones among themselves.
STEP = 1.2


def unit_factors(residuals: Mapping[UnitId, Sequence[float]]) -> dict[UnitId, float]:
    """What to multiply each unit's predictions by; none where units do not differ by more than they scatter.

    Args:
        residuals: log(observed / predicted) of each unit's observations, finite.
    """
    seen = {unit: values for unit, values in residuals.items() if values}
    within, between = variances(list(seen.values()))
    if between <= 0:
        return {}
    factors = {}
    for unit, values in seen.items():
        count = len(values)
        deviation = fmean(values) * count * between / (count * between + within)
        factors[unit] = STEP ** round(deviation / math.log(STEP))
    return factors


def variances(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Variance within groups and between their means; (0, 0) where there is nothing to tell them apart by: fewer than
    two groups, or one value in each."""
    count, total = len(groups), sum(map(len, groups))
    if count < 2 or total <= count:
        return 0.0, 0.0
    means = [fmean(values) for values in groups]
    grand = math.fsum(map(math.fsum, groups)) / total
    within = math.fsum((x - mean) ** 2 for mean, values in zip(means, groups) for x in values) / (total - count)
    across = math.fsum(len(values) * (mean - grand) ** 2 for mean, values in zip(means, groups)) / (count - 1)
    size = (total - math.fsum(len(values) ** 2 for values in groups) / total) / (count - 1)
    return within, max(0.0, (across - within) / size)
