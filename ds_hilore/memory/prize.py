"""What there is to win, said before anything is promised: free memory, the share of replays, what the plan takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ds_hilore.core.types import Action, Place, UnitProfile, Variant

_MB = 1e6


def storing_bytes(units: Iterable[UnitProfile]) -> int:
    """What the device would hold if every unit were stored, beyond what it holds if every unit is replayed.

    Of several ways to store a unit, the one that saves most seconds, then the smallest, counts; a unit that can only be
    replayed counts for nothing.
    """
    return sum(_storing_bytes(unit) for unit in units)


def _storing_bytes(unit: UnitProfile) -> int:
    ways = [v for v in unit.variants if v.action is Action.STORE and v.place is Place.DEVICE]
    if not ways:
        return 0

    def preference(way: Variant) -> tuple[float, int]:
        return -way.saved_seconds, way.held_bytes

    return min(ways, key=preference).held_bytes - unit.variant("R").held_bytes


@dataclass(frozen=True)
class Prize:
    """One rank's prospects.

    Args:
        budget_bytes: of the device.
        replayed_peak_bytes: peak of an update that replays every unit.
        update_seconds: of such an update.
        replay_seconds: of all replays in it.
        planned_seconds: what the plan expects to save of those.
        planned_peak_bytes: what it expects to peak at.
        storing_bytes: what storing every unit would hold beyond replaying it; None where it is not known.
    """

    budget_bytes: int
    replayed_peak_bytes: int
    update_seconds: float
    replay_seconds: float
    planned_seconds: float
    planned_peak_bytes: int
    storing_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        """Left over by replaying everything; negative where not even that fits."""
        return self.budget_bytes - self.replayed_peak_bytes

    @property
    def replay_share(self) -> float:
        """Of the update's time; 0 where it is not known."""
        return self.replay_seconds / self.update_seconds if self.update_seconds > 0 else 0.0

    @property
    def planned_share(self) -> float:
        """Of the replays' time that the plan takes away. May pass 1: storing skips more than the replay itself."""
        return self.planned_seconds / self.replay_seconds if self.replay_seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget_bytes,
            "replayed_peak_bytes": self.replayed_peak_bytes,
            "free_bytes": self.free_bytes,
            "update_seconds": self.update_seconds,
            "replay_seconds": self.replay_seconds,
            "replay_share": self.replay_share,
            "planned_seconds": self.planned_seconds,
            "planned_share": self.planned_share,
            "planned_peak_bytes": self.planned_peak_bytes,
            "storing_bytes": self.storing_bytes,
        }

    def lines(self) -> tuple[str, ...]:
        """For the log and for reports."""
        if self.free_bytes < 0:
            return (
                f"the budget of {self.budget_bytes / _MB:.0f} MB is {-self.free_bytes / _MB:.0f} MB less than "
                "replaying every unit needs: nothing to win",
                self._replays(),
            )
        return (
            f"free under the budget of {self.budget_bytes / _MB:.0f} MB: {self.free_bytes / _MB:.0f} MB "
            f"(replaying every unit peaks at {self.replayed_peak_bytes / _MB:.0f} MB{self._storing()})",
            self._replays(),
            f"the plan expects to take {self.planned_share:.0%} of that, at a peak of "
            f"{self.planned_peak_bytes / _MB:.0f} MB",
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _storing(self) -> str:
        if self.storing_bytes is None:
            return ""
        return f", storing every unit takes {self.storing_bytes / _MB:.0f} MB more"

    def _replays(self) -> str:
        return (
            f"recomputation is {self.replay_share:.1%} of the update "
            f"({self.replay_seconds:.3g} of {self.update_seconds:.3g} s)"
        )
