"""Units of a microbatch whose dead positions are left out of replays: what storing them still saves.

Storing a unit saves its replay, but then its backward runs over every position, dead ones too. A pruned replay and
backward run over live positions only (recovery/prune.py). So with live share s, replay seconds F and backward seconds
B, storing saves s F - (1 - s) B against a pruned R: at half of the rows dead that is often less than nothing, and the
unit is best replayed, which needs no memory either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ds_hilore.core.treatment import INPUT_OFFLOADED, REPLAYED
from ds_hilore.core.types import Action, UnitProfile

#: Replays that find more than this live are not pruned, and this is what pruning itself costs: cuts, and gradients
#: put back between zeros.
PRUNE_BELOW = 0.9
#: Shares are told apart in steps of one eighth, so that plans can be used again.
STEPS = 8


@dataclass(frozen=True)
class Pruned:
    """How a microbatch is pruned.

    Args:
        live: positions that can change the model, of all.
        unpruned: classes of units that run whole all the same.
    """

    live: float
    unpruned: frozenset[str] = frozenset()

    @classmethod
    def of(cls, live: float, unpruned: frozenset[str] = frozenset()) -> Pruned:
        """Rounds the share up, to one of few."""
        return cls(math.ceil(live * STEPS) / STEPS, unpruned)


def pruned(profile: UnitProfile, share: float, replayed_s: float) -> UnitProfile:
    """The unit's variants where R is pruned to this share of positions; only those that are faster than that stay.

    Args:
        replayed_s: seconds of the backward of an unpruned R, replay included.
    """
    spared = replayed_s * max(0.0, 1.0 - share / PRUNE_BELOW)
    kept = []
    for variant in profile.variants:
        if variant.name in (REPLAYED.name, INPUT_OFFLOADED.name):  # pruned, wherever it starts from
            kept.append(variant)
        elif variant.action is not Action.RECOMPUTE:  # a replay that is handed kernel outputs is not pruned
            saved = variant.saved_seconds - spared
            if saved > variant.prepare_seconds:
                kept.append(replace(variant, saved_seconds=saved))
    return replace(profile, variants=tuple(kept))
