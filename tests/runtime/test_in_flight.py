"""Several microbatches in flight, as on a pipeline's first stages: each keeps its own plan, phase and graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from ds_hilore.core.types import Action
from ds_hilore.runtime.microbatch import Microbatch, Phase
from ds_hilore.runtime.parts import Stage
from tests.runtime.rig import Rig, StubMeter, same

STORE, RECOMPUTE = Action.STORE, Action.RECOMPUTE

#: Stage 0 of 2, and of 3, with four microbatches each; the last stage of any pipeline.
SCHEDULES = ["FFBFBFBB", "FFFBFBBB", "FBFBFBFB"]


class Pipe:
    """Runs microbatches of a rig in the order of a schedule, oldest first."""

    def __init__(self, rig: Rig, hold: Callable[[int], None] = lambda change: None) -> None:
        self.rig = rig
        self.hold = hold
        self.waiting: list[tuple[Microbatch, Tensor]] = []
        self.actions: list[str] = []

    def run(self, schedule: str, seed: int = 0, before_forward: Callable[[int], None] = lambda number: None) -> None:
        for number, letter in enumerate(schedule):
            controller = self.rig.controller
            if letter == "F":
                before_forward(schedule[:number].count("F"))
                self.hold(100)
                loss = self.rig.forward(seed + schedule[:number].count("F"))
                self.actions.append(self.rig.actions)
                self.waiting.append((controller.set_aside(), loss))
                assert controller.phase is Phase.IDLE and controller.starts_microbatch
            else:
                batch, loss = self.waiting.pop(0)
                controller.take_up(batch)
                assert controller.microbatch is batch and batch.phase is Phase.FORWARD
                self.rig.backward(loss)
                assert batch.phase is Phase.IDLE
                self.hold(-100)
        self.rig.controller.end_update()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_microbatch_keeps_its_plan_and_gradients_are_exact(schedule: str) -> None:
    rig = Rig()
    pipe = Pipe(rig)
    plans = [STORE, RECOMPUTE, STORE, RECOMPUTE]
    pipe.run(schedule, before_forward=lambda number: rig.controller.force(plans[number]))
    assert pipe.actions == ["HHH", "RRR", "HHH", "RRR"][: len(pipe.actions)]
    count = schedule.count("F")
    assert rig.controller.learning.in_flight == max(
        schedule[:end].count("F") - schedule[:end].count("B") for end in range(len(schedule))
    )
    assert all(
        a.allclose(b) for a, b in zip(rig.gradients(), rig.expected(*(rig.plain(seed) for seed in range(count))))
    )


def test_a_plain_run_has_one_in_flight() -> None:
    rig = Rig()
    rig.update()
    assert rig.controller.learning.in_flight == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stages_of_learning_are_those_of_a_plain_run(schedule: str) -> None:
    rig = Rig()
    pipe, stages = Pipe(rig), []
    for number in range(4):
        pipe.run(schedule, seed=10 * number)
        stages.append(rig.controller.stage)
        rig.gradients()
    assert stages == [Stage.MEASURE_R, Stage.MEASURE_H, Stage.PLANNED, Stage.PLANNED]
    assert not rig.controller.measurements.unmeasured_classes()


class LevelMeter(StubMeter):
    """Every open microbatch holds 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.peak = 0

    def hold(self, change: int) -> None:
        self.level += change
        self.peak = max(self.peak, self.level)

    def reset(self) -> None:
        self.peak = self.level

    def peak_bytes(self) -> int:
        return self.peak


@pytest.mark.parametrize(("schedule", "most"), [("FFBFBFBB", 200), ("FFFBFBBB", 300), ("FBFBFBFB", 100)])
def test_the_measured_peak_is_that_of_the_fullest_moment(schedule: str, most: int) -> None:
    """Its phases hold what the steady state does; the drain, with less and less in flight, adds none."""
    meter = LevelMeter()
    rig = Rig(meter=meter)
    pipe = Pipe(rig, meter.hold)
    pipe.run(schedule)
    pipe.run(schedule)
    baseline = rig.controller.learning.baseline.result()
    assert baseline.peak_bytes == most
    assert {(phase.forward, phase.loss, phase.backward) for phase in baseline.phases} == {(most, most, most)}
    assert len(baseline.phases) == schedule.count("F") - most // 100 + 1


def test_after_an_abort_nothing_is_open() -> None:
    rig = Rig()
    rig.forward()
    rig.controller.set_aside()
    rig.forward(1)
    rig.controller.abort()
    Pipe(rig).run("FBFB")
    assert rig.controller.learning.in_flight == 1
    assert same(rig.gradients(), rig.expected(rig.plain(0), rig.plain(1)))
