"""All-R and the plan in turn: what does not pay is struck out, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_hilore.core.types import Action
from ds_hilore.recovery.roles import Role, UnitRoles
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.parts import Stage
from ds_hilore.runtime.trial import PATTERN
from ds_hilore.runtime.update import MicrobatchFacts
from tests.runtime.rig import Rig, planner, same

TURNS = 6


class ScriptedClock:
    """A span's seconds follow from what ran in it. `seconds(controller, whole)` says them."""

    def __init__(self, seconds: Callable[[Controller, bool], float], late: bool = False) -> None:
        self.seconds = seconds
        self.controller: Controller | None = None
        self.late = late
        self._depth = 0
        self._waiting: list[tuple[float, Callable[[float], None]]] = []

    def start(self) -> bool:
        self._depth += 1
        return self._depth == 1  # the outermost span is the microbatch

    def stop(self, started: bool, receive: Callable[[float], None]) -> None:
        self._depth -= 1
        assert self.controller is not None
        self._waiting.append((self.seconds(self.controller, started), receive))
        if not self.late:
            self.collect()

    def collect(self) -> None:
        waiting, self._waiting = self._waiting, []
        for seconds, receive in waiting:
            receive(seconds)


def in_trial(
    seconds: Callable[[Controller, bool], float], classes: tuple[str, ...] = (), late: bool = False, **parts: Any
) -> Rig:
    clock = ScriptedClock(seconds, late)
    rig = Rig(classes=classes, planner=planner(100.0), clock=clock, trial_microbatches=TURNS, **parts)
    clock.controller = rig.controller
    while rig.controller.stage is not Stage.TRIAL:
        rig.update()
        rig.gradients()
    return rig


def announced(rig: Rig) -> None:
    """Says of the next microbatch that one of its two rows is dead."""
    rig.controller.announce_microbatch(MicrobatchFacts(torch.tensor([1.0, 0.0]), torch.ones(2, 3), 3))


def finish(rig: Rig, **shape: int) -> list[str]:
    seen = []
    while rig.controller.stage is Stage.TRIAL:
        rig.update(**shape)
        assert same(rig.gradients(), rig.expected(rig.plain(**shape)))
        seen.append(rig.actions)
    return seen


def stored(controller: Controller) -> int:
    return controller.microbatch.metrics()["stored_units"]  # type: ignore[return-value]


def cheaper_when_stored(controller: Controller, whole: bool) -> float:
    return 10.0 - stored(controller) if whole else 1.0 - 0.1 * stored(controller)


def dearer_when_stored(controller: Controller, whole: bool) -> float:
    return 10.0 + stored(controller) if whole else 1.0 + 0.1 * stored(controller)


@pytest.mark.parametrize("late", [False, True])
def test_turns_then_plans(late: bool) -> None:
    rig = in_trial(cheaper_when_stored, late=late)
    expected = ["RRR" if PATTERN[turn % len(PATTERN)] else "HHH" for turn in range(TURNS)]
    assert finish(rig) == expected
    rig.update()
    assert rig.actions == "HHH" and not rig.controller.measurements.struck


def test_dead_rows_in_every_microbatch_do_not_hold_it_up() -> None:
    """Turns are of unpruned replays: a trial that waited for a microbatch without dead rows would wait for ever."""
    rig = in_trial(cheaper_when_stored, roles=lambda _: UnitRoles({"x": Role.HIDDEN}))
    seen = []
    while rig.controller.stage is Stage.TRIAL and len(seen) < TURNS:
        announced(rig)
        rig.update()
        assert same(rig.gradients(), rig.expected(rig.plain())) and not rig.controller.microbatch.prunes
        seen.append(rig.actions)
    assert rig.controller.stage is Stage.PLANNED and {"RRR", "HHH"} == set(seen)
    announced(rig)
    rig.forward()
    assert rig.controller.microbatch.prunes


def test_a_joint_plan_that_is_slower_gives_way_to_all_r() -> None:
    rig = in_trial(dearer_when_stored)
    finish(rig)
    assert set(rig.controller.measurements.struck) == {("Block", "H")}
    rig.update()
    assert rig.actions == "RRR"


def test_a_class_that_costs_more_than_it_saves_is_struck_out_by_itself() -> None:
    """Leave one out: storing units of B makes them slower, yet the joint plan is faster than all-R."""

    def seconds(controller: Controller, whole: bool) -> float:
        if whole:
            return cheaper_when_stored(controller, whole)
        call = controller.learning._trial._current
        dear = call is not None and call.unit_class == "B" and call.action is Action.STORE
        return 5.0 if dear else 1.0 - 0.1 * stored(controller)

    rig = in_trial(seconds, classes=("A", "B", "A"))
    finish(rig)
    assert set(rig.controller.measurements.struck) == {("B", "H")}
    rig.update()
    assert rig.actions == "HRH"


def test_outliers_on_one_side_do_not_decide() -> None:
    slow = iter([50.0, 1.0, 50.0])

    def seconds(controller: Controller, whole: bool) -> float:
        if whole and stored(controller):
            return next(slow)
        return 10.0 if whole else 1.0 - 0.1 * stored(controller)

    rig = in_trial(seconds)
    finish(rig)
    assert not rig.controller.measurements.struck


def test_a_failed_microbatch_is_taken_again() -> None:
    rig = in_trial(cheaper_when_stored)
    rig.update()
    rig.gradients()
    rig.forward()
    rig.controller.abort()
    assert len(finish(rig)) == TURNS - 1


def test_forced_microbatches_are_not_part_of_it() -> None:
    rig = in_trial(cheaper_when_stored)
    rig.controller.force(rig.controller.microbatch.plan)
    for _ in range(TURNS):
        rig.update()
        rig.gradients()
    assert rig.controller.stage is Stage.TRIAL
    rig.controller.force(None)
    assert len(finish(rig)) == TURNS


def test_nothing_to_try_where_the_plan_is_all_r() -> None:
    rig = in_trial(cheaper_when_stored)
    rig.controller.parts.planner.set_budget(1)
    rig.update()  # a turn of all-R
    rig.update()
    assert rig.controller.stage is Stage.PLANNED and rig.actions == "RRR"


def test_shapes_are_compared_by_token() -> None:
    def seconds(controller: Controller, whole: bool) -> float:
        shape: Any = controller.microbatch.shape
        return cheaper_when_stored(controller, whole) * shape.tokens

    rig = in_trial(seconds)
    turn = 0
    while rig.controller.stage is Stage.TRIAL:
        rig.update(rows=1 + turn % 3)
        turn += 1
    assert not rig.controller.measurements.struck
