"""How far a gradient is off another, and where: rules S1, S2 and S4 of NOTE [Self-check rules] in selfcheck.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action

#: A unit whose gradient is a smaller part of the whole one is judged as if it had this much.
LEAST_SHARE = 1e-6

_CAUSES = {
    Action.STORE: "stored or derived state is not what the forward saved, or was written into past autograd",
    Action.RECOMPUTE: "the replay did not do what the forward did, or something that it reads has changed in between",
    Action.COMPRESS: "compressed state adds more error than calibration predicted",
}


@dataclass(frozen=True)
class Difference:
    """One gradient against the exact one, where it counts (S1).

    Args:
        relative: to the exact gradient of the unit; of the whole model where plans compress.
        allowed: of that.
        unit: "" for parameters of no unit.
        parameter: that is off most.
    """

    relative: float
    allowed: float
    unit: str
    parameter: str

    @property
    def wrong(self) -> bool:
        return self.relative > self.allowed

    @property
    def excess(self) -> float:
        """How many times what is allowed."""
        return self.relative / self.allowed if self.relative > 0 else 0.0

    def payload(self) -> list[Any]:
        """Arguments that make it again, for other ranks; JSON knows no infinity."""
        return [min(self.relative, sys.float_info.max), min(self.allowed, 1e30), self.unit, self.parameter]

    def described(self, treatment: str) -> str:
        """For people: how far, where, and why that may be.

        Args:
            treatment: name of how the unit was treated; "" where there is none.
        """
        where = f"unit {self.unit} ({treatment})" if treatment else "parameters that belong to no unit"
        cause = _CAUSES[Treatment.parse(treatment).action] if treatment else "state of the first unit, or of the loss"
        return (
            f"{self.relative:.1e} off the plain model's, {self.allowed:.1e} is allowed. It shows first in {where}, "
            f"most in {self.parameter}. Likely cause: {cause}"
        )


class UnitNorms:
    """Distances and norms by parameter, put together by unit.

    Args:
        units: names (paths) in forward order.
        norms: of the exact gradient, by parameter; what is not named has none.
    """

    def __init__(self, units: Sequence[str], norms: Mapping[str, float]) -> None:
        self._units = tuple(dict.fromkeys(units))
        squares: dict[str, float] = {}
        for name, norm in norms.items():
            unit = self._unit_of(name)
            squares[unit] = squares.get(unit, 0.0) + norm * norm
        self.whole = math.sqrt(math.fsum(squares.values()))
        self._norms = {unit: math.sqrt(square) for unit, square in squares.items()}

    def _unit_of(self, parameter: str) -> str:
        """The innermost unit that holds it."""
        return max((unit for unit in self._units if parameter.startswith(f"{unit}.")), key=len, default="")

    def by_unit(self, off: Mapping[str, float]) -> dict[str, tuple[float, str]]:
        """Of every unit, how far its worst parameter is off, relative to the unit, and that parameter (S2)."""
        found: dict[str, tuple[float, str]] = {}
        for name, distance in off.items():
            unit = self._unit_of(name)
            reference = max(self._norms.get(unit, 0.0), LEAST_SHARE * self.whole)
            relative = 0.0 if distance == 0 else distance / reference if reference > 0 else math.inf
            found[unit] = max(found.get(unit, (0.0, name)), (relative, name))
        return found

    def exact(self, off: Mapping[str, float], allowed: float) -> Difference:
        """The last unit in forward order that is off more than is allowed (S1); where none is, the one that is most."""
        found = self.by_unit(off)
        wrong = [unit for unit in ("", *self._units) if found.get(unit, (0.0, ""))[0] > allowed]
        unit = wrong[-1] if wrong else max(found, key=lambda each: found[each][0], default="")
        relative, parameter = found.get(unit, (0.0, ""))
        return Difference(relative, allowed, unit, parameter)

    def compressed(self, off: Mapping[str, float], allowed: float) -> Difference:
        """The whole gradient (S4), and where most of its difference is."""
        together = math.sqrt(math.fsum(distance * distance for distance in off.values()))
        parameter = max(off, key=lambda name: off[name], default="")
        relative = together / self.whole if self.whole > 0 else 0.0 if together == 0 else math.inf
        return Difference(relative, allowed, self._unit_of(parameter), parameter)
