"""Plans that send state to host memory: only where not everything can stay, and only where that saves more.

While copies are under way the device holds some state twice over: of the unit that was sent last in forward, of the one
that was called back ahead in backward (recovery/offload.py, O3 and O5). Where a plan may send anything, all its rows
leave room for the largest of those, so one problem is solved without host memory and one with, and the better plan is
followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ds_hilore.core.types import Action, Place, UnitId, UnitProfile, Variant
from ds_hilore.planning.frontier import Frontier
from ds_hilore.planning.options import REPLAY
from ds_hilore.planning.problem import Infeasible, Problem

First = Callable[[Problem], Frontier | Infeasible]


def moving_bytes(units: Iterable[UnitProfile], choice: Mapping[UnitId, str] | None = None) -> int:
    """Device bytes of the largest state that is sent.

    Args:
        choice: variants by unit; None: of all that may be sent.
    """
    return max((variant.forward_bytes for unit in units for variant in _sent(unit, choice)), default=0)


def _sent(unit: UnitProfile, choice: Mapping[UnitId, str] | None) -> Iterable[Variant]:
    away = [variant for variant in unit.variants if variant.place is Place.HOST]
    return away if choice is None else [variant for variant in away if variant.name == choice.get(unit.unit, REPLAY)]


def first_with_host(problem: Problem, first: First) -> tuple[Problem, Frontier | Infeasible]:
    """Gives a first answer, with host memory or without, and the problem that it answers.

    Args:
        problem: whose units may have variants in host memory. Its bases leave no room for copies.
        first: gives the first answer to a problem.
    """
    home = _at_home(problem)
    stays = first(home)
    moving = moving_bytes(problem.units)
    if not moving or not problem.host_budget_bytes or _stores_everything(stays):
        return home, stays
    roomy = replace(
        problem,
        base_forward_bytes=problem.base_forward_bytes + moving,
        base_backward_bytes=problem.base_backward_bytes + moving,
    )
    goes = first(roomy)
    if isinstance(goes, Infeasible):
        return home, stays
    if isinstance(stays, Infeasible) or goes.rows[0].plan.saved_seconds > stays.rows[0].plan.saved_seconds:
        return roomy, goes
    return home, stays


def leanest(problem: Problem, away: str) -> dict[UnitId, str]:
    """What needs least where no plan fits: every unit replayed, from inputs in host memory (the variant `away`) where
    all have that and it has room for them."""
    sent = [variant for unit in problem.units for variant in unit.variants if variant.name == away]
    fits = len(sent) == len(problem.units) and sum(v.held_bytes for v in sent) <= problem.host_budget_bytes
    return {unit.unit: away if fits else REPLAY for unit in problem.units}


def _at_home(problem: Problem) -> Problem:
    if not any(variant.place is Place.HOST for unit in problem.units for variant in unit.variants):
        return problem
    units = tuple(
        replace(unit, variants=tuple(variant for variant in unit.variants if variant.place is Place.DEVICE))
        for unit in problem.units
    )
    return replace(problem, units=units)


def _stores_everything(found: Frontier | Infeasible) -> bool:
    """Whether the exact plan replays nothing and compresses nothing: then nothing needs to move."""
    return isinstance(found, Frontier) and all(action is Action.STORE for action in found.rows[0].plan.actions.values())
