"""The planning problem in plain data, and the one function that judges every plan (design section 4).

Two problems share this form. *Before forward* (`prepared` is None) a representation q is chosen: encoding is charged,
and the forward, loss and backward rows hold. *After forward* (`prepared` is q) an action a inside q's lattice is
chosen: encoding is charged only where stored state is converted, forward and loss are over, the backward rows hold,
and the conversion row does if anything is converted.

# NOTE [Memory rows] for units 1..U in forward order, all against `budget_bytes`:
#   M1 forward at u    base_forward + sum_{v<=u} held[v] + forward_bytes[u]
#   M2 loss            base_loss + sum_v held[v]
#   M3 backward at u   base_backward + sum_{v<=u} held[v] + workspace_bytes[u] + sum_{v>=u} grad_bytes[v]
#   M4 conversion      base_backward + sum_v held_converting[v] + conversion_bytes, if any unit is converted
#   M5 host            sum_v host held[v], against `host_budget_bytes`
# With n microbatches in flight (stages of a pipeline) M1 to M3 hold (n - 1) * sum_v held[v] more: what the others keep
# under the same plan, between their forward and their backward. After forward that is part of the base.
# M3: design's workspace[u, a] contains the unit's own state; `Variant.workspace_bytes` is what comes on top of the
# unit's held bytes, so the sum runs to u itself.
# M4: what is only dropped goes first, then one tensor after another is converted; so held_converting is the prepared
# variant's bytes for a unit that keeps or converts, the new variant's for one that drops.
# Before forward, M3 charges a COMPRESS variant the worse of itself and R: risk may force it to be replayed once the
# true coefficients are known, and that plan must fit as well. Nothing can force a STORE unit to be replayed, so R's
# workspace is not charged to it (reserving for *every* reachable plan would).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from ds_hilore.core.errors import PlanError
from ds_hilore.core.types import Plan, Solver, UnitId, UnitProfile
from ds_hilore.planning.options import REPLAY, Option, options_of, reweighted
from ds_hilore.planning.validation import validate_facts, validate_problem

#: Relative excess of the risk budget that is rounding, not risk: sums of floats against a fitted number.
RISK_TOLERANCE = 1e-6


class Row(str, Enum):
    """What may bind a plan; the first five count bytes (NOTE [Memory rows])."""

    FORWARD = "forward"  # M1
    LOSS = "loss"  # M2
    BACKWARD = "backward"  # M3
    CONVERSION = "conversion"  # M4
    HOST = "host"  # M5
    RISK = "risk"  # gradient error of all COMPRESS units together
    LATTICE = "lattice"  # a variant that the unit does not have or can no longer become


@dataclass(frozen=True)
class Problem:
    """Which variant should each unit of one microbatch on one rank get?

    Args:
        units: in forward order.
        budget_bytes: device bytes that no row may exceed.
        base_forward_bytes, base_backward_bytes: all that stays on the device meanwhile, units' state aside.
        base_loss_bytes: the same at the loss, its workspace (logits or chunks) included.
        conversion_bytes: transient of converting one tensor after forward.
        host_budget_bytes: host bytes for variants whose place is the host.
        in_flight: microbatches whose state is held at once, this one included.
        risk_budget: B, share of the update's gradient norm; 0 means exact actions only.
        linear_risk: sum r_u <= B (the paper's mode) instead of sum r_u^2 <= B^2.
        exposures: E_u by unit, >= 0, default 1; infinite means never approximate this unit.
        allowed: variant names that a unit may have; units that are not in it may have all of theirs.
        prepared: q by unit (missing units are R), or None before forward.

    Raises:
        UsageError: units, variants or numbers that make no problem.
    """

    units: tuple[UnitProfile, ...]
    budget_bytes: int
    base_forward_bytes: int = 0
    base_loss_bytes: int = 0
    base_backward_bytes: int = 0
    conversion_bytes: int = 0
    host_budget_bytes: int = 0
    in_flight: int = 1
    risk_budget: float = 0.0
    linear_risk: bool = False
    exposures: Mapping[UnitId, float] = field(default_factory=dict)
    allowed: Mapping[UnitId, tuple[str, ...]] = field(default_factory=dict)
    prepared: Mapping[UnitId, str] | None = None

    def __post_init__(self) -> None:
        validate_problem(self)

    @cached_property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        """What each unit may become, in forward order; a unit's options keep the order of its variants."""
        q = self.prepared
        return tuple(
            options_of(
                unit,
                prepared_name=None if q is None else q.get(unit.unit, REPLAY),
                allowed=self.allowed.get(unit.unit),
                exposure=self.exposures.get(unit.unit, 1.0),
                linear_risk=self.linear_risk,
            )
            for unit in self.units
        )

    @cached_property
    def risk_limit(self) -> float:
        """Right side of the risk row: B^2, or B in paper mode."""
        return self.risk_budget if self.linear_risk else self.risk_budget**2

    def after_forward(self, prepared: Mapping[UnitId, str], exposures: Mapping[UnitId, float] | None = None) -> Problem:
        """Gives the second problem: the same rows and budgets, from q = `prepared` and true exposures."""
        facts: dict[str, Any] = {"prepared": prepared, "exposures": self.exposures if exposures is None else exposures}
        if self.in_flight > 1:
            elsewhere = _held_elsewhere(self, pick(self, prepared))
            facts |= {"in_flight": 1, "base_backward_bytes": self.base_backward_bytes + elsewhere}
        second = self._with(facts)
        vars(second).pop("options", None)
        second.options  # noqa: B018  (unknown names are found here)
        return second

    def now(
        self,
        *,
        risk_budget: float | None = None,
        exposures: Mapping[UnitId, float] | None = None,
        budget_bytes: int | None = None,
        base_backward_bytes: int | None = None,
    ) -> Problem:
        """Gives the same problem under what is known by now; None leaves a number as it was.

        For decisions inside an update: units, variants and lattice stay, so they are neither validated nor built
        again, which is most of what making a problem costs.

        Raises:
            UsageError: as for the class.
        """
        given = {"risk_budget": risk_budget, "exposures": exposures}
        given |= {"budget_bytes": budget_bytes, "base_backward_bytes": base_backward_bytes}
        known = self._with({name: value for name, value in given.items() if value is not None})
        if exposures is not None:
            vars(known)["options"] = tuple(
                reweighted(unit, options, exposures.get(unit.unit, 1.0), self.linear_risk)
                for unit, options in zip(self.units, self.options)
            )
        return known

    def _with(self, facts: Mapping[str, Any]) -> Problem:
        """A copy that differs in `facts`, none of them about units; it shares the options, right or wrong."""
        other = copy.copy(self)
        vars(other).update(facts)  # frozen for all others, but nobody has seen it yet
        vars(other).pop("risk_limit", None)
        validate_facts(other, [name for name in ("exposures", "prepared") if name in facts])
        return other


@dataclass(frozen=True)
class Peak:
    """The fullest moment of one row kind; `unit` is where it is, None where the row has no unit."""

    row: Row
    unit: UnitId | None
    bytes: int


@dataclass(frozen=True)
class Violation:
    """One row that does not hold. `excess`: bytes over the budget, or share of the gradient norm over B."""

    row: Row
    unit: UnitId | None
    excess: float
    message: str


@dataclass(frozen=True)
class Evaluation:
    """What a choice does in every row: device peaks by row kind, seconds, risk, and what does not hold."""

    peaks: tuple[Peak, ...]
    peak_bytes: int
    host_bytes: int
    saved_seconds: float
    risk: float
    violations: tuple[Violation, ...]

    @property
    def feasible(self) -> bool:
        return not self.violations

    @property
    def binding(self) -> Peak:
        """The fullest device row."""
        return max(self.peaks, key=lambda peak: peak.bytes)


@dataclass(frozen=True)
class Infeasible:
    """No plan fits. `min_bytes` is a budget that would do: the peak of the leanest plan known (all-R as a rule)."""

    min_bytes: int
    row: str
    unit: UnitId | None
    budget_bytes: int

    @property
    def missing_bytes(self) -> int:
        return max(0, self.min_bytes - self.budget_bytes)

    def __str__(self) -> str:
        where = f" at unit {self.unit}" if self.unit is not None else ""
        return (
            f"no plan fits: the leanest one needs {self.min_bytes} bytes, {self.missing_bytes} more than the budget "
            f"of {self.budget_bytes}, in the {self.row} row{where}"
        )


def evaluate(problem: Problem, choice: Mapping[UnitId, str]) -> Evaluation:
    """Computes every row of `problem` for `choice` (variant name by unit; a missing unit is R).

    This is the truth that every plan of every solver is held to. Seconds and risk are exactly rounded sums, so they
    do not depend on the order of units: plans that differ by an exchange of equal units tie to the last bit.
    """
    return _judge(problem, *_pick(problem, choice))


def evaluate_picked(problem: Problem, picked: Sequence[Option]) -> Evaluation:
    """The same for options of `problem`, one a unit in forward order: no name is looked up."""
    return _judge(problem, picked, [])


def _judge(problem: Problem, picked: Sequence[Option], strays: Sequence[Violation]) -> Evaluation:
    peaks = _device_peaks(problem, picked)
    violations = list(strays)
    for peak in peaks:
        if peak.bytes > problem.budget_bytes:
            violations.append(_bytes_violation(peak, problem.budget_bytes))
    host_bytes = sum(option.host_bytes for option in picked)
    if host_bytes > problem.host_budget_bytes:
        violations.append(_bytes_violation(Peak(Row.HOST, None, host_bytes), problem.host_budget_bytes))
    cost = math.fsum(option.risk_cost for option in picked)
    risk = cost if problem.linear_risk else math.sqrt(cost)
    if cost > problem.risk_limit * (1 + RISK_TOLERANCE):
        text = f"risk row: {risk:.6g} of the gradient norm, budget {problem.risk_budget:.6g}"
        violations.append(Violation(Row.RISK, None, risk - problem.risk_budget, text))
    return Evaluation(
        peaks=peaks,
        peak_bytes=max(peak.bytes for peak in peaks),
        host_bytes=host_bytes,
        saved_seconds=math.fsum(option.seconds for option in picked),
        risk=risk,
        violations=tuple(violations),
    )


def check(problem: Problem, plan: Plan) -> Evaluation:
    """Re-checks `plan` against every row in plain Python and gives what it evaluates to.

    Raises:
        PlanError: naming the first row that does not hold, its unit and its bytes; or a unit whose action is not
            that of its variant.
    """
    evaluation = evaluate(problem, plan.choice)
    _refuse_violations(evaluation, plan.solver)
    for unit in problem.units:
        action = unit.variant(plan.choice.get(unit.unit, REPLAY)).action
        if plan.action_of(unit.unit) is not action:
            raise PlanError(f"unit {unit.unit}: plan says {plan.action_of(unit.unit)}, its variant is {action}")
    return evaluation


def make_plan(
    problem: Problem, choice: Mapping[UnitId, str], solver: Solver, bound_seconds: float | None = None
) -> Plan:
    """Writes `choice` down as a plan with what it promises, after checking it.

    Raises:
        PlanError: `choice` does not hold in `problem`.
    """
    picked, strays = _pick(problem, choice)
    return _promise(problem, picked, solver, bound_seconds, _judge(problem, picked, strays))


def make_plan_of(
    problem: Problem, picked: Sequence[Option], solver: Solver, bound_seconds: float | None = None
) -> Plan:
    """The same for options of `problem`, one a unit in forward order.

    Raises:
        PlanError: `picked` does not hold in `problem`.
    """
    return _promise(problem, picked, solver, bound_seconds, evaluate_picked(problem, picked))


def _promise(
    problem: Problem, picked: Sequence[Option], solver: Solver, bound_seconds: float | None, evaluation: Evaluation
) -> Plan:
    _refuse_violations(evaluation, solver)
    units = [unit.unit for unit in problem.units]
    return Plan(
        choice=dict(zip(units, [option.name for option in picked])),
        actions=dict(zip(units, [option.action for option in picked])),
        saved_seconds=evaluation.saved_seconds,
        peak_bytes=evaluation.peak_bytes,
        risk=evaluation.risk,
        solver=solver,
        bound_seconds=None if bound_seconds is None else max(bound_seconds, evaluation.saved_seconds),
    )


def _refuse_violations(evaluation: Evaluation, solver: Solver) -> None:
    if evaluation.violations:
        first = evaluation.violations[0]
        more = len(evaluation.violations) - 1
        raise PlanError(
            f"plan by {solver.value} does not hold: {first.message}" + (f" (and {more} more rows)" if more else "")
        )


def pick(problem: Problem, choice: Mapping[UnitId, str]) -> list[Option]:
    """The options of a `choice` that names options of `problem` only; a missing unit is R."""
    names = [choice.get(unit.unit, REPLAY) for unit in problem.units]
    return [next(o for o in options if o.name == name) for options, name in zip(problem.options, names)]


def _pick(problem: Problem, choice: Mapping[UnitId, str]) -> tuple[list[Option], list[Violation]]:
    """The chosen options in forward order. For a name that is no option, a violation and the first option."""
    picked: list[Option] = []
    strays: list[Violation] = []
    for unit, options in zip(problem.units, problem.options):
        name = choice.get(unit.unit, REPLAY)
        for option in options:
            if option.name == name:
                picked.append(option)
                break
        else:
            known = [option.name for option in options]
            strays.append(_stray(unit.unit, f"unit {unit.unit} cannot become {name!r} here; possible: {known}"))
            picked.append(options[0])
    unknown = set(choice) - {unit.unit for unit in problem.units}
    strays += [_stray(unit, f"unit {unit} is in the plan but not in the problem") for unit in sorted(unknown)]
    return picked, strays


def _stray(unit: UnitId, message: str) -> Violation:
    return Violation(Row.LATTICE, unit, math.inf, message)


def _bytes_violation(peak: Peak, budget_bytes: int) -> Violation:
    where = f" at unit {peak.unit}" if peak.unit is not None else ""
    over = peak.bytes - budget_bytes
    text = f"{peak.row.value} row{where}: {peak.bytes} bytes, {over} over the budget of {budget_bytes}"
    return Violation(peak.row, peak.unit, over, text)


def _device_peaks(problem: Problem, picked: Sequence[Option]) -> tuple[Peak, ...]:
    """The fullest moment of each row M1 to M4 that applies; the earliest unit of equally full ones."""
    peaks: list[Peak] = []
    elsewhere = _held_elsewhere(problem, picked)
    if problem.prepared is None:
        held = elsewhere
        loads = []
        for option in picked:
            held += option.held_bytes
            loads.append(problem.base_forward_bytes + held + option.forward_bytes)
        peaks += [_fullest(Row.FORWARD, problem, loads), Peak(Row.LOSS, None, problem.base_loss_bytes + held)]
    elif any(option.converts for option in picked):
        held = sum(option.converting_bytes for option in picked)
        peaks.append(Peak(Row.CONVERSION, None, problem.base_backward_bytes + held + problem.conversion_bytes))
    held = problem.base_backward_bytes + elsewhere + sum(unit.grad_bytes for unit in problem.units)
    loads = []
    for unit, option in zip(problem.units, picked):
        loads.append(held + option.own_backward_bytes)
        held += option.backward_held_bytes - unit.grad_bytes
    peaks.append(_fullest(Row.BACKWARD, problem, loads))
    return tuple(peaks)


def _held_elsewhere(problem: Problem, picked: Sequence[Option]) -> int:
    """Bytes that the other microbatches in flight hold."""
    return sum([option.held_bytes for option in picked]) * (problem.in_flight - 1) if problem.in_flight > 1 else 0


def _fullest(row: Row, problem: Problem, loads: list[int]) -> Peak:
    most = max(loads)
    return Peak(row, problem.units[loads.index(most)].unit, most)
