"""The units of one microbatch, how far it is, and the bytes that its units hold."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from ds_hilore.core.treatment import REPLAYED, Treatment, treatment_of
from ds_hilore.core.types import Action, Place, Plan, Shape, UnitId
from ds_hilore.planning.frontier import Prepared
from ds_hilore.planning.paper import PaperPrepared
from ds_hilore.profiling.measure import UnitFootprint
from ds_hilore.profiling.pruned import Pruned
from ds_hilore.recovery.unit import UnitCall
from ds_hilore.runtime.risk import read
from ds_hilore.runtime.update import Coefficients, MicrobatchFacts


class Phase(Enum):
    """How far a microbatch is."""

    IDLE = "idle"  # no unit has run yet, or its backward is over
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass
class Microbatch:
    """The units of one microbatch so far.

    Attributes:
        sampled: classes of which its plan stores a unit to measure it.
        live_share: positions that can change the model, of all, as announced; once a pruned backward is over, as found.
            None: nobody has told.
        prepared: what the plan may become after forward; None where it stands as it is.
        decided: what it has become; None before.
        prunes: replays leave out what is dead.
        pruning: how much of them, as far as plans go by it.
        awaited: observed log-probabilities whose gradient has not come yet.
        continued: its graph is kept for another backward, of which nothing is known.
        agreed: calls that all ranks of a group store, which replay all others; None: nobody need agree.
    """

    phase: Phase = Phase.IDLE
    calls: list[weakref.ref[UnitCall]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    treated: dict[UnitId, Treatment] = field(default_factory=dict)
    sampled: frozenset[str] | None = None
    shape: Shape | None = None  # of its first unit
    plan: Plan = field(default_factory=Plan)
    prepared: Prepared | PaperPrepared | None = None
    decided: Plan | None = None
    facts: MicrobatchFacts | None = None
    live_share: float | None = None
    prunes: bool = False
    pruning: Pruned | None = None
    coefficients: list[Coefficients] = field(default_factory=list)
    awaited: int = 0
    continued: bool = False
    agreed: frozenset[UnitId] | None = None

    @property
    def exact_only(self) -> bool:
        """Whether coefficients do not tell the whole gradient: that was announced, or some are still to come."""
        announced = self.facts is not None and self.facts.exact_only
        return announced or self.awaited > 0 or self.continued

    def agree(self, stored: frozenset[UnitId]) -> None:
        """All ranks whose collectives a replay repeats store just these calls. None of them may replay more later,
        whatever comes, so what was prepared stands."""
        self.agreed, self.prepared = stored, None

    def treatment(self, unit: UnitId) -> Treatment:
        """What is done with a unit that is about to run."""
        planned = treatment_of(self.plan, unit)
        others_replay = self.agreed is not None and unit not in self.agreed
        return REPLAYED if others_replay and planned.action is not Action.RECOMPUTE else planned

    def alive(self) -> list[UnitCall]:
        return [call for reference in self.calls if (call := reference()) is not None]

    @property
    def ran(self) -> dict[UnitId, Action]:
        """Kinds of what was done with each unit so far, in forward order."""
        return {unit: treatment.action for unit, treatment in self.treated.items()}

    def follow(self, decided: Plan, unusable: frozenset[UnitId] = frozenset()) -> None:
        """Compresses or drops stored state as the final plan says; all else was done in forward.

        Args:
            unusable: units whose encoded state is not finite: replayed, whatever the plan says. So is what turns out
                not to be when it is encoded here (a second copy to the host, where anything is).
        """
        self.decided = decided
        changed = decided is not self.plan
        calls = self.alive() if changed or unusable else []
        encoded: list[UnitCall] = []
        for call in calls:
            wanted = treatment_of(decided, call.unit) if changed else call.treatment
            if wanted == REPLAYED or call.unit in unusable:
                call.drop()
            elif wanted.action is Action.COMPRESS and call.action is Action.STORE:
                call.compress(wanted)
                encoded.append(call)
        broken = read((), encoded).unusable
        for call in encoded:
            if call.unit in broken:
                call.drop()
        self.treated.update({call.unit: call.treatment for call in calls})

    @property
    def promised_seconds(self) -> float:
        """What its plan, the final one once there is one, promises to save against replaying everything."""
        row, decided = self.prepared, self.decided
        if decided is None or decided is self.plan or row is None:
            return self.plan.saved_seconds
        if decided is row.plan:  # and units were replayed in forward, which the plan in hand knows
            return min(decided.saved_seconds, self.plan.saved_seconds)
        return decided.saved_seconds - row.prepare_seconds  # after forward, encoding is sunk

    def metrics(self) -> dict[str, float]:
        """What ran, and what the plan promised."""
        actions = list(self.ran.values())
        return {
            "stored_units": actions.count(Action.STORE),
            "compressed_units": actions.count(Action.COMPRESS),
            "replayed_units": actions.count(Action.RECOMPUTE),
            "offloaded_units": sum(treatment.place is Place.HOST for treatment in self.treated.values()),
            "saved_seconds": self.promised_seconds,
            "predicted_peak_bytes": self.plan.peak_bytes,
        }


def footprints(calls: list[UnitCall]) -> list[UnitFootprint]:
    """Bytes that each call adds to those before it. Reads addresses only; nothing is copied or waited for.

    An input that several calls hold (a mask, a rotary table) belongs to none of them: no plan frees it, so it is part
    of what stays.
    """
    inputs = [call.input_storages() for call in calls]
    holders = Counter(address for held in inputs for address in held)
    seen = {address for address, count in holders.items() if count > 1}
    found: list[UnitFootprint] = []
    for call, held in zip(calls, inputs):
        input_bytes = _new_bytes(held, seen)
        stored = None
        if call.action is Action.STORE and call.treatment.place is Place.DEVICE:
            stored = input_bytes + _new_bytes(call.held_storages(), seen)
        found.append(UnitFootprint(call.unit, call.unit_class, call.shape, input_bytes, stored))
    return found


def _new_bytes(storages: dict[int, int], seen: set[int]) -> int:
    fresh = sum(size for address, size in storages.items() if address not in seen)
    seen.update(storages)
    return fresh
