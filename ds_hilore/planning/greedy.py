"""A good plan at once: the step with most seconds per unit of scarce resource, again and again.

Starts from all-R (or, where that does not fit, from other lean plans) and upgrades one unit at a time. With risk in
play it does so under a few prices of risk against bytes and keeps the best. Always feasible if all-R is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ds_hilore.core.types import Plan, Solver, UnitId
from ds_hilore.planning.options import REPLAY, Option
from ds_hilore.planning.problem import Evaluation, Infeasible, Problem, Row, evaluate, make_plan, pick
from ds_hilore.planning.rows import Rows
from ds_hilore.planning.ties import settle, tie_key

#: Price of the whole memory headroom, and of the whole risk budget beside it. The right ratio is not known before the
#: answer, and a wrong one costs up to a quarter of the saved seconds, so with risk in play a few are tried.
_BYTES_ONLY = (1.0, 0.0)
_WEIGHTINGS = (_BYTES_ONLY, *((1.0, risk) for risk in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 4.0)), (0.0, 1.0))
#: Keeps densities finite for steps that cost nothing: they come first, in order of gain.
_FREE = 1e-12


def greedy(problem: Problem) -> Plan | Infeasible:
    """Gives a feasible plan, or what the leanest plan known would need.

    Settled by the tie rule (ties.py); the same problem gives the same plan.
    """
    start = lean_choice(problem)
    if isinstance(start, Infeasible):
        return start
    return make_plan(problem, settle(problem, _climb(problem, start)), Solver.GREEDY)


def repair(problem: Problem, plan: Plan) -> Plan | Infeasible:
    """Drops variants of `plan` until it holds in `problem`; those that save most per resource stay longest.

    For plans made for other exposures, budgets or bytes. A variant that a unit can no longer become is dropped too.
    Whatever holds is returned with the same choice; what is dropped is not replaced by another variant.
    """
    if evaluate(problem, plan.choice).feasible:
        return make_plan(problem, plan.choice, plan.solver)
    start = lean_choice(problem)
    if isinstance(start, Infeasible):
        return start
    allowed = {}
    for unit, options in zip(problem.units, problem.options):
        wanted = (start[unit.unit], plan.choice.get(unit.unit, REPLAY))
        allowed[unit.unit] = tuple(option.name for option in options if option.name in wanted)
    narrowed = replace(problem, allowed=allowed)
    return make_plan(problem, settle(narrowed, _climb(narrowed, start)), Solver.GREEDY)


def lean_choice(problem: Problem) -> dict[UnitId, str] | Infeasible:
    """Gives the first of a few lean plans that fits: all-R, as prepared, least held, least in its own backward."""
    candidates = [{unit.unit: _by_name(options, REPLAY).name for unit, options in zip(problem.units, problem.options)}]
    if problem.prepared is not None:
        candidates.append(
            {
                unit.unit: _by_name(options, problem.prepared.get(unit.unit, REPLAY)).name
                for unit, options in zip(problem.units, problem.options)
            }
        )
    for least in (_least_held, _least_in_backward):
        candidates.append(
            {unit.unit: min(options, key=least).name for unit, options in zip(problem.units, problem.options)}
        )
    evaluations = []
    for choice in candidates:
        evaluation = evaluate(problem, choice)
        if evaluation.feasible:
            return choice
        evaluations.append(evaluation)
    return infeasible(problem, evaluations)


def infeasible(problem: Problem, evaluations: Iterable[Evaluation]) -> Infeasible:
    """Says what is missing for the leanest of plans that do not fit; one short of device bytes only comes first."""
    device = (Row.FORWARD, Row.LOSS, Row.BACKWARD, Row.CONVERSION)

    def shortage(evaluation: Evaluation) -> tuple[bool, int]:
        return any(v.row not in device for v in evaluation.violations), evaluation.peak_bytes

    leanest = min(evaluations, key=shortage)
    if shortage(leanest)[0]:
        worst = next(v for v in leanest.violations if v.row not in device)
        return Infeasible(leanest.peak_bytes, worst.row.value, worst.unit, problem.budget_bytes)
    return Infeasible(leanest.peak_bytes, leanest.binding.row.value, leanest.binding.unit, problem.budget_bytes)


def _climb(problem: Problem, start: Mapping[UnitId, str]) -> dict[UnitId, str]:
    """The best plan that greedy reaches from a feasible one."""
    risky = any(option.risk_cost for options in problem.options for option in options)
    weightings = _WEIGHTINGS if risky and problem.risk_limit else (_BYTES_ONLY,)
    choices = [_climb_once(problem, start, weights) for weights in weightings]
    return min(choices, key=lambda choice: tie_key(problem, choice))


def _climb_once(problem: Problem, start: Mapping[UnitId, str], weights: tuple[float, float]) -> dict[UnitId, str]:
    """Takes the densest step of any unit that fits until none is left.

    A step that does not fit is struck out; the density of what remains for its unit is counted from what the unit
    holds then, so a unit that could not be compressed still competes with all that storing it gains.
    """
    rows = Rows(problem, pick(problem, start))
    price = _Price(problem, rows, weights)
    left = [list(options) for options in problem.options]
    heap: list[tuple[float, int, int]] = []

    def offer(position: int) -> None:
        now = rows.picked[position]
        left[position] = [option for option in left[position] if option.seconds > now.seconds]
        if left[position]:
            densities = [price.density(now, option) for option in left[position]]
            best = max(densities)
            # of equally dense steps the later unit comes first (T2 of ties.py)
            heapq.heappush(heap, (-best, -position, densities.index(best)))

    for position in range(len(left)):
        offer(position)
    while heap:
        _, minus_position, place = heapq.heappop(heap)
        option = left[-minus_position].pop(place)
        if rows.fits(-minus_position, option):
            rows.put(-minus_position, option)
        offer(-minus_position)
    return {unit.unit: option.name for unit, option in zip(problem.units, rows.picked)}


class _Price:
    """What a step costs: its share of the memory headroom and of the risk budget at the start, weighted."""

    def __init__(self, problem: Problem, rows: Rows, weights: tuple[float, float]) -> None:
        self._per_byte = weights[0] / max(1, rows.headroom())
        self._per_risk = weights[1] / (problem.risk_limit or 1.0)

    def density(self, now: Option, option: Option) -> float:
        cost = self._per_byte * max(0, option.held_bytes - now.held_bytes)
        cost += self._per_risk * max(0.0, option.risk_cost - now.risk_cost)
        return (option.seconds - now.seconds) / (cost + _FREE)


def _by_name(options: tuple[Option, ...], name: str) -> Option:
    """The named option, or the one that holds least where the name is not allowed."""
    return next((option for option in options if option.name == name), min(options, key=_least_held))


def _least_held(option: Option) -> tuple[float, int, int]:
    return option.risk_cost, option.held_bytes, option.own_backward_bytes


def _least_in_backward(option: Option) -> tuple[float, int, int]:
    return option.risk_cost, option.own_backward_bytes, option.held_bytes
