"""Which of equally good plans is taken: one rule for greedy, brute force and the programme.

# NOTE [Ties] Of plans that save the same seconds:
#   T1 the one that holds fewer bytes on the device (a variant that saves nothing is not worth its bytes), then the
#      one with less risk;
#   T2 then the one whose held bytes lie later in forward order: what late units hold is gone first in backward, so
#      early units, whose backward sees nothing held after them, replay. Written as the lexicographically smallest
#      sequence of held bytes;
#   T3 then the order in which variants are declared.
# `settle` applies it to one plan by single changes (T1) and by sorting interchangeable units (T2), both only where
# every row still holds. Brute force searches the whole order by `tie_key`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ds_hilore.core.types import UnitId
from ds_hilore.planning.options import REPLAY, Option
from ds_hilore.planning.problem import Problem, evaluate


def tie_key(problem: Problem, choice: Mapping[UnitId, str]) -> tuple[Any, ...]:
    """Gives a key that is smaller for the better plan: seconds first, then T1, T2, T3."""
    places = [_place(options, choice.get(unit.unit, REPLAY)) for unit, options in zip(problem.units, problem.options)]
    picked = [options[place] for options, place in zip(problem.options, places)]
    held = [option.held_bytes for option in picked]
    seconds = math.fsum(option.seconds for option in picked)
    return -seconds, sum(held), math.fsum(option.risk_cost for option in picked), held, places


def settle(problem: Problem, choice: Mapping[UnitId, str]) -> dict[UnitId, str]:
    """Gives a plan that is as good as the feasible `choice`, settled by the tie rule as far as single steps go."""
    settled = {unit.unit: choice.get(unit.unit, REPLAY) for unit in problem.units}
    for unit, options in zip(problem.units, problem.options):
        settled = _leaner_unit(problem, settled, unit.unit, options)
    for members in interchangeable(problem):
        settled = _late_first(problem, settled, members)
    return settled


def interchangeable(problem: Problem) -> list[list[int]]:
    """Positions of units whose options are equal in every number, in forward order; classes of two and more."""
    classes: dict[tuple[Option, ...], list[int]] = {}
    for position, options in enumerate(problem.options):
        classes.setdefault(options, []).append(position)
    return [members for members in classes.values() if len(members) > 1]


def late_rank(option: Option) -> tuple[int, int, int, int]:
    """Orders the options of one unit from "may be early" to "should be late" (T2)."""
    # of equal held bytes, the larger workspace goes to the earlier unit, where less is held
    return option.held_bytes, option.backward_held_bytes, -option.own_backward_bytes, -option.forward_bytes


def _leaner_unit(
    problem: Problem, choice: dict[UnitId, str], unit: UnitId, options: tuple[Option, ...]
) -> dict[UnitId, str]:
    now = options[_place(options, choice[unit])]
    equals = [option for option in options if option.seconds == now.seconds and option is not now]
    for option in sorted(equals, key=lambda option: (option.held_bytes, option.risk_cost)):
        if (option.held_bytes, option.risk_cost) >= (now.held_bytes, now.risk_cost):
            break
        candidate = {**choice, unit: option.name}
        if evaluate(problem, candidate).feasible:
            return candidate
    return choice


def _late_first(problem: Problem, choice: dict[UnitId, str], members: list[int]) -> dict[UnitId, str]:
    options = problem.options[members[0]]
    units = [problem.units[position].unit for position in members]
    names = sorted((choice[unit] for unit in units), key=lambda name: late_rank(options[_place(options, name)]))
    candidate = {**choice, **dict(zip(units, names))}
    if candidate == choice or not evaluate(problem, candidate).feasible:
        return choice
    return candidate


def _place(options: tuple[Option, ...], name: str) -> int:
    return next(place for place, option in enumerate(options) if option.name == name)
