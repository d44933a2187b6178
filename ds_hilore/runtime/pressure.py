"""Between forward and backward: what of memory is tighter than the plan took it to be."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hilore.core.types import Plan
from ds_hilore.planning.options import REPLAY, device_bytes
from ds_hilore.planning.problem import Problem, evaluate

#: Peaks that differ by less are the same: pages, the allocator's rounding, what the interpreter holds.
NOISE_BYTES = 1 << 20


@dataclass(frozen=True)
class Levels:
    """What is held when backward begins, in bytes.

    Args:
        foreseen: by the plan.
        seen: now; None where that cannot be read.
        free: what can still be had from the device now; None where that cannot be read.
    """

    foreseen: int
    seen: int | None = None
    free: int | None = None


@dataclass(frozen=True)
class Pressure:
    """The two numbers of the second problem that differ from what was planned with."""

    base_backward_bytes: int
    budget_bytes: int

    def shortage(self, problem: Problem, plan: Plan) -> int:
        """Bytes by which the backward of the prepared plan would need more than there is."""
        now = problem.now(base_backward_bytes=self.base_backward_bytes, budget_bytes=self.budget_bytes)
        return max(0, evaluate(now, plan.choice).peak_bytes - now.budget_bytes)


def pressure(problem: Problem, plan: Plan, levels: Levels, budget_bytes: int) -> Pressure | None:
    """Compares; None where memory is no tighter than was planned for.

    Args:
        problem: after forward, from `plan`.
        budget_bytes: what the update may use; plans may have left free some of it.
    """
    level = levels.foreseen if levels.seen is None else levels.seen
    excess = level - levels.foreseen if level - levels.foreseen > NOISE_BYTES else 0
    allowed = max(problem.budget_bytes, budget_bytes) if excess else problem.budget_bytes
    if levels.free is not None and level + levels.free < min(allowed, plan.peak_bytes + excess):
        allowed = level + levels.free
    elif not excess:
        return None
    return Pressure(problem.base_backward_bytes + excess, allowed)


def held_bytes(problem: Problem, plan: Plan) -> int:
    """Device bytes that the units keep until their backward."""
    return sum(device_bytes(unit.variant(plan.choice.get(unit.unit, REPLAY))) for unit in problem.units)
