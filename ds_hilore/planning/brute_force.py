"""Every choice of every unit, one after another: the oracle that the other planners are tested against."""

from __future__ import annotations

import itertools
import math
from typing import Any

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Plan, Solver, UnitId
from ds_hilore.planning.greedy import infeasible
from ds_hilore.planning.problem import Evaluation, Infeasible, Problem, evaluate, make_plan
from ds_hilore.planning.ties import tie_key

#: More units than this take minutes.
MAX_UNITS = 8


def brute_force(problem: Problem) -> Plan | Infeasible:
    """Gives the best plan of all by the whole tie rule; its bound is its own value.

    If nothing fits, `min_bytes` is the smallest budget that would do.

    Raises:
        UsageError: more than `MAX_UNITS` units.
    """
    if len(problem.units) > MAX_UNITS:
        raise UsageError(f"brute force takes at most {MAX_UNITS} units, got {len(problem.units)}; use solve()")
    units = [unit.unit for unit in problem.units]
    names = [[option.name for option in options] for options in problem.options]
    best: dict[UnitId, str] | None = None
    best_key: tuple[Any, ...] = (math.inf,)
    misses: list[Evaluation] = []
    for combination in itertools.product(*names):
        choice = dict(zip(units, combination))
        evaluation = evaluate(problem, choice)
        if not evaluation.feasible:
            misses.append(evaluation)
        elif -evaluation.saved_seconds <= best_key[0]:
            key = tie_key(problem, choice)
            if key < best_key:
                best, best_key = choice, key
    if best is None:
        return infeasible(problem, misses)
    return make_plan(problem, best, Solver.BRUTE_FORCE, bound_seconds=-best_key[0])
