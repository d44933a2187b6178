"""When replays run pruned: a microbatch for which dead rows, or short ones, were announced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ds_hilore.profiling.pruned import PRUNE_BELOW, Pruned
from ds_hilore.recovery.prune import Pruning, RolesOf
from ds_hilore.recovery.roles import PruneRefusal
from ds_hilore.recovery.unit import CallParts, UnitCall
from ds_hilore.runtime.microbatch import Microbatch
from ds_hilore.runtime.update import MicrobatchFacts

_log = logging.getLogger(__name__)


class Pruner:
    """Decides per microbatch, and learns what a token without an advantage is worth. One per controller.

    Attributes:
        spares_zero_advantages: whether tokens with advantage 0 had no gradient when that could last be seen. A KL or
            entropy term gives them one; nobody has to say so.
    """

    def __init__(self, roles: RolesOf | None, rank: int) -> None:
        self._pruning = None if roles is None else Pruning(roles, self._say_refused)
        self._rank = rank
        self.spares_zero_advantages = True

    @property
    def refused(self) -> dict[str, PruneRefusal]:
        """Unit classes that are not pruned, and why."""
        return {} if self._pruning is None else self._pruning.refused

    @property
    def reads(self) -> int:
        """How often the host has waited for live positions."""
        return 0 if self._pruning is None else self._pruning.chain.reads

    def announced(self, facts: MicrobatchFacts) -> None:
        """A microbatch was announced: its lengths start on their way to the host."""
        if self._pruning is not None:
            _ = facts.expected

    def begin(self, batch: Microbatch, measuring: bool) -> None:
        """The first unit of a microbatch is about to run. `measuring`: replays are to cost what they cost unpruned."""
        facts, shape = batch.facts, batch.shape
        if self._pruning is None or facts is None or shape is None:
            return
        self._pruning.clear()  # of a microbatch that never got its backward
        if facts.expected.ready:
            spared, kept = facts.expected.shares(shape)
            batch.live_share = spared if self.spares_zero_advantages else kept
        # Not there yet: the host does not wait for it. A replay that finds everything live loses little.
        batch.prunes = not measuring and (batch.live_share is None or batch.live_share < PRUNE_BELOW)
        if batch.prunes and batch.live_share is not None:
            batch.pruning = Pruned.of(batch.live_share, frozenset(self.refused))

    def run(
        self,
        make: CallParts,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[UnitCall, Any]:
        """Runs one call of a unit that is planned R, in a microbatch that prunes."""
        assert self._pruning is not None, "no microbatch prunes without"
        return self._pruning.run(make, function, args, kwargs)

    def end(self, batch: Microbatch) -> None:
        """The backward of a microbatch is over."""
        if self._pruning is None:
            return
        self._pruning.clear()
        measured, self._pruning.live_share = self._pruning.live_share, None
        if measured is None or batch.facts is None or batch.shape is None:
            return
        batch.live_share = measured
        spared, kept = batch.facts.expected.shares(batch.shape)
        if kept - spared > 1 - PRUNE_BELOW:  # else the two cannot be told apart
            self.spares_zero_advantages = abs(measured - spared) <= abs(measured - kept)

    def clear(self) -> None:
        """A microbatch was given up."""
        if self._pruning is not None:
            self._pruning.clear()
            self._pruning.live_share = None

    def _say_refused(self, unit_class: str, refusal: PruneRefusal) -> None:
        if self._rank == 0:
            _log.info("hilore: %s is not pruned: %s", unit_class, refusal)
