"""What a variant does with the saved state of a unit, and how its name says so.

    H                               every saved tensor is stored
    H:attention                     the same, and a replay could still take the named operators' outputs
    R                               nothing but the inputs: the unit is replayed
    R:attention                     replayed, but for the named operators, whose outputs are kept
    L:mlp=int8:64,residual=bf16     state groups held by codecs, all other state stored
    O                               every saved tensor is stored, in host memory
    O:input                         the unit is replayed, from hidden states that are stored in host memory

A plan names variants; profiles, benchmarks and reports show the same names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Place, Plan, UnitId

_ACTIONS = {action.letter: action for action in Action}
#: Variants whose state lies in host memory. Both are exact.
_OFFLOADED = {Action.STORE: "O", Action.RECOMPUTE: "O:input"}


@dataclass(frozen=True)
class Treatment:
    """How one call of a unit is recovered.

    Args:
        codecs: (state group, codec name) pairs of an L variant, in order of groups.
        keeps: operators whose outputs a replay takes from forward instead of running them again ("attention").
        place: where what is stored lies, or what a replay starts from.
    """

    action: Action
    codecs: tuple[tuple[str, str], ...] = ()
    keeps: tuple[str, ...] = ()
    place: Place = Place.DEVICE

    @property
    def name(self) -> str:
        """The variant's name, from which `parse` makes the treatment again."""
        if self.place is Place.HOST:
            return _OFFLOADED[self.action]
        parts = [f"{group}={codec}" for group, codec in self.codecs] or list(self.keeps)
        return self.action.letter + (":" + ",".join(parts) if parts else "")

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def parse(cls, name: str) -> Treatment:
        """The treatment that a variant's name says.

        Raises:
            UsageError: the name says none.
        """
        for offloaded, known in _OFFLOADED.items():
            if name == known:
                return cls(offloaded, place=Place.HOST)
        letter, _, rest = name.partition(":")
        action = _ACTIONS.get(letter)
        parts = tuple(rest.split(",")) if rest else ()
        if action is Action.COMPRESS and parts:
            pairs = [part.partition("=") for part in parts]
            if all(group and codec for group, _, codec in pairs):
                return cls(action, codecs=tuple((group, codec) for group, _, codec in pairs))
        elif action is not None and action is not Action.COMPRESS and all(parts):
            return cls(action, keeps=parts)
        raise UsageError(f'{name!r} names no variant; write "H", "R", "R:attention", "O" or "L:mlp=int8:64"')


STORED = Treatment(Action.STORE)
REPLAYED = Treatment(Action.RECOMPUTE)
OFFLOADED = Treatment(Action.STORE, place=Place.HOST)
INPUT_OFFLOADED = Treatment(Action.RECOMPUTE, place=Place.HOST)


@dataclass(frozen=True)
class UniformPlan(Plan):
    """Every unit gets the same, known or not."""

    treatment: Treatment = REPLAYED

    def action_of(self, unit: UnitId) -> Action:
        return self.treatment.action


def treatment_of(plan: Plan, unit: UnitId) -> Treatment:
    """What a plan does with a unit; one that it does not name is replayed."""
    if isinstance(plan, UniformPlan):
        return plan.treatment
    name = plan.choice.get(unit)
    return Treatment(plan.action_of(unit)) if name is None else Treatment.parse(name)
