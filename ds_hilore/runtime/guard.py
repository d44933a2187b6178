"""The budget guard: when memory runs short all the same, units give up their state and gradients stay what they are.

Three defences, each this rank's alone (ranks need not agree on who replays what, design fact 1):

    FORWARD     more is held between two units than was foreseen: units that come later are replayed (levels.py)
    BACKWARD    backward needs more than there is by now: stored and encoded units are dropped to replays (learning.py)
    ALLOCATION  an allocation failed inside a decode or replay: units not used yet are dropped, and it is done again

H -> R and L -> R are the lattice's own steps, so none of them changes a gradient. What they cannot help is a `FAILURE`:
a typed error, after which the update runs again on all ranks. Each is an event, and the plans that follow leave as much
more room as was missing.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.core.types import Action, Place, Plan, UnitId
from ds_hilore.memory.meter import PeakMeter
from ds_hilore.memory.refused import refused_bytes
from ds_hilore.recovery.unit import RecoveryContext, UnitCall
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.levels import LevelWatch
from ds_hilore.runtime.microbatch import Microbatch

_log = logging.getLogger(__name__)

#: The newest events are kept.
EVENTS_KEPT = 256
#: Updates without an event after which half of the room is given back: what took it may have gone (a sampler).
CALM_UPDATES = 50
#: Less room than this is none.
LEAST_ROOM_BYTES = 1 << 20


class Defence(str, Enum):
    """What was done about a shortage."""

    FORWARD = "forward"  # later units are replayed
    BACKWARD = "backward"  # prepared units were dropped before backward
    ALLOCATION = "allocation"  # units were dropped in backward, after an allocation failed
    FAILURE = "failure"  # nothing was left to drop: the update has to run again


@dataclass(frozen=True)
class GuardEvent:
    """One shortage of memory on one rank.

    Args:
        update: of the controller, from 0.
        unit: where it was noticed; None between forward and backward, or outside of any unit.
        short_bytes: by how much memory was short: of the plan, or what the failed allocation asked for (0: unknown).
        dropped: units that are replayed because of it.
    """

    defence: Defence
    update: int
    rank: int
    unit: UnitId | None
    short_bytes: int
    dropped: tuple[UnitId, ...] = ()

    def __str__(self) -> str:
        where = "before backward" if self.unit is None else f"at unit {self.unit}"
        return (
            f"{self.short_bytes / 1e6:.1f} MB short {where}, {len(self.dropped)} units replayed ({self.defence.value})"
        )


class Guard:
    """One controller's shortages: what is dropped, what is said, what room the next plans leave.

    Args:
        batch: gives the microbatch in hand.

    Attributes:
        events: the newest ones, oldest first.
        counts: events so far by defence.
        levels: the watch of forwards.
        replays_everything: the update that runs, or runs again, follows a failure: nothing is stored in it.
    """

    def __init__(
        self, planner: RankPlanner, meter: PeakMeter, context: RecoveryContext, batch: Callable[[], Microbatch]
    ) -> None:
        self.events: deque[GuardEvent] = deque(maxlen=EVENTS_KEPT)
        self.counts: Counter[Defence] = Counter()
        self.replays_everything = False
        self._planner = planner
        self._context = context
        self._rank = context.rank
        self._batch = batch
        context.relieve = self.relieve
        self.levels = LevelWatch(meter, planner, self._forward_short)
        self._update = 0
        self._missing = 0  # most that was missing at once in the microbatch in hand
        self._freed = 0  # by the newest relief of the backward in hand
        self._calm_updates = 0

    # -- defences --------------------------------------------------------------------------------------------------

    def _forward_short(self, unit: UnitId, short_bytes: int, before: Plan, after: Plan) -> None:
        """`after` replays units from `unit` on that `before` would have stored."""
        self._note(GuardEvent(Defence.FORWARD, self._update, self._rank, unit, short_bytes, _dropped(before, after)))

    def backward_short(self, short_bytes: int, before: Plan, after: Plan) -> None:
        """Backward goes by `after`, since `before` would have needed that much more than there is."""
        dropped = _dropped(before, after)
        if dropped:
            self._note(GuardEvent(Defence.BACKWARD, self._update, self._rank, None, short_bytes, dropped))

    def relieve(self, call: UnitCall, error: Exception) -> bool:
        """An exception came out of a decode or replay of `call` (R10).

        Where memory was short, calls of the microbatch give up their state, unused ones first, as much as was asked
        for; each further time in the same backward twice as much as the time before.

        Returns:
            Whether any was freed. False: the exception means something else.

        Raises:
            MemoryExhausted: nothing is left to free, or replays were agreed on with other ranks.
        """
        asked = refused_bytes(error)
        if asked is None:
            return False
        batch = self._batch()
        others = [other for other in batch.alive() if other is not call and _can_give_up(other)]
        if not others or batch.agreed is not None:  # other ranks would replay neither those nor this one again
            raise self._exhausted(call.unit, asked, error) from error
        wanted, freed = max(1, asked, 2 * self._freed), 0
        dropped: list[UnitId] = []
        for other in sorted(others, key=lambda other: other.used):
            freed += _own_bytes(other)
            other.drop()
            batch.treated[other.unit] = other.treatment
            dropped.append(other.unit)
            if freed >= wanted:
                break
        self._freed = freed
        self._note(GuardEvent(Defence.ALLOCATION, self._update, self._rank, call.unit, asked, tuple(dropped)), freed)
        return True

    def failed(self, error: BaseException) -> MemoryExhausted | None:
        """The engine's forward or backward ended in `error`: the error to raise where memory is what it lacked.

        None where it means something else, or says so itself.
        """
        asked = refused_bytes(error)
        return None if asked is None else self._exhausted(self._context.at_work, asked, error)

    def _exhausted(self, unit: UnitId | None, asked: int, error: BaseException) -> MemoryExhausted:
        self._note(GuardEvent(Defence.FAILURE, self._update, self._rank, unit, asked))
        self._leave_room()
        self.replays_everything = True
        where = "outside of any unit" if unit is None else f"at or after unit {unit}"
        count = f"{asked} bytes" if asked else "memory"
        budget = f" (now {self._planner.budget_bytes} bytes)" if self._planner.budget_bytes else ""
        missing = f"; {self._planner.infeasible}" if self._planner.infeasible is not None else ""
        return MemoryExhausted(
            f"rank {self._rank} {where}: {count} could not be allocated, and no stored state could be given up"
            f"{missing}. Run the whole update again on all ranks: it will replay every unit, and later plans leave "
            f"more room. If it fails again, make microbatches shorter or lower hilore.memory_budget{budget}. "
            f"The allocator said: {error}"
        )

    # -- what is learnt --------------------------------------------------------------------------------------------

    def _note(self, event: GuardEvent, missing_bytes: int = 0) -> None:
        if event.defence not in self.counts and event.defence is not Defence.FAILURE:  # that is raised
            _log.warning(
                "hilore (rank %d): memory is shorter than foreseen: %s. Gradients are not affected; later plans leave "
                "more room. This kind of event is counted from now on, not logged.",
                self._rank,
                event,
            )
        self.counts[event.defence] += 1
        self.events.append(event)
        self._missing = max(self._missing, event.short_bytes, missing_bytes)
        self._calm_updates = 0

    def end_microbatch(self) -> None:
        """Its backward is over, or was given up: the next plan leaves the room that was missing in this one."""
        self._context.at_work = None
        self.levels.end()
        self._freed = 0
        self._leave_room()

    def _leave_room(self) -> None:
        if self._missing:
            self._planner.leave_room(self._planner.margin_bytes + self._missing)
            self._missing = 0

    def end_update(self) -> None:
        """The optimizer has stepped."""
        self._update += 1
        self.replays_everything = False
        self._calm_updates += 1
        room = self._planner.margin_bytes
        if room and self._calm_updates % CALM_UPDATES == 0:
            self._planner.leave_room(room // 2 if room >= 2 * LEAST_ROOM_BYTES else 0)

    def metrics(self) -> Mapping[str, float]:
        """Events so far by defence, and the room that plans leave for their sake."""
        return {f"guard_{defence.value}": self.counts[defence] for defence in Defence} | {
            "guard_room_bytes": self._planner.margin_bytes
        }


def _dropped(before: Plan, after: Plan) -> tuple[UnitId, ...]:
    kept = (unit for unit, action in before.actions.items() if action is not Action.RECOMPUTE)
    return tuple(unit for unit in kept if after.action_of(unit) is Action.RECOMPUTE)


def _can_give_up(call: UnitCall) -> bool:
    stored = call.action is not Action.RECOMPUTE
    return stored and (call.treatment.place is Place.DEVICE or _own_bytes(call) > 0)


def _own_bytes(call: UnitCall) -> int:
    """What dropping a call frees on the device, at most."""
    stays = call.input_storages() | call.host_storages()
    return sum(size for address, size in call.held_storages().items() if address not in stays)
