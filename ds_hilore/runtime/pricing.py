"""The price of risk of one update over all ranks: each tells what it would do with risk, and takes its part.

One exchange on the control plane, at `begin_update`, where exposures of all microbatches have been announced. Every
rank solves the same sums, so lambda is one number, and the parts add up to the whole update's B^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ds_hilore.core.fabric import ControlPlane, sum_over_ranks
from ds_hilore.planning.price import Demand, demand_table, pot, price_of_risk

#: Sums of what all ranks bring must be numbers, whatever their advantages are.
_LARGEST = 1e200


class Part(NamedTuple):
    """What a rank may spend of an update's risk: cost (r^2), and the price lambda at which all ranks buy, in seconds
    per cost."""

    cost: float
    price: float


def split(plane: ControlPlane, demands: Sequence[Demand], own: float) -> Part | None:
    """This rank's part of the risk that ranks put together. An exchange of all ranks.

    Args:
        demands: of this rank's microbatches; empty where it has no plans, no norm of a gradient, or no forecast: it
            puts nothing in then.
        own: the risk cost that this rank puts in otherwise, its own share of the update's B^2.

    Returns:
        None where this rank takes no part, and keeps what is its own.

    Raises:
        RankMismatch: a rank is somewhere else, for example because it has announced nothing.

    Source: design section 4, "Price of risk".
    """
    table = demand_table(demands)
    takes_part = bool(demands) and 0 <= own < _LARGEST and table[0] < _LARGEST
    if not takes_part:
        demands, own, table = (), 0.0, [0.0] * len(table)
    total, *everyones = sum_over_ranks(plane, "price of risk", [own, *table])
    if not takes_part:
        return None
    return Part(min(total, pot(demands, everyones, total)), price_of_risk(everyones, total))


def demanded(
    exposures: Sequence[float | None], tokens: Sequence[int], points: Sequence[tuple[float, float]]
) -> list[Demand]:
    """One demand per microbatch of this rank, in order. Empty where there are no plans.

    Args:
        exposures: as foreseen; None: may not be approximated, whatever comes.
        points: (risk cost at exposure 1, seconds) of plans.
    """
    if not points:
        return []
    return [
        Demand.of(points, math.inf if exposure is None else exposure, count)
        for exposure, count in zip(exposures, tokens, strict=True)
    ]
