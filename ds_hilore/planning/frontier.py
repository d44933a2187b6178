"""The plan frontier: every answer that an update may need, worked out before it asks (design section 4).

For one problem (shape class, budget, profile) a few **q-plans** over a geometric grid of *reaches*, and for each its
own **a-plans** over the same kind of grid, all inside q's lattice. A reach is B / E: the risk budget over the exposure
of the microbatch. The problem's `exposures` are relative ones (the unit's exposure over the microbatch's), its
`risk_budget` is not read. Without any variant that has risk one q-plan with one a-plan is left.

    frontier = first_frontier(problem)        # greedy, in milliseconds; Infeasible if no plan is known to fit
    frontier = refine(frontier, limits)       # refine.py: the programme, off the critical path
    row = frontier.prepare(reach, ratios)     # before forward: row.plan is q
    plan = row.decide(reach)                  # after forward: a, by bisection
    plan = row.decide_in(row.problem.now(     # after forward, where more is known than one number
        risk_budget=..., exposures=..., budget_bytes=..., base_backward_bytes=...))

All of it is frozen data and made alike every time. Every plan was checked in plain Python when it was made.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Plan, Solver
from ds_hilore.planning.dual import Bound, Dual, risk_bounds
from ds_hilore.planning.greedy import lean_choice
from ds_hilore.planning.options import REPLAY, Option
from ds_hilore.planning.problem import (
    RISK_TOLERANCE,
    Infeasible,
    Problem,
    evaluate_picked,
    make_plan_of,
    pick,
)
from ds_hilore.planning.reaction import Places, react, steps_of
from ds_hilore.planning.rows import Rows
from ds_hilore.planning.ties import settle


@dataclass(frozen=True)
class Grid:
    """How many reaches above 0 have a q-plan, and how many a-plans each q-plan has beside all and nothing."""

    prepared: int
    decided: int


#: What fits the milliseconds of a first answer, and what the programme is given.
FIRST_GRID = Grid(prepared=2, decided=5)
FULL_GRID = Grid(prepared=5, decided=12)


@dataclass(frozen=True)
class Prepared:
    """One q-plan and the a-plans that it can still become.

    Args:
        reach: B / E it was planned for.
        plan: q. Its seconds count encoding; its bound holds for any q-plan at `reach`.
        problem: the second problem, from q under relative exposures.
        points: a-plans, ascending in risk (at E = 1) and in saved seconds, the first without risk. Encoding is sunk.
            The bound of each holds for any a-plan from q of at most its risk.
        places: the same points as places of `problem.options`.
        prepare_seconds: what encoding costs in forward.
    """

    reach: float
    plan: Plan
    problem: Problem
    points: tuple[Plan, ...]
    places: tuple[Places, ...]
    prepare_seconds: float

    def decide(self, reach: float) -> Plan:
        """Gives the best a-plan known for a true B / E of `reach`, where one number scales all exposures.

        It takes less than 2 us. What does not compare (NaN) or is below every risk gives the exact plan.
        """
        return self.points[self._place(reach)]

    def decide_in(self, problem: Problem) -> Plan | Infeasible:
        """Gives an a-plan for true exposures and bytes; `problem` comes from `self.problem.now(...)`.

        Infeasible only where the bytes have changed and even replaying everything does not fit.

        Raises:
            UsageError: the problem is not about what this q-plan prepared.
        """
        mine = self.problem
        same = problem.units is mine.units or problem.units == mine.units
        if not same or (problem.prepared is not mine.prepared and problem.prepared != mine.prepared):
            raise UsageError("this problem is about another q-plan; make it from `prepared.problem.now(...)`")
        return react(problem, self.places, self._steps)

    def worth(self, reach: float) -> float:
        """Seconds that preparing q saves if the true B / E is `reach`: those of its a-plan less encoding."""
        return self._seconds[self._place(reach)] - self.prepare_seconds

    @property
    def breakpoints(self) -> tuple[tuple[float, float], ...]:
        """(risk cost at E = 1, seconds) of its a-plans, for the price of risk (price.py)."""
        power = 1 if self.problem.linear_risk else 2
        return tuple((point.risk**power, point.saved_seconds) for point in self.points)

    def _place(self, reach: float) -> int:
        if not reach > 0:
            return 0
        # a quarter: the root of a cost at the limit, and its square again, must stay inside the row's tolerance
        return max(0, bisect_right(self._risks, reach * (1 + RISK_TOLERANCE / 4)) - 1)

    @cached_property
    def _steps(self) -> tuple[tuple[int, int], ...]:
        return steps_of(self.places)

    @cached_property
    def _risks(self) -> tuple[float, ...]:
        return tuple(point.risk for point in self.points)

    @cached_property
    def _seconds(self) -> tuple[float, ...]:
        return tuple(point.saved_seconds for point in self.points)


@dataclass(frozen=True)
class Frontier:
    """All plans of one problem; `rows` ascend in reach."""

    problem: Problem
    rows: tuple[Prepared, ...]

    def prepare(self, reach: float, ratios: Sequence[float] = (1.0,)) -> Prepared:
        """Gives the q-plan that is expected to save most under a predicted B / E of `reach`.

        Args:
            ratios: equally likely values of true over predicted exposure (`ExposureMargin.ratios()`). Where the truth
                may be calmer, more is prepared than the prediction affords; decide() replays what was too much.
        """
        if len(self.rows) == 1:
            return self.rows[0]
        reaches = [reach / ratio if ratio > 0 else math.inf for ratio in ratios]
        # equal worth: the q-plan of less risk, which is the first
        return max(self.rows, key=lambda row: math.fsum(row.worth(reach) for reach in reaches))

    @cached_property
    def breakpoints(self) -> tuple[tuple[float, float], ...]:
        """(risk cost at E = 1, seconds) of all plans, encoding counted: what the price of risk reads (price.py).
        The cost is r^2, or r in paper mode."""
        return tuple((cost, seconds - row.prepare_seconds) for row in self.rows for cost, seconds in row.breakpoints)


def gap(plan: Plan) -> float:
    """By how much of itself another plan could save more at most: bound / saved - 1. Infinite without a bound."""
    if plan.bound_seconds is None:
        return math.inf
    missing = plan.bound_seconds - plan.saved_seconds
    if missing <= 0:
        return 0.0
    return missing / plan.saved_seconds if plan.saved_seconds > 0 else math.inf


def first_frontier(problem: Problem, grid: Grid = FIRST_GRID) -> Frontier | Infeasible:
    """Gives a frontier at once: every plan from prices (dual.py) and greedy steps, with the bound of those prices.

    Raises:
        UsageError: `problem` is one after forward, or a unit may only be approximate.
    """
    if problem.prepared is not None:
        raise UsageError("a frontier is made for the problem before forward")
    for unit, options in zip(problem.units, problem.options):
        if any(option.risk_cost for option in options) and all(option.name != REPLAY for option in options):
            raise UsageError(f"unit {unit.unit} has approximate variants and may not be replayed; allow {REPLAY!r}")
    plans = first_plans(problem, grid.prepared)
    if isinstance(plans, Infeasible):
        return plans
    return assemble(problem, plans, grid.decided)


def first_plans(problem: Problem, count: int) -> dict[float, Plan] | Infeasible:
    """Gives q-plans by reach, ascending: the exact one, and up to `count` from where units begin to be compressed to
    where risk binds no more. A reach at which none is known to fit is left out."""
    power = 1.0 if problem.linear_risk else 0.5
    costs = [[o.risk_cost for o in options if 0 < o.risk_cost < math.inf] for options in problem.options]
    costs = [each for each in costs if each]
    dual = Dual(problem)
    exact = _first_plan(problem.now(risk_budget=0.0), dual, None)
    plans = {} if isinstance(exact, Infeasible) else {0.0: exact}
    if costs:
        everything = problem.now(risk_budget=math.fsum(max(each) for each in costs) ** power)
        boldest = _first_plan(everything, dual, plans.get(0.0))
        if isinstance(boldest, Plan) and boldest.risk > 0:
            low = min(min(each) for each in costs) ** power
            for reach in between(low, boldest.risk, count + 1)[1:-1]:
                before = next(reversed(plans.values()), None)
                plan = _first_plan(problem.now(risk_budget=reach), dual, before)
                if isinstance(plan, Plan):
                    plans[reach] = plan
            plans[boldest.risk] = boldest
    if plans:
        return plans
    assert isinstance(exact, Infeasible)
    return exact


def _first_plan(problem: Problem, dual: Dual, before: Plan | None) -> Plan | Infeasible:
    """The best of two climbs from what units choose at the best prices, and of the plan of less risk."""
    bound = dual.bound(problem.risk_limit)
    start = _start(problem, dual, bound)
    if isinstance(start, Infeasible):
        return start
    found = [] if before is None else [pick(problem, before.choice)]
    for tilt in _TILTS:
        found.append(climb(problem, start, bound._replace(per_risk=tilt * bound.per_risk)))
        if _seconds(found[-1]) * (1 + _CLOSE) >= bound.seconds:
            break
    best = max(found, key=_seconds)
    choice = {unit.unit: option.name for unit, option in zip(problem.units, best)}
    settled = pick(problem, settle(problem, choice))
    return make_plan_of(problem, settled, Solver.GREEDY, bound.seconds)


def _seconds(picked: Sequence[Option]) -> float:
    return math.fsum([option.seconds for option in picked])


def _start(problem: Problem, dual: Dual, bound: Bound) -> list[Option] | Infeasible:
    """What units choose at the lowest prices at which that fits, or a lean plan."""
    for dearer in _DEARER:
        places = dual.choose(bound, problem.risk_limit, dearer)
        chosen = [options[place] for options, place in zip(problem.options, places)]
        if evaluate_picked(problem, chosen).feasible:
            return chosen
    lean = lean_choice(problem)
    return lean if isinstance(lean, Infeasible) else pick(problem, lean)


def climb(problem: Problem, start: Sequence[Option], bound: Bound) -> list[Option]:
    """Takes steps that fit, those first that gain most for their bytes and risk at these prices, until none is left."""
    rows = Rows(problem, start)
    moved = {-1}
    while moved:
        moved = set()
        for _, minus_position, place in sorted(_steps(problem, rows, bound)):
            # what a unit gains from its next option is counted anew in the next pass
            if minus_position not in moved and rows.fits(-minus_position, problem.options[-minus_position][place]):
                rows.put(-minus_position, problem.options[-minus_position][place])
                moved.add(minus_position)
    return rows.picked


def _steps(problem: Problem, rows: Rows, bound: Bound) -> list[tuple[float, int, int]]:
    """(minus density, minus position, place of the option) of steps that may fit."""
    room, risk_left = rows.loss_left, rows.risk_left
    steps = []
    for position, (now, options) in enumerate(zip(rows.picked, problem.options)):
        for place, option in enumerate(options):
            gain = option.seconds - now.seconds
            grown = option.held_bytes - now.held_bytes
            risk = option.risk_cost - now.risk_cost
            if gain > 0 and grown <= room and risk <= max(0.0, risk_left):
                price = bound.per_byte * max(0, grown) + bound.per_risk * max(0.0, risk)
                steps.append((-gain / (price + _FREE), -position, place))
    return steps


#: Factors above the best prices at which what units choose may fit.
_DEARER = (1.002, 1.02, 1.2)
#: Equal units are indifferent between more bytes and more risk at the best prices: risk is used up first, or bytes.
_TILTS = (0.97, 1.03)
#: A climb this near to the bound is not tried again.
_CLOSE = 0.005
#: Keeps densities finite for steps that cost nothing: they come first, in order of gain.
_FREE = 1e-15


def assemble(problem: Problem, plans: dict[float, Plan], decided: int) -> Frontier:
    """Makes the rows of q-plans by reach, with greedy a-plans; a q-plan that comes twice is kept once."""
    rows: list[Prepared] = []
    for reach, plan in plans.items():
        if not any(row.plan.choice == plan.choice for row in rows):
            second = problem.after_forward(plan.choice)
            rows.append(row_of(reach, plan, second, first_points(second, decided)))
    return Frontier(problem, tuple(rows))


def first_points(problem: Problem, decided: int) -> list[tuple[Plan, list[Option]]]:
    """Gives greedy a-plans of `problem`, one after forward, for no risk and up to `decided` risk budgets, ascending."""
    assert problem.prepared is not None
    prepared = pick(problem, problem.prepared)
    found = [(problem.now(risk_budget=limit), p) for limit, p in _bolder_and_bolder(problem, prepared, decided)]
    bounds = risk_bounds(problem, [here.risk_limit for here, _ in found])
    return [(make_plan_of(here, p, Solver.GREEDY, bound), p) for (here, p), bound in zip(found, bounds)]


def row_of(reach: float, plan: Plan, problem: Problem, points: Sequence[tuple[Plan, list[Option]]]) -> Prepared:
    """Keeps those of `points` (ascending in risk budget) that save more than every one of less risk."""
    kept: list[tuple[Plan, Places]] = []
    for point, picked in sorted(points, key=lambda found: (found[0].risk, -found[0].saved_seconds)):
        if not kept or point.saved_seconds > kept[-1][0].saved_seconds:
            places = [options.index(option) for options, option in zip(problem.options, picked)]
            kept.append((point, tuple(places)))
    return Prepared(
        reach,
        plan,
        problem,
        points=tuple(point for point, _ in kept),
        places=tuple(places for _, places in kept),
        prepare_seconds=math.fsum(unit.variant(plan.choice[unit.unit]).prepare_seconds for unit in problem.units),
    )


def _bolder_and_bolder(problem: Problem, prepared: Sequence[Option], decided: int) -> list[tuple[float, list[Option]]]:
    """(risk budget, options) from nothing compressed to all that was prepared, densest in seconds per risk first."""
    replays = [next((o for o in options if o.name == REPLAY), None) for options in problem.options]
    calm = list(prepared)
    steps: list[tuple[float, int]] = []
    for position, (option, replay) in enumerate(zip(prepared, replays)):
        if option.risk_cost > 0:
            assert replay is not None  # first_frontier refuses units without it
            calm[position] = replay
            if option.seconds > replay.seconds:
                steps.append(((replay.seconds - option.seconds) / option.risk_cost, -position))
    steps.sort()
    power = 1.0 if problem.linear_risk else 0.5
    costs = [prepared[-position].risk_cost for _, position in steps]
    limits = [0.0]
    if costs:
        limits += between(min(costs) ** power, math.fsum(costs) ** power, decided)
    found = []
    for limit in limits:
        left = problem.now(risk_budget=limit).risk_limit * (1 + RISK_TOLERANCE / 2)
        picked = list(calm)
        for _, minus_position in steps:
            option = prepared[-minus_position]
            if option.risk_cost <= left:
                picked[-minus_position] = option
                left -= option.risk_cost
        found.append((limit, picked))
    return found


def between(low: float, high: float, count: int) -> list[float]:
    """`count` numbers in equal ratios, both ends among them; one where the ends are the same."""
    if count <= 1 or not high > low:
        return [high]
    return [low * (high / low) ** (step / (count - 1)) for step in range(count - 1)] + [high]
