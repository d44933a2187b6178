"""The exact 0/1 programme, stated in PuLP and solved by HiGHS in process or by CBC. The only file that knows PuLP.

Never on the critical path: use `BackgroundPlanner`. Whatever a solver answers is judged in plain Python; an answer
that is late, wrong or missing is replaced by the greedy plan, and `Plan.solver` says who made what is returned.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

import pulp

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Plan, Solver, UnitId
from ds_hilore.planning.greedy import greedy, repair
from ds_hilore.planning.options import Option
from ds_hilore.planning.problem import RISK_TOLERANCE, Infeasible, Problem, evaluate, make_plan
from ds_hilore.planning.symmetry import Group, Reduced, reduce_problem
from ds_hilore.planning.ties import late_rank, settle, tie_key

_Number = TypeVar("_Number", int, float)
_log = logging.getLogger(__name__)

#: How far a row or an integer may be off in a solver's answer; the default of 1e-6 is megabytes of a device.
_TOLERANCE = 1e-9
#: Memory rows are scaled to numbers below this: the tolerance is then under a byte of what a unit holds.
_LARGEST = 1 << 20


@dataclass(frozen=True)
class SolverLimits:
    """How long the programme may run, how near to the optimum it may stop, and who solves it first.

    `relative_gap`: of the best bound; 0 asks for a proven optimum.
    """

    time_limit_s: float = 10.0
    relative_gap: float = 0.01
    solver: Literal["highs", "cbc"] = "highs"

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s < math.inf:
            raise UsageError(f"time_limit_s must be finite and above 0, got {self.time_limit_s}")
        if not 0 <= self.relative_gap < 1:
            raise UsageError(f"relative_gap must be in [0, 1), got {self.relative_gap}")
        if self.solver not in ("highs", "cbc"):
            raise UsageError(f"solver must be 'highs' or 'cbc', got {self.solver!r}")


@dataclass(frozen=True)
class _Answer:
    """What a solver said. `choice` is None where it proved that there is none."""

    solver: Solver
    choice: Mapping[UnitId, str] | None
    bound_seconds: float | None


def solve(problem: Problem, limits: SolverLimits | None = None) -> Plan | Infeasible:
    """Gives the best plan found within `limits`, never worse than greedy's, settled by the tie rule.

    `bound_seconds` of the plan is proven by the solver, or None where it proved nothing. Does not raise for what a
    solver does: the other solver, then greedy, take over, with a warning in the log.
    """
    limits = limits or SolverLimits()
    fallback = greedy(problem)
    answer = _ask(problem, limits, something_fits=isinstance(fallback, Plan))
    if answer is None or answer.choice is None:
        return fallback
    plan = _judged(problem, answer.solver, answer.choice, answer.bound_seconds)
    if isinstance(plan, Infeasible):
        return fallback
    if isinstance(fallback, Plan) and tie_key(problem, fallback.choice) < tie_key(problem, plan.choice):
        bound = plan.bound_seconds
        disproven = bound is not None and bound < fallback.saved_seconds
        return replace(fallback, bound_seconds=None if disproven else bound)
    return plan


def _judged(
    problem: Problem, solver: Solver, choice: Mapping[UnitId, str], bound_seconds: float | None
) -> Plan | Infeasible:
    """The answer as a plan that holds; a wrong answer is repaired, is no longer the solver's, and proves nothing."""
    evaluation = evaluate(problem, choice)
    if evaluation.feasible:
        return make_plan(problem, settle(problem, choice), solver, bound_seconds)
    wrong = evaluation.violations[0].message
    _log.warning("%s returned a plan that does not hold (%s); repaired", solver.value, wrong)
    return repair(problem, Plan(choice=choice))


def _ask(problem: Problem, limits: SolverLimits, something_fits: bool) -> _Answer | None:
    """The first solver's answer, or the second's where the first breaks or denies what is known to fit."""
    solvers = [Solver.HIGHS, Solver.CBC] if limits.solver == "highs" else [Solver.CBC, Solver.HIGHS]
    for solver in solvers:
        try:
            answer = _Programme(problem).solve(solver, limits)  # anew: no value of a broken run survives
        except Exception as error:  # a broken solver must not cost the job more than its plan
            _log.warning("%s failed: %s: %s", solver.value, type(error).__name__, error)
            continue
        if answer is not None and answer.choice is None and something_fits:
            _log.warning("%s says that no plan fits, but one is known", solver.value)
            continue
        return answer
    return None


class _Programme:
    """Counts of options per group, under the rows that can bind (symmetry.py)."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._reduced = reduce_problem(problem)
        self._model = pulp.LpProblem("plan", pulp.LpMaximize)
        seconds = [abs(option.seconds) for group in self._reduced.groups for option in group.options]
        self._seconds_scale = max(seconds) or 1.0
        self._counts = _add_one_option_per_unit(self._model, self._reduced, problem)
        _add_memory_rows(self._model, self._reduced, self._counts)
        _add_conversion_row(self._model, self._reduced, self._counts, problem)
        _add_risk_row(self._model, self._reduced, self._counts, problem)
        _add_order_of_chains(self._model, self._reduced, self._counts)
        _set_objective(self._model, self._reduced, self._counts, self._seconds_scale)

    def solve(self, solver: Solver, limits: SolverLimits) -> _Answer | None:
        """Runs one solver. None if it found no plan in time.

        Raises:
            Exception: whatever PuLP or the solver raises.
        """
        run = _run_highs if solver is Solver.HIGHS else _run_cbc
        bound = run(self._model, limits)
        if self._model.status == pulp.LpStatusInfeasible:
            return _Answer(solver, None, None)
        choice = self._choice() if self._model.status == pulp.LpStatusOptimal else None
        if choice is None:
            return None
        return _Answer(solver, choice, None if bound is None else bound * self._seconds_scale)

    def _choice(self) -> dict[UnitId, str] | None:
        """Counts as variants of units, more held bytes later; None if the counts are not those of the groups."""
        choice: dict[UnitId, str] = {}
        for group, counts in zip(self._reduced.groups, self._counts):
            picked: list[Option] = []
            for option, count in zip(group.options, counts):
                picked += [option] * round(pulp.value(count) or 0)
            if len(picked) != group.size:
                return None
            for position, option in zip(group.positions, sorted(picked, key=late_rank)):
                choice[self._problem.units[position].unit] = option.name
        return choice


_Counts = list[list[pulp.LpVariable]]


def _count(model: pulp.LpProblem, name: str, most: int) -> pulp.LpVariable:
    # PuLP 3.3 deprecates calling the class, and releases before it have no method
    make = getattr(model, "add_variable", pulp.LpVariable)
    return make(name, 0, most, pulp.LpInteger)


def _add_one_option_per_unit(model: pulp.LpProblem, reduced: Reduced, problem: Problem) -> _Counts:
    limit = problem.risk_limit * (1 + RISK_TOLERANCE)
    counts: _Counts = []
    for g, group in enumerate(reduced.groups):
        row = []
        for k, option in enumerate(group.options):
            most = group.size if option.risk_cost <= limit else 0
            row.append(_count(model, f"n_{g}_{k}", most))
        model += pulp.lpSum(row) == group.size
        counts.append(row)
    return counts


class _RowScale:
    """Byte counts as smaller numbers without rounding: their common divisor goes first, then powers of two.

    A row that holds with equality must still hold in the solver's arithmetic, and in the 12 digits of CBC's file.
    """

    def __init__(self, byte_counts: list[int]) -> None:
        self._divisor = math.gcd(*byte_counts) or 1
        largest = max(byte_counts, default=0) // self._divisor
        self._shift = 2.0 ** -max(0, largest.bit_length() - _LARGEST.bit_length() + 1)

    def of(self, byte_count: int) -> float:
        return (byte_count // self._divisor) * self._shift

    def limit(self, limit_bytes: int) -> float:
        """The right side: sums on the left are multiples of the divisor, so it may be rounded down to one."""
        return self.of(limit_bytes)


def _add_memory_rows(model: pulp.LpProblem, reduced: Reduced, counts: _Counts) -> None:
    for row in reduced.rows:
        columns = [row.coefficients[group.positions[0]] for group in reduced.groups]
        scale = _RowScale([value for column in columns for value in column])
        model += _weighted(counts, columns, scale.of) <= scale.limit(row.limit_bytes)


def _add_conversion_row(model: pulp.LpProblem, reduced: Reduced, counts: _Counts, problem: Problem) -> None:
    """M4, with a 0/1 variable that is 1 if any unit is converted; without conversion M3 of the last unit implies it."""
    converting = [
        (count, group)
        for group, row in zip(reduced.groups, counts)
        for option, count in zip(group.options, row)
        if option.converts
    ]
    if not converting:
        return
    any_converts = _count(model, "converts", 1)
    for count, group in converting:
        model += count <= group.size * any_converts
    columns = [tuple(option.converting_bytes for option in group.options) for group in reduced.groups]
    scale = _RowScale([problem.conversion_bytes, *(value for column in columns for value in column)])
    held = _weighted(counts, columns, scale.of)
    limit = problem.budget_bytes - problem.base_backward_bytes
    model += held + scale.of(problem.conversion_bytes) * any_converts <= scale.limit(limit)


def _add_risk_row(model: pulp.LpProblem, reduced: Reduced, counts: _Counts, problem: Problem) -> None:
    limit = problem.risk_limit
    columns = [tuple(option.risk_cost for option in group.options) for group in reduced.groups]
    if limit > 0 and any(cost for column in columns for cost in column):
        # what is above the limit by itself is fixed to 0, and an infinite coefficient would spoil the row
        model += _weighted(counts, columns, lambda cost: cost / limit if cost <= 2 * limit else 0.0) <= 1.0


def _add_order_of_chains(model: pulp.LpProblem, reduced: Reduced, counts: _Counts) -> None:
    """The share of a group that has at least a given rank does not fall along a chain."""
    by_group = dict(zip(reduced.groups, counts))
    for chain in reduced.chains:
        options = chain[0].options
        ranked = sorted(range(len(options)), key=lambda place: late_rank(options[place]))
        for early, late in pairwise(chain):
            for start in range(1, len(ranked)):
                model += _at_least(by_group[early], ranked[start:], late) <= _at_least(
                    by_group[late], ranked[start:], early
                )


def _at_least(row: list[pulp.LpVariable], places: list[int], other: Group) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression([(row[place], other.size) for place in places])


def _set_objective(model: pulp.LpProblem, reduced: Reduced, counts: _Counts, seconds_scale: float) -> None:
    seconds = [tuple(option.seconds for option in group.options) for group in reduced.groups]
    model.setObjective(_weighted(counts, seconds, lambda value: value / seconds_scale))


def _weighted(
    counts: _Counts, columns: Sequence[Sequence[_Number]], scaled: Callable[[_Number], float]
) -> pulp.LpAffineExpression:
    terms = [(n, scaled(value)) for row, column in zip(counts, columns) for n, value in zip(row, column) if value]
    return pulp.LpAffineExpression(terms)


class QuietHiGHS(pulp.HiGHS):
    """PuLP's HiGHS without the banner: highspy's own class prints one while it sets up callbacks, whatever is asked.

    The class below it has the same methods and prints nothing.
    """

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        import highspy

        lp.solverModel = highspy.Highs.__base__()
        options = {
            "output_flag": False,
            "threads": 1,
            "time_limit": float(self.timeLimit),
            "mip_rel_gap": float(self.gapRel),
            "mip_abs_gap": 0.0,
            "mip_feasibility_tolerance": _TOLERANCE,
            "primal_feasibility_tolerance": _TOLERANCE,
        }
        for name, value in options.items():
            lp.solverModel.setOptionValue(name, value)


def _run_highs(model: pulp.LpProblem, limits: SolverLimits) -> float | None:
    """Solves in this process, without files, silently, on one thread; gives the bound on the scaled objective."""
    model.solve(QuietHiGHS(timeLimit=limits.time_limit_s, gapRel=limits.relative_gap))
    bound = -float(model.solverModel.getInfo().mip_dual_bound)
    return bound if math.isfinite(bound) else None


def _run_cbc(model: pulp.LpProblem, limits: SolverLimits) -> float | None:
    """Solves in a child process that talks through files in a private directory, removed afterwards.

    CBC runs on one thread unless it is told a number; told "1" it starts its thread machinery, which takes twice the
    time and stops now and then with "time limit" after a few milliseconds. Its integer preprocessing is off: with it,
    1 of 800 small random problems came back "optimal" with a plan that was not (2.10.3, which PuLP 3.3 ships).
    """
    solver = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,  # the one that PuLP ships
        msg=False,
        timeLimit=limits.time_limit_s,
        gapRel=limits.relative_gap,
        gapAbs=0.0,
        options=["preprocess off"],
    )
    with tempfile.TemporaryDirectory(prefix="hilore-cbc-") as private:
        solver.tmpDir = private
        model.solve(solver)
    if model.status != pulp.LpStatusOptimal or model.sol_status != pulp.LpSolutionOptimal:
        return None
    # CBC stops once (bound - value) < gap * bound; an objective without terms has no value
    value = float(pulp.value(model.objective) or 0.0)
    return value + abs(value) * limits.relative_gap / (1.0 - limits.relative_gap)
