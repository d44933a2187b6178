"""Planned microbatches are held to what was foreseen."""

from __future__ import annotations

import pytest

from ds_hilore.core.budget import BudgetKind, MemoryBudget
from ds_hilore.core.types import Solver
from ds_hilore.planning.program import SolverLimits
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.watch import STEP
from tests.runtime.rig import Rig, StubMeter, planner, same

MUCH = 1 << 30


def learnt(multiple: float) -> Rig:
    """A rig that follows its plans."""
    rig = Rig(planner=planner(multiple))
    rig.meter.script[:] = [MUCH]
    rig.learn()
    return rig


def test_as_foreseen_everything_that_was_stored_stays() -> None:
    rig = learnt(2.0)
    rig.update()
    assert rig.actions == "HHH"


def test_more_held_than_foreseen_replays_units_and_gradients_stay() -> None:
    rig = learnt(2.0)
    loss = rig.forward()
    assert rig.actions == "HHH"
    rig.meter.level = 3 * MUCH  # something else has come onto the device
    rig.backward(loss)
    assert rig.actions == "RRR"
    assert same(rig.gradients(), rig.expected(rig.plain()))


def test_a_peak_above_the_foreseen_one_is_learnt_from() -> None:
    rig = learnt(2.0)
    rig.meter.script[:] = [MUCH, 3 * MUCH]  # before the forward, and then a new peak
    rig.update()
    assert rig.actions == "HHH"
    rig.update()
    assert rig.actions == "RRR"  # nothing fits any more: the least is taken
    assert rig.controller.parts.planner.infeasible is not None


def test_a_floor_that_has_risen_is_planned_with() -> None:
    rig = learnt(2.0)
    rig.update()
    before = rig.controller.plan.peak_bytes
    rig.meter.level = MUCH // 2
    rig.update()
    assert rig.actions == "HHH" and rig.controller.plan.peak_bytes == before + MUCH // 2
    rig.meter.level = 3 * MUCH
    rig.update()
    assert rig.actions == "RRR"


def test_the_meter_is_left_to_whoever_reads_it() -> None:
    rig = learnt(2.0)
    before = rig.meter.resets
    rig.update()
    assert rig.meter.resets == before


def test_a_meter_that_means_nothing_is_not_asked() -> None:
    rig = learnt(2.0)
    rig.meter.exact = False
    rig.meter.script[:] = [3 * MUCH]
    rig.meter.level = 3 * MUCH
    for _ in range(2):
        rig.update()
        assert rig.actions == "HHH"


def test_a_microbatch_that_failed_tells_nothing() -> None:
    rig = learnt(2.0)
    rig.meter.script[:] = [3 * MUCH]
    rig.forward()
    rig.controller.abort()
    rig.meter.script[:] = [MUCH]
    rig.update()
    assert rig.actions == "HHH"


class Shared(StubMeter):
    """A device of which others hold a part."""

    others = 0

    def ceiling_bytes(self, peak_bytes: int) -> int:
        return self.device_bytes() - self.others


def beside_others(budget: MemoryBudget) -> tuple[Rig, Shared]:
    """A rig that follows its plans on a device of four times its all-R peak."""
    meter = Shared(device=4 * MUCH)
    rig = Rig(planner=RankPlanner(budget, Solver.GREEDY, SolverLimits(1.0, 0.01)), meter=meter)
    meter.script[:] = [MUCH]
    rig.learn()
    rig.update()
    rig.gradients()
    return rig, meter


AUTO = MemoryBudget(BudgetKind.AUTO, 0.95)


def test_a_sampler_that_holds_more_or_less_after_a_generation_is_kept_out_of() -> None:
    rig, meter = beside_others(AUTO)
    budgets = [rig.controller.parts.planner.budget_bytes]
    for meter.others, actions in ((3 * MUCH + MUCH // 2, "RRR"), (MUCH, "HHH"), (0, "HHH")):
        rig.update()
        assert rig.actions == actions and same(rig.gradients(), rig.expected(rig.plain()))
        budgets.append(rig.controller.parts.planner.budget_bytes)
    assert budgets[0] >= budgets[3] > budgets[2] > budgets[1]
    for budget, held in zip(budgets[1:], (3 * MUCH + MUCH // 2, MUCH, 0), strict=True):
        assert 0 <= 0.95 * (4 * MUCH - held) - budget <= 4 * MUCH * STEP + 1


def test_budgets_stay_while_others_wander() -> None:
    rig, meter = beside_others(AUTO)
    seen = set()
    for meter.others in range(0, int(4 * MUCH * STEP), MUCH // 64):
        rig.update()
        seen.add(rig.controller.parts.planner.budget_bytes)
    assert len(seen) == 1


@pytest.mark.parametrize("kind, value", [(BudgetKind.BYTES, 3 * MUCH), (BudgetKind.CHECKPOINT_MULTIPLE, 2.0)])
def test_a_budget_that_was_named_is_the_users(kind: BudgetKind, value: float) -> None:
    rig, meter = beside_others(MemoryBudget(kind, value))
    before = rig.controller.parts.planner.budget_bytes
    meter.others = 3 * MUCH
    rig.update()
    assert rig.controller.parts.planner.budget_bytes == before
