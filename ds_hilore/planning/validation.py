"""What makes a planning problem, said once for every way to make one."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from ds_hilore.core.errors import UsageError
from ds_hilore.planning.options import validate_unit

if TYPE_CHECKING:
    from ds_hilore.planning.problem import Problem


def validate_problem(problem: Problem) -> None:
    """Refuses units, variants and numbers that make no problem.

    Raises:
        UsageError: what is wrong, and where.
    """
    if not problem.units:
        raise UsageError("a planning problem needs at least one unit")
    if len({unit.unit for unit in problem.units}) < len(problem.units):
        raise UsageError("a unit appears twice in a planning problem; calls of one module differ by `call`")
    validate_facts(problem)
    for unit in problem.units:
        validate_unit(unit)
    problem.options  # noqa: B018  (unknown names, and units without any option left, are found here)


def validate_facts(problem: Problem, by_unit: Collection[str] = ("exposures", "allowed", "prepared")) -> None:
    """The part that is not about units and their variants.

    Args:
        by_unit: fields with entries by unit that are looked at; the others are known to be right.

    Raises:
        UsageError: what is wrong.
    """
    if problem.in_flight < 1 or (problem.in_flight > 1 and problem.prepared is not None):
        raise UsageError(
            f"in_flight = {problem.in_flight}: at least 1, and after forward 1 (`after_forward` sees to it)"
        )
    for name in by_unit:
        named = getattr(problem, name)
        strangers = set(named).difference(unit.unit for unit in problem.units) if named else None
        if strangers:
            raise UsageError(f"{name} names units that are not in the problem: {sorted(map(str, strangers))}")
    for unit_id, exposure in problem.exposures.items() if "exposures" in by_unit else ():
        if not exposure >= 0:
            raise UsageError(f"exposure of unit {unit_id} must be >= 0, got {exposure}")
    if not 0 <= problem.risk_budget < math.inf:
        raise UsageError(f"risk_budget must be finite and >= 0, got {problem.risk_budget}")
