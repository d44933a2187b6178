"""What plans would make of an update, from arithmetic alone: peaks, seconds and the plan of each budget, without a run.

Bytes are those of the account (memory/arithmetic.py) and of the cost model, seconds those of layers, head and loss at a
stated speed; the optimizer's step and communication, which no plan changes, have none. Three updates that run under
torch, or with nothing stored, are the measures of every plan:

    checkpointing       torch's, of every layer: its replays stop early, and bring back what torch saves
    no checkpointing    torch keeps everything
    all replayed        every unit of ours is R: the "1.0x" of a budget
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_hilore.core.types import Action, Plan, Shape, UnitId, UnitProfile, Variant
from ds_hilore.memory.ledger import Account, Moment, workload
from ds_hilore.memory.prize import storing_bytes
from ds_hilore.planning.frontier import first_frontier, gap
from ds_hilore.planning.problem import Evaluation, Infeasible, Problem, evaluate
from ds_hilore.profiling.cost_model import DeviceSpeed, HeadCosts, LayerCosts, Work, analytic_profile
from ds_hilore.profiling.fit import whole
from ds_hilore.profiling.measure import RECOMPUTE, STORE

_UNLIMITED = 2**62


@dataclass(frozen=True)
class Layer:
    """One unit. `costs`: of it as a unit of ours; `plain`: under torch alone.

    Args:
        grad_bytes: what stays of its gradients once its backward has run (memory/reduction.py: growing_gradients).
        transient_grad_bytes: gradients that are there during its backward only (transient_gradients).
    """

    unit: UnitId
    unit_class: str
    costs: LayerCosts
    plain: LayerCosts
    grad_bytes: int = 0
    transient_grad_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """One update. `fullest`: the row or moment of its peak; `seconds`: of all its microbatches.

    `recovered_share`: (T_checkpointing - seconds) / (T_checkpointing - T_no_checkpointing), T of torch's.
    """

    peak_bytes: int
    fullest: str
    seconds: float
    recovered_share: float
    variants: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "fullest": self.fullest,
            "seconds": self.seconds,
            "recovered_share": self.recovered_share,
            "units": dict(self.variants),
        }


@dataclass(frozen=True)
class Planned:
    """What the plan of one budget is expected to do. `gap`: by how much of itself another plan could save more."""

    budget_bytes: int
    outcome: Outcome
    plan: Plan
    gap: float


@dataclass(frozen=True)
class Job:
    """One rank's update: what it runs, on what, and what else is in memory.

    Args:
        layers: the units, in forward order; at least one.
        head: head and loss of a microbatch.
        account: everything else that the rank holds, gradients of `layers` included.
        shape: of one microbatch.
        accumulation: microbatches of the update.
    """

    layers: tuple[Layer, ...]
    head: HeadCosts
    account: Account
    shape: Shape
    speed: DeviceSpeed
    accumulation: int = 1

    def problem(self, budget_bytes: int = _UNLIMITED) -> Problem:
        """The planner's problem for our units."""
        return self._problem(self._units, budget_bytes)

    @cached_property
    def checkpointing(self) -> Outcome:
        """torch's checkpointing of every layer."""
        replays = sum(self._seconds(layer.plain.replay_with_dead) for layer in self.layers)
        return self._outcome(self._problem(self._torch_units, _UNLIMITED), {}, replays)

    @cached_property
    def no_checkpointing(self) -> Outcome:
        """torch keeps everything."""
        stored = {layer.unit: STORE for layer in self.layers}
        return self._outcome(self._problem(self._torch_units, _UNLIMITED), stored, 0.0)

    @cached_property
    def replayed(self) -> Outcome:
        """Every unit of ours is replayed."""
        return self._outcome(self.problem(), {}, self._replay_seconds)

    @cached_property
    def storing_bytes(self) -> int:
        """What storing every unit of ours holds beyond replaying it."""
        return storing_bytes(self._units)

    def planned(self, budget_bytes: int) -> Planned | Infeasible:
        """The plan that the planner has at once for a budget, gradients exact.

        Infeasible where not even replaying everything fits; also where gradients or the optimizer's step do not, which
        no plan changes.
        """
        fixed = max((Moment.REDUCE, Moment.STEP), key=self.account.at)
        if self.account.at(fixed) > budget_bytes:
            least = max(self.account.at(fixed), self.replayed.peak_bytes)
            return Infeasible(least, fixed.value, None, budget_bytes)
        problem = self.problem(budget_bytes)
        frontier = first_frontier(problem)
        if isinstance(frontier, Infeasible):
            return frontier
        plan = frontier.rows[0].plan
        outcome = self._outcome(problem, plan.choice, self._replay_seconds - plan.saved_seconds)
        return Planned(budget_bytes, outcome, plan, gap(plan))

    def full_account(self) -> Account:
        """The account with what a microbatch adds when every unit is replayed: its widest unit, its loss."""
        units = self._units
        held = sum(unit.variant(RECOMPUTE).held_bytes for unit in units)
        widest = max(unit.variant(RECOMPUTE).workspace_bytes for unit in units)
        return self.account.with_entries(workload(held, self._loss_bytes, widest))

    # -- bytes -----------------------------------------------------------------------------------------------------

    @cached_property
    def _units(self) -> tuple[UnitProfile, ...]:
        found = []
        for one in self.layers:
            profile = analytic_profile(one.unit, one.unit_class, one.costs, self.shape, self.speed, one.grad_bytes)
            found.append(_with_transient(profile, one))
        return tuple(found)

    @cached_property
    def _torch_units(self) -> tuple[UnitProfile, ...]:
        found = []
        for one in self.layers:
            inputs, state = self._bytes(one.plain.input_bytes), self._bytes(one.plain.torch_bytes)
            gradients = self._bytes(one.plain.gradient_bytes)
            running = self._bytes(one.plain.forward_bytes)
            replayed = Variant(RECOMPUTE, Action.RECOMPUTE, inputs, state + gradients, running)
            stored = Variant(STORE, Action.STORE, inputs + state, gradients, max(0, running - state))
            profile = UnitProfile(one.unit, one.unit_class, (replayed, stored), one.grad_bytes)
            found.append(_with_transient(profile, one))
        return tuple(found)

    @cached_property
    def _loss_bytes(self) -> int:
        return self._bytes(self.head.workspace_bytes)

    def _bytes(self, rate: Any) -> int:
        return whole(rate.of(self.shape))

    def _problem(self, units: tuple[UnitProfile, ...], budget_bytes: int) -> Problem:
        forward, loss, backward = self.account.planning_bases(sum(unit.grad_bytes for unit in units))
        return Problem(units, budget_bytes, forward, loss + self._loss_bytes, backward)

    def _peak(self, rows: Evaluation) -> tuple[int, str]:
        peak = self.account.update_peak(rows.peak_bytes)
        if peak == rows.peak_bytes:
            return peak, rows.binding.row.value
        return peak, max((Moment.REDUCE, Moment.STEP), key=self.account.at).value

    # -- seconds ---------------------------------------------------------------------------------------------------

    def _seconds(self, work: Work) -> float:
        return self.speed.seconds(work).of(self.shape)

    @cached_property
    def _common_seconds(self) -> float:
        """Of a microbatch, without any replay."""
        layers = sum(self._seconds(one.plain.forward) + self._seconds(one.plain.backward) for one in self.layers)
        return layers + self._seconds(self.head.forward) + self._seconds(self.head.backward)

    @cached_property
    def _replay_seconds(self) -> float:
        """Of a microbatch whose units are all replayed by us."""
        return sum(self._seconds(one.costs.replay) for one in self.layers)

    def _outcome(self, problem: Problem, choice: Mapping[UnitId, str], extra_s: float) -> Outcome:
        """Args: extra_s: seconds of a microbatch beyond forward and backward."""
        peak, fullest = self._peak(evaluate(problem, choice))
        names = Counter(choice.get(one.unit, RECOMPUTE) for one in self.layers)
        most = sum(self._seconds(one.plain.replay_with_dead) for one in self.layers)
        share = (most - extra_s) / most if most > 0 else 0.0
        return Outcome(peak, fullest, self.accumulation * (self._common_seconds + extra_s), share, dict(names))


def _with_transient(profile: UnitProfile, layer: Layer) -> UnitProfile:
    """With the gradients that are there during the unit's backward only."""
    more = layer.transient_grad_bytes
    variants = [replace(v, workspace_bytes=v.workspace_bytes + more) for v in profile.variants]
    return replace(profile, variants=tuple(variants))
