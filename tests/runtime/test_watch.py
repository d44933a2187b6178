"""Planned microbatches are held to what was foreseen."""

from __future__ import annotations

from ds_hilore.runtime.parts import Stage
from tests.runtime.rig import Rig, planner, same

MUCH = 1 << 30


def learnt(multiple: float) -> Rig:
    """A rig that follows its plans."""
    rig = Rig(planner=planner(multiple))
    rig.meter.script[:] = [MUCH]
    while rig.controller.stage is not Stage.PLANNED:
        rig.update()
        rig.gradients()
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
