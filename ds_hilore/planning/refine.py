"""The frontier again, by the exact programme: off the critical path, under a time limit.

What greedy's own bound already certifies is left alone; the rest goes to the solver, under even shares of the time
left. Nothing known is lost: rows and points of the frontier handed in stay where none of the new ones is better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_hilore.core.errors import PlanError
from ds_hilore.core.types import Plan
from ds_hilore.planning.apart import apart
from ds_hilore.planning.frontier import (
    FULL_GRID,
    Frontier,
    Grid,
    Prepared,
    first_frontier,
    first_plans,
    first_points,
    gap,
    row_of,
)
from ds_hilore.planning.problem import Infeasible, Problem, check, pick
from ds_hilore.planning.program import SolverLimits, solve

#: A programme that gets less than this has hardly been read by the solver.
_LEAST_S = 0.05
#: A programme that ran out of its share gets what the others have left over.
_ROUNDS = 2
#: Shares of time kept back for a-plans, most of which need none.
_FOR_POINTS = 2


class _Time:
    """Shares a time limit among programmes of which it is not known how many will be needed."""

    def __init__(self, limits: SolverLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._end = clock() + limits.time_limit_s

    def share(self, programmes_left: int) -> SolverLimits | None:
        """Limits of the next programme if as many are left; None when time is up."""
        left = (self._end - self._clock()) / max(1, programmes_left)
        return replace(self._limits, time_limit_s=left) if left >= _LEAST_S else None


def refine(
    frontier: Frontier,
    limits: SolverLimits | None = None,
    grid: Grid = FULL_GRID,
    clock: Callable[[], float] = time.monotonic,
) -> Frontier:
    """Gives a frontier that is nowhere worse than `frontier`, on a finer grid, every plan within `limits`' gap or as
    good as time allowed. `time_limit_s` is that of the whole frontier; where no programme runs into it, the result is
    the same every time.
    """
    limits = limits or SolverLimits()
    times = _Time(limits, clock)
    known = first_plans(frontier.problem, grid.prepared)
    plans = {row.reach: row.plan for row in frontier.rows} | ({} if isinstance(known, Infeasible) else known)
    plans = _better_plans(frontier.problem, dict(sorted(plans.items())), limits, times)
    rows = _rows(frontier, plans, grid)
    left = sum(gap(point) > limits.relative_gap for row in rows for point in row.points)
    improved = []
    for row in rows:
        improved.append(_better_points(row, limits, times, left))
        left -= sum(gap(point) > limits.relative_gap for point in row.points)
    return Frontier(frontier.problem, _undominated(improved))


def refine_apart(frontier: Frontier, limits: SolverLimits | None = None) -> Frontier:
    """The same in a process of its own. Stating programmes is Python work: in a thread it holds the interpreter lock
    for tens of milliseconds at a time, and an update that waits for it at every operation stands still.

    Raises:
        PlanError: the child broke, or what it gave is no frontier of this problem: no plan of it is followed unchecked.
    """
    refined = apart(refine, frontier, limits)
    check_frontier(refined, frontier.problem)
    return refined


def check_frontier(frontier: Frontier, problem: Problem) -> None:
    """Holds every plan of a frontier that came from elsewhere to `problem`, row by row in plain Python.

    Raises:
        PlanError: it is no frontier, one of another problem, or names the first plan that does not hold.
    """
    if not isinstance(frontier, Frontier) or not frontier.rows or frontier.problem != problem:
        raise PlanError(
            f"the solver gave no frontier of the problem that it was asked, but a {type(frontier).__name__}"
        )
    for row in frontier.rows:
        check(problem.now(risk_budget=row.reach), row.plan)
        if row.problem != problem.after_forward(row.plan.choice) or len(row.places) != len(row.points):
            raise PlanError("the solver gave plans for after forward that belong to another plan")
        for point, places in zip(row.points, row.places):
            now = row.problem.now(risk_budget=point.risk)
            check(now, point)
            if [options[place].name for options, place in zip(now.options, places)] != list(point.choice.values()):
                raise PlanError("the solver gave places that are not those of its plan")


def frontier_apart(problem: Problem, limits: SolverLimits | None = None) -> Frontier | Infeasible:
    """First and refined frontier of `problem`, in a process of its own."""
    return apart(_whole, problem, limits)


def _whole(problem: Problem, limits: SolverLimits | None) -> Frontier | Infeasible:
    first = first_frontier(problem)
    return first if isinstance(first, Infeasible) else refine(first, limits)


def _better_plans(problem: Problem, plans: dict[float, Plan], limits: SolverLimits, times: _Time) -> dict[float, Plan]:
    """q-plans by ascending reach, none worse than the one before it; nor do bounds fall."""
    better = dict(plans)
    for _ in range(_ROUNDS):
        hard = [reach for reach, plan in better.items() if gap(plan) > limits.relative_gap]
        for left, reach in zip(range(len(hard), 0, -1), hard):
            share = times.share(left + _FOR_POINTS)
            better[reach] = _better(problem.now(risk_budget=reach), better[reach], limits, share)
    before: Plan | None = None
    for reach, plan in better.items():
        if before is not None and before.saved_seconds >= plan.saved_seconds:
            bound = _least(plan.bound_seconds, None, at_least=before.saved_seconds)
            better[reach] = replace(before, bound_seconds=bound)
        before = better[reach]
    bound = None
    for reach, plan in reversed(better.items()):
        bound = _least(plan.bound_seconds, bound, at_least=plan.saved_seconds)
        better[reach] = replace(plan, bound_seconds=bound)
    return better


def _better(problem: Problem, known: Plan, limits: SolverLimits, share: SolverLimits | None) -> Plan:
    """The better of a known plan and the solver's, under the lower of both bounds."""
    if share is None or gap(known) <= limits.relative_gap:
        return known
    solved = solve(problem, share)
    if isinstance(solved, Infeasible):
        return known
    best = solved if solved.saved_seconds > known.saved_seconds else known
    bound = _least(known.bound_seconds, solved.bound_seconds, at_least=best.saved_seconds)
    return replace(best, bound_seconds=bound)


def _rows(frontier: Frontier, plans: dict[float, Plan], grid: Grid) -> list[Prepared]:
    """Rows of new and old q-plans, each with greedy points and those that are known."""
    problem = frontier.problem
    old = {row.reach: row for row in frontier.rows}
    found = list(plans.items())
    # an old q-plan that was bettered at its reach may still be the one for others
    found += [(at, replace(row.plan, bound_seconds=plans[at].bound_seconds)) for at, row in old.items()]
    rows: list[Prepared] = []
    for reach, plan in found:
        if any(row.plan.choice == plan.choice for row in rows):
            continue
        second = problem.after_forward(plan.choice)
        points = first_points(second, grid.decided)
        for row in frontier.rows:
            if row.plan.choice == plan.choice:
                points += [(point, pick(second, point.choice)) for point in row.points]
        rows.append(row_of(reach, plan, second, points))
    return rows


def _better_points(row: Prepared, limits: SolverLimits, times: _Time, left: int) -> Prepared:
    points = []
    for point in row.points:
        plan = point
        if gap(point) > limits.relative_gap:
            plan = _better(row.problem.now(risk_budget=point.risk), point, limits, times.share(left))
            left -= 1
        points.append((plan, pick(row.problem, plan.choice)))
    return row_of(row.reach, row.plan, row.problem, points)


def _undominated(rows: Sequence[Prepared]) -> tuple[Prepared, ...]:
    """Rows that are worth more than each other one at some reach, by reach; of equals the first."""
    kept: list[Prepared] = []
    for row in rows:
        if not any(_covers(other, row) for other in kept):
            kept = [other for other in kept if not _covers(row, other)] + [row]
    return tuple(sorted(kept, key=lambda row: row.reach))


def _covers(strong: Prepared, weak: Prepared) -> bool:
    """Whether `strong` is worth at least as much at every reach: worth rises only at a row's own points."""
    return all(strong.worth(point.risk) >= weak.worth(point.risk) for point in weak.points)


def _least(one: float | None, other: float | None, at_least: float) -> float | None:
    """The lower of two bounds, one of which may be missing; a bound below what is known to be possible is rounding."""
    bounds = [bound for bound in (one, other) if bound is not None]
    return max(min(bounds), at_least) if bounds else None
