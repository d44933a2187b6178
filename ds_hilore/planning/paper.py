"""The planner of `paper` mode, to compare with: three capture plans and a dynamic programme over intervals.

Before forward a q-plan is made for each of 0, 1/2 and 1 of the headroom, and one of them is captured. After forward a
dynamic programme over 1024 x 1024 intervals of memory and of *linear* risk says which units use what was captured.
Weights are rounded up, so each of its answers is feasible; of equal ones it takes that of smaller risk. A unit whose
measured risk slope is 0 may not be approximate: no slope is no proof of no error. Nothing is held on the host.

    frontier = paper_frontier(problem)        # Infeasible if no plan is known to fit
    row = frontier.prepare(reach, ratios)     # before forward: row.plan is q
    plan = row.decide(reach)                  # after forward; decide_in(problem) where more is known

which is how frontier.py is used, so a runtime can hold either. There a decision is a look-up; here it is solved, which
takes a tenth of a second and 50 MB of host memory for 36 units: part of what the comparison compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Place, Plan, Solver, UnitProfile, Variant
from ds_hilore.planning.dual import Bound
from ds_hilore.planning.frontier import climb
from ds_hilore.planning.greedy import lean_choice, repair
from ds_hilore.planning.options import REPLAY, Option
from ds_hilore.planning.problem import RISK_TOLERANCE, Infeasible, Problem, evaluate, make_plan_of, pick

#: Shares of the headroom that capture plans are made for.
HEADROOMS = (0.0, 0.5, 1.0)
#: Intervals of each axis of the dynamic programme.
INTERVALS = 1024


def capture_plans(problem: Problem) -> tuple[Plan, ...] | Infeasible:
    """Gives the q-plans for each of `HEADROOMS`, in that order; headroom is the budget less the peak of all-R.

    Starting from all-R, the change of any unit that saves most per byte is made as long as every row holds, the risk
    row with `problem.risk_budget` as the prediction among them: approximate variants, which are denser, as far as
    risk goes, and stored ones in the room that is left.

    Raises:
        UsageError: `problem` is one after forward, its risk is not linear, or a unit is left without any variant.
    """
    if problem.prepared is not None:
        raise UsageError("capture plans are made for the problem before forward")
    problem = _permitted(problem)
    lean = lean_choice(problem)
    if isinstance(lean, Infeasible):
        return lean
    lean_bytes = evaluate(problem, lean).peak_bytes
    plans = []
    for share in HEADROOMS:
        limited = problem.now(budget_bytes=lean_bytes + int(share * (problem.budget_bytes - lean_bytes)))
        plans.append(make_plan_of(limited, climb(limited, pick(limited, lean), _BYTES_ONLY), Solver.GREEDY))
    return tuple(plans)


def decide(problem: Problem, intervals: int = INTERVALS) -> Plan | Infeasible:
    """Gives the a-plan that saves most by weights rounded up to intervals; of equal ones that of smaller risk.

    It loses against the best plan at most what `len(units)` intervals of memory and of risk can save, and what it
    never does: compress what was stored where any such conversion might not fit. Where even rounding is too much, the
    answer is a plan that greedy finds.

    Args:
        problem: after forward (`Problem.after_forward`, `now`), with linear risk.
        intervals: of the headroom (the budget less what is held at least), and of the risk budget.

    Returns:
        A plan re-checked against every row. Infeasible where no plan is known to fit.

    Raises:
        UsageError: `problem` is one before forward, its risk is not linear, or a unit is left without any variant.
    """
    if problem.prepared is None:
        raise UsageError("the dynamic programme is for the problem after forward; make it with after_forward()")
    problem = _permitted(problem)
    convertible = _conversions_fit(problem)
    choices = [[option for option in options if convertible or not option.converts] for options in problem.options]
    picked = _solve(problem, choices, intervals)
    if picked is not None:
        return make_plan_of(problem, picked, Solver.DYNAMIC)
    calm = {unit.unit: _calm(unit, problem) for unit in problem.units}
    return repair(problem, Plan(choice=calm, solver=Solver.GREEDY))


@dataclass(frozen=True)
class PaperPrepared:
    """One capture plan, as `frontier.Prepared`: `decide`, `decide_in` and `worth` mean the same.

    Args:
        reach: predicted B / E that it was made for.
        plan: q. Its seconds count encoding.
        before: the problem before forward, under relative exposures.
        intervals: of the dynamic programme.
    """

    reach: float
    plan: Plan
    before: Problem
    intervals: int = INTERVALS

    @cached_property
    def problem(self) -> Problem:
        """The second problem, from q under relative exposures."""
        return self.before.after_forward(self.plan.choice)

    def decide(self, reach: float) -> Plan:
        """Solves for a true B / E of `reach`, where one number scales all exposures. NaN gives the exact plan."""
        decided = decide(_reaching(self.problem, reach), self.intervals)
        # q is made such that replaying all that is approximate fits
        assert isinstance(decided, Plan)
        return decided

    def decide_in(self, problem: Problem) -> Plan | Infeasible:
        """Solves for true exposures and bytes; `problem` comes from `self.problem.now(...)`.

        Infeasible only where the bytes have changed and even replaying everything does not fit.

        Raises:
            UsageError: the problem is not about what this q-plan prepared.
        """
        if problem.units != self.problem.units or problem.prepared != self.problem.prepared:
            raise UsageError("this problem is about another q-plan; make it from `prepared.problem.now(...)`")
        return decide(problem, self.intervals)

    def worth(self, reach: float) -> float:
        """Seconds that preparing q saves at least if the true B / E is `reach`: an estimate that solves nothing.

        What was captured is used, approximate units in the order of seconds per risk as far as `reach` allows.
        """
        exact, approximate = self._gains
        left = reach * (1 + RISK_TOLERANCE)
        used = []
        for seconds, cost in approximate:
            if cost <= left:
                used.append(seconds)
                left -= cost
        return exact - self.prepare_seconds + math.fsum(used)

    @cached_property
    def prepare_seconds(self) -> float:
        """What encoding costs in forward."""
        return math.fsum(variant.prepare_seconds for variant, _ in self._captured())

    @cached_property
    def _gains(self) -> tuple[float, list[tuple[float, float]]]:
        """Seconds of what is exact; (seconds, risk cost at E = 1) of what is not, densest first."""
        exact, approximate = [], []
        for variant, cost in self._captured():
            if cost == 0:
                exact.append(variant.saved_seconds)
            elif variant.saved_seconds > 0:
                approximate.append((variant.saved_seconds, cost))
        return math.fsum(exact), sorted(approximate, key=lambda gain: gain[1] / gain[0])

    def _captured(self) -> Iterator[tuple[Variant, float]]:
        """Each unit's variant in q and its risk cost."""
        for unit, option in zip(self.before.units, pick(self.before, self.plan.choice)):
            yield unit.variant(option.name), option.risk_cost


@dataclass(frozen=True)
class PaperFrontier:
    """All that `paper` mode answers for one problem, as `frontier.Frontier`; nothing is solved ahead."""

    problem: Problem
    intervals: int = INTERVALS

    def prepare(self, reach: float, ratios: Sequence[float] = (1.0,)) -> PaperPrepared:
        """Gives the capture plan for a predicted B / E of `reach` that is expected to save most, the leaner of equals.

        Args:
            ratios: equally likely values of true over predicted exposure.
        """
        plans = capture_plans(_reaching(self.problem, reach))
        assert not isinstance(plans, Infeasible)  # paper_frontier has seen that all-R fits
        reaches = [reach / ratio if ratio > 0 else math.inf for ratio in ratios]
        rows = [PaperPrepared(reach, plan, self.problem, self.intervals) for plan in plans]
        return max(rows, key=lambda row: math.fsum(row.worth(each) for each in reaches))


def paper_frontier(problem: Problem, intervals: int = INTERVALS) -> PaperFrontier | Infeasible:
    """Gives the planner of `problem`, one before forward whose `exposures` are relative and whose `risk_budget` is not
    read.

    Raises:
        UsageError: as `capture_plans`, or a unit may only be approximate.
    """
    exact = problem.now(risk_budget=0.0)
    plans = capture_plans(exact)
    if isinstance(plans, Infeasible):
        return plans
    for unit, options in zip(problem.units, problem.options):
        if any(option.risk_cost for option in options) and all(option.name != REPLAY for option in options):
            raise UsageError(f"unit {unit.unit} has approximate variants and may not be replayed; allow {REPLAY!r}")
    return PaperFrontier(exact, intervals)


#: A step is worth its seconds per byte; risk is a row and has no price.
_BYTES_ONLY = Bound(math.inf, per_byte=1.0, per_risk=0.0)


def _permitted(problem: Problem) -> Problem:
    """The problem without what the paper's planner may not choose."""
    if not problem.linear_risk:
        raise UsageError("the paper's planner adds risk up as it is; make the problem with linear_risk=True")
    allowed = dict(problem.allowed)
    for unit in problem.units:
        names = allowed.get(unit.unit, tuple(variant.name for variant in unit.variants))
        kept = tuple(name for name in names if _may_be_chosen(unit.variant(name)))
        if kept != names:
            if not kept:
                raise UsageError(
                    f"unit {unit.unit} may only be {list(names)}, none of which the paper's planner may choose (on the "
                    f"host, or approximate without a measured risk); allow {REPLAY!r}"
                )
            allowed[unit.unit] = kept
    return problem if allowed == problem.allowed else replace(problem, allowed=allowed)


def _may_be_chosen(variant: Variant) -> bool:
    return variant.place is Place.DEVICE and not (variant.action is Action.COMPRESS and variant.risk == 0)


def _reaching(problem: Problem, reach: float) -> Problem:
    """The problem at B / E = `reach`, of which no more counts than all risks together."""
    costs = [option.risk_cost for options in problem.options for option in options if option.risk_cost < math.inf]
    return problem.now(risk_budget=min(reach, math.fsum(costs)) if reach > 0 else 0.0)


def _conversions_fit(problem: Problem) -> bool:
    """Whether what was stored can be compressed whatever the other units do (row M4)."""
    most = sum(max(option.converting_bytes for option in options) for options in problem.options)
    return problem.base_backward_bytes + most + problem.conversion_bytes <= problem.budget_bytes


def _calm(unit: UnitProfile, problem: Problem) -> str:
    """What was prepared where that is exact, else R."""
    assert problem.prepared is not None
    prepared = unit.variant(problem.prepared.get(unit.unit, REPLAY))
    return REPLAY if prepared.action is Action.COMPRESS else prepared.name


# The dynamic programme. Units are taken in forward order; the state is (intervals of memory, intervals of risk) used
# so far, and its value the best that leads there. Memory counts from what units hold at least, so backward row M3 at a
# unit bounds the intervals used by those before it. M (memory) and R (risk) are the axes, intervals + 1 long.
# A value is one integer, (ticks of seconds << 32) - ticks of risk: sums are exact, equal plans are equal in whatever
# order they are added up, and of equal seconds the smaller risk is larger.

_Values = NDArray[np.int64]
#: Ticks of the seconds of all units together: finer than any clock, and no sum leaves 61 bits.
_SECOND_TICKS = 1 << 28
_RISK_TICKS = 1 << 31
#: No plan leads there; it stays below every value that one leads to, whatever is added.
_NOWHERE = -(1 << 62)
_REACHED = -(1 << 61)


class _Step(NamedTuple):
    """One option of one unit on the grid: its intervals of both axes, the most that units before it may have used,
    and what it adds to the value."""

    option: Option
    memory: int
    risk: int
    room: int
    value: int


def _solve(problem: Problem, choices: Sequence[Sequence[Option]], intervals: int) -> list[Option] | None:
    """The best options by rounded weights, one a unit, or None where none fit."""
    if not all(choices):
        return None
    stages = list(_stages(problem, choices, intervals))
    values_MR = np.full((intervals + 1, intervals + 1), _NOWHERE, dtype=np.int64)
    values_MR[0, 0] = 0
    taken: list[NDArray[np.uint8]] = []
    corner = (0, 0)  # the furthest state that anything leads to
    for steps in stages:
        values_MR, which_MR, corner = _advance(values_MR, steps, corner)
        taken.append(which_MR)
    memory, risk = np.unravel_index(int(values_MR.argmax()), values_MR.shape)  # the leanest of equals
    if values_MR[memory, risk] < _REACHED:
        return None
    picked: list[Option] = []
    for steps, which_MR in zip(reversed(stages), reversed(taken)):
        step = steps[which_MR[memory, risk]]
        picked.append(step.option)
        memory, risk = memory - step.memory, risk - step.risk
    return picked[::-1]


def _advance(
    before_MR: _Values, steps: Sequence[_Step], corner: tuple[int, int]
) -> tuple[_Values, NDArray[np.uint8], tuple[int, int]]:
    """Values after one more unit, the place of the step that led to each, and how far they go now."""
    last = len(before_MR) - 1
    far = [(min(corner[0], step.room, last - step.memory), min(corner[1], last - step.risk)) for step in steps]
    reached = [(m + step.memory, r + step.risk) for step, (m, r) in zip(steps, far) if m >= 0 and r >= 0]
    corner = (max((m for m, _ in reached), default=0), max((r for _, r in reached), default=0))
    after_MR = np.full_like(before_MR, _NOWHERE)
    which_MR = np.zeros((corner[0] + 1, corner[1] + 1), dtype=np.uint8)
    for place, (step, (m, r)) in enumerate(zip(steps, far)):
        if m < 0 or r < 0:
            continue
        to = (slice(step.memory, step.memory + m + 1), slice(step.risk, step.risk + r + 1))
        candidate = before_MR[: m + 1, : r + 1] + step.value
        better = candidate > after_MR[to]
        np.copyto(after_MR[to], candidate, where=better)
        np.copyto(which_MR[to], np.uint8(place), where=better)
    return after_MR, which_MR, corner


def _stages(problem: Problem, choices: Sequence[Sequence[Option]], intervals: int) -> Iterator[list[_Step]]:
    """Each unit's options as steps on the grid."""
    least = [min(option.backward_held_bytes for option in options) for options in choices]
    # free before each unit's own bytes, if the units before it hold the least they can
    left = problem.budget_bytes - problem.base_backward_bytes - sum(unit.grad_bytes for unit in problem.units)
    free = []
    for unit, held in zip(problem.units, least):
        free.append(left)
        left += unit.grad_bytes - held
    # the last row bounds all that units hold above the least; the last unit's own bytes are in no other row
    headroom = max(0, free[-1] - min(option.own_backward_bytes for option in choices[-1]))
    per_second = _SECOND_TICKS / (math.fsum(max(abs(o.seconds) for o in options) for options in choices) or 1.0)
    limit = problem.risk_limit
    for position, (options, held, room) in enumerate(zip(choices, least, free)):
        holds_on = position < len(choices) - 1
        yield [
            _Step(
                option,
                memory=_up(option.backward_held_bytes - held, headroom, intervals) if holds_on else 0,
                risk=math.ceil(_share(option, limit) * intervals),
                room=_down(room - option.own_backward_bytes, headroom, intervals),
                value=(round(option.seconds * per_second) << 32) - round(_share(option, limit) * _RISK_TICKS),
            )
            for option in options
            if option.risk_cost <= limit
        ]


def _up(amount: int, whole: int, intervals: int) -> int:
    """Intervals of `whole` that `amount` takes, rounded up; more than there are where it does not fit."""
    if amount <= 0:
        return 0
    return intervals + 1 if amount > whole else -(-amount * intervals // whole)


def _down(amount: int, whole: int, intervals: int) -> int:
    """Intervals of `whole` that surely fit into `amount`; below 0 where not even none do."""
    if amount < 0:
        return -1
    return intervals if amount >= whole else amount * intervals // whole


def _share(option: Option, limit: float) -> float:
    """Of the risk budget."""
    return option.risk_cost / limit if option.risk_cost else 0.0
