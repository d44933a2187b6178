"""Forward under watch: between two units of a planned microbatch, what is held is compared with what was foreseen.

More than foreseen, and more than the plan left free, turns units that come later to replays: what the loss needs can
only be kept free before it (design section 4). The check is one read of a counter and one comparison a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ds_hilore.core.types import Plan, Shape, UnitId
from ds_hilore.memory.meter import PeakMeter
from ds_hilore.planning.away import moving_bytes
from ds_hilore.planning.options import REPLAY, device_bytes
from ds_hilore.planning.problem import Problem, Row, evaluate
from ds_hilore.planning.reaction import replay_later
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.microbatch import Microbatch
from ds_hilore.runtime.pressure import NOISE_BYTES

#: Told of the unit before which it was seen, by how much memory was short, the plan before and the one after.
Report = Callable[[UnitId, int, Plan, Plan], None]

#: More risk than any plan has: what was prepared is not questioned here.
_ANY_RISK = 1e9


class LevelWatch:
    """Follows one forward at a time. Idle where levels mean nothing in the ordinary course of a run (`exact`).

    Attributes:
        allowed: level before each unit of the forward, up to which nothing is done.
    """

    def __init__(self, meter: PeakMeter, planner: RankPlanner, report: Report) -> None:
        self._meter = meter
        self._planner = planner
        self._report = report
        self._batch: Microbatch | None = None
        self._problem: Problem | None = None  # of forward and loss
        self._units: list[UnitId] = []
        self._foreseen: list[int] = []  # level before each unit
        self.allowed: list[int] = []
        self._next = 0

    def begin(self, batch: Microbatch, shape: Shape) -> None:
        """The first unit of a planned microbatch is about to run. `shape`: that it was planned for."""
        self.end()
        if batch.prepared is None or not self._meter.exact:
            return
        after = batch.prepared.problem
        self._batch = batch
        self._problem = replace(
            after,
            budget_bytes=max(after.budget_bytes, self._planner.free_budget_bytes),
            base_backward_bytes=0,
            prepared=None,
            allowed={},
            exposures={},
            risk_budget=_ANY_RISK,
        )
        self._units = [unit.unit for unit in after.units]
        moving = moving_bytes(after.units, batch.plan.choice)  # of the unit that has just sent its state
        self._expect(self._planner.level_between(shape) + moving, batch.plan, 0)

    def _expect(self, base_bytes: int, plan: Plan, excess_bytes: int) -> None:
        """Levels to come; `excess_bytes` more than foreseen are there already."""
        assert self._problem is not None
        level = base_bytes
        self._foreseen = []
        for unit in self._problem.units:
            self._foreseen.append(level)
            level += device_bytes(unit.variant(plan.choice.get(unit.unit, REPLAY)))
        spare = self._problem.budget_bytes - self._peak(plan) - excess_bytes
        noise = NOISE_BYTES + self._meter.wander_bytes
        self.allowed = [level + excess_bytes + max(spare, noise) for level in self._foreseen]

    def _peak(self, plan: Plan) -> int:
        assert self._problem is not None
        peaks = evaluate(self._problem, plan.choice).peaks
        return max(peak.bytes for peak in peaks if peak.row in (Row.FORWARD, Row.LOSS))

    def before(self, unit: UnitId) -> None:
        """A unit is about to run."""
        if self._batch is None:
            return
        position = self._next
        if position >= len(self._units) or self._units[position] != unit:
            self.end()  # not the units that were planned for
            return
        self._next += 1
        level = self._meter.quick_level_bytes()
        if level > self.allowed[position]:
            self._react(position, level - self._foreseen[position])

    def _react(self, position: int, excess_bytes: int) -> None:
        batch, problem = self._batch, self._problem
        assert batch is not None and problem is not None
        before = batch.plan
        short = self._peak(before) + excess_bytes - problem.budget_bytes
        tighter = problem.now(budget_bytes=max(0, problem.budget_bytes - excess_bytes))
        choice = replay_later(tighter, before.choice, position)
        actions = {unit.unit: unit.variant(choice[unit.unit]).action for unit in problem.units}
        saved = evaluate(problem, choice).saved_seconds
        batch.plan = replace(before, choice=choice, actions=actions, saved_seconds=saved)
        if choice != before.choice:
            self._report(self._units[position], short, before, batch.plan)
            self._expect(self._foreseen[0], batch.plan, excess_bytes)
        else:
            self.end()  # nothing is left to replay

    def end(self) -> None:
        """The forward is over, or not followed any more."""
        self._batch = self._problem = None
        self._next = 0
