"""The units of one microbatch, and the bytes that they hold."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field

from ds_hilore.core.types import Action, Plan
from ds_hilore.profiling.measure import UnitFootprint
from ds_hilore.recovery.unit import UnitCall
from ds_hilore.runtime.update import Coefficients, MicrobatchFacts


@dataclass
class Microbatch:
    """The units of one microbatch so far."""

    calls: list[weakref.ref[UnitCall]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    plan: Plan = field(default_factory=Plan)
    facts: MicrobatchFacts | None = None
    coefficients: list[Coefficients] = field(default_factory=list)

    def alive(self) -> list[UnitCall]:
        return [call for reference in self.calls if (call := reference()) is not None]


def footprints(calls: list[UnitCall]) -> list[UnitFootprint]:
    """Bytes that each call adds to those before it. Reads addresses only; nothing is copied or waited for."""
    seen: set[int] = set()
    found: list[UnitFootprint] = []
    for call in calls:
        inputs = _new_bytes(call.input_storages(), seen)
        stored = None
        if call.action is Action.STORE:
            stored = inputs + _new_bytes(call.held_storages(), seen)
        found.append(UnitFootprint(call.unit, call.unit_class, call.tokens, inputs, stored))
    return found


def _new_bytes(storages: dict[int, int], seen: set[int]) -> int:
    fresh = sum(size for address, size in storages.items() if address not in seen)
    seen.update(storages)
    return fresh
