"""All-R and the plan in turn: what does not pay is struck out, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action
from ds_hilore.recovery.roles import Role, UnitRoles
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.parts import Stage
from ds_hilore.runtime.risk import RiskRules
from ds_hilore.runtime.trial import COMPRESSING, MOST_IDLE, PATTERN, Turn
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
    expected = ["RRR" if PATTERN[turn % len(PATTERN)] is Turn.REPLAYED else "HHH" for turn in range(TURNS)]
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


# -- compression ---------------------------------------------------------------------------------------------------

MLP = Treatment.parse("L:mlp=int8")


def compressed(controller: Controller) -> int:
    return controller.microbatch.metrics()["compressed_units"]  # type: ignore[return-value]


def before_compression(saves: float, units: float | None = None) -> Rig:
    """Units that would all be compressed and never stored, which saves so many tenths, of a unit's part other ones."""
    of_unit = saves if units is None else units

    def seconds(controller: Controller, whole: bool) -> float:
        if controller.stage is Stage.MEASURE_H:  # codecs
            return 1e-3
        return (
            (10 - saves * bool(compressed(controller))) if whole else 1 - 0.1 * of_unit * bool(compressed(controller))
        )

    clock = ScriptedClock(seconds)
    rig = Rig(planner=planner(100.0), clock=clock, trial_microbatches=TURNS, codecs=("int8",), risk=RiskRules(0.01))
    clock.controller = rig.controller
    while rig.controller.stage is not Stage.TRIAL:
        told(rig)
    while rig.controller.stage is not Stage.PLANNED:
        told(rig)
    rig.controller.measurements.strike("Block", "H", "for this test")
    rig.controller.learning.use_calibration(_Calibrated())  # type: ignore[arg-type]
    return rig


class _Calibrated:
    """Says that nothing costs any error to speak of."""

    def risk(self, position: int, units: int, errors: object, unit: object = None) -> float:
        return 1e-6

    def exposures(self) -> list[float]:
        return [1.0]


def told(rig: Rig) -> str:
    """An update whose loss tells its coefficients."""
    loss = rig.forward()
    rig.controller.note_coefficients(torch.ones(2, 3), None)
    rig.backward(loss)
    rig.controller.end_update(1.0)
    return rig.actions


def test_nothing_is_compressed_before_predictions_have_held() -> None:
    rig = before_compression(saves=5.0)
    assert {told(rig) for _ in range(4)} == {"RRR"} and rig.controller.stage is Stage.PLANNED


def test_a_trial_shows_that_compressing_pays() -> None:
    rig = before_compression(saves=5.0)
    rig.controller.learning.accept()
    turns = [told(rig) for _ in range(TURNS)]
    assert turns == ["LLL" if turn is Turn.COMPRESSED else "RRR" for turn in COMPRESSING]
    assert rig.controller.stage is Stage.PLANNED and told(rig) == "LLL"


def test_compressing_that_saves_nothing_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    rig = before_compression(saves=0.0)
    rig.controller.learning.accept()
    with caplog.at_level(logging.WARNING):
        while rig.controller.stage is not Stage.PLANNED or not caplog.messages:
            told(rig)
    assert {told(rig) for _ in range(4)} == {"RRR"}
    (message,) = caplog.messages
    assert "nothing is compressed" in message and "not faster than all-R and exact plan" in message


def test_without_trials_predictions_are_enough() -> None:
    rig = before_compression(saves=0.0)
    rig.controller.learning._parts = replace(rig.controller.parts, trial_microbatches=0)
    rig.controller.learning.accept()
    assert told(rig) == "LLL"


def test_what_is_refused_stays_so() -> None:
    rig = before_compression(saves=5.0)
    rig.controller.learning.refuse("it was tried")
    assert {told(rig) for _ in range(4)} == {"RRR"}


def test_what_a_trial_shows_is_of_its_budget() -> None:
    """Where units say that they gain, and the update as a whole does not."""
    rig = before_compression(saves=0.0, units=5.0)
    rig.controller.learning.accept()
    for _ in range(TURNS):
        told(rig)
    assert rig.controller.stage is Stage.PLANNED and told(rig) == "RRR"
    planner = rig.controller.parts.planner
    before = planner.budget_bytes
    planner.set_budget(before + 1)
    assert told(rig) == "RRR" and rig.controller.stage is Stage.TRIAL
    while rig.controller.stage is Stage.TRIAL:
        told(rig)
    planner.set_budget(before)
    assert told(rig) == "RRR" and rig.controller.stage is Stage.PLANNED


def too_violent(rig: Rig) -> None:
    """An update whose plan expects nearly no exposure, and whose loss then tells a great one."""
    rig.controller.learning.risk.typical = 1e-9
    loss = rig.forward()
    rig.controller.note_coefficients(torch.full((2, 3), 1e9), None)
    rig.backward(loss)
    rig.controller.end_update(None)
    assert rig.actions == "RRR"


def test_what_is_encoded_and_then_replayed_is_what_compressing_costs(caplog: pytest.LogCaptureFixture) -> None:
    rig = before_compression(saves=5.0)
    rig.controller.learning.accept()
    with caplog.at_level(logging.WARNING):
        for _ in range(TURNS):
            too_violent(rig)
    assert "not faster than all-R and exact plan" in caplog.text and told(rig) == "RRR"


def test_a_turn_that_encodes_nothing_is_taken_again() -> None:
    """Risk is expected to forbid it: that says nothing of whether it pays."""
    rig = before_compression(saves=5.0)
    learning = rig.controller.learning
    learning.accept()
    assert [told(rig), told(rig)] == ["RRR", "RRR"]  # all-R, and the exact plan
    for _ in range(3):
        learning.risk.typical = 1e9
        assert told(rig) == "RRR" and rig.controller.stage is Stage.TRIAL
    learning.risk.typical = 1.0
    assert [told(rig), told(rig)] == ["LLL", "LLL"]


def test_a_trial_without_one_that_compresses_settles_nothing() -> None:
    rig = before_compression(saves=5.0)
    learning = rig.controller.learning
    learning.accept()
    told(rig), told(rig)
    for _ in range(MOST_IDLE):
        learning.risk.typical = 1e9
        told(rig)
    assert rig.controller.stage is Stage.PLANNED
    learning.risk.typical = 1.0
    assert told(rig) == "RRR" and rig.controller.stage is Stage.TRIAL, "the next plan that would compress tries again"


def test_after_a_failure_nothing_is_stored_in_a_trial_either() -> None:
    rig = in_trial(cheaper_when_stored)
    rig.update()  # a turn of all-R; the next stores
    rig.gradients()
    rig.controller.guard.replays_everything = True
    for _ in range(2):  # both microbatches of an update that runs again
        rig.backward(rig.forward())
        assert rig.actions == "RRR" and same(rig.gradients(), rig.expected(rig.plain()))
    rig.controller.guard.replays_everything = False
    assert len(finish(rig)) == TURNS - 1, "none of them was a turn"


@pytest.mark.parametrize("static", [False, True])
def test_coefficients_that_come_late_to_a_microbatch_that_told_none(static: bool) -> None:
    """Its rewards were equal; the second loss has some. What was used cannot be taken back, nor priced by ratio."""
    rig = before_compression(saves=5.0)
    learning = rig.controller.learning
    learning._parts = replace(rig.controller.parts, trial_microbatches=0)
    learning.risk.rules = replace(learning.risk.rules, static=static)
    learning.risk.freeze([1.0])
    learning.accept()
    told(rig)
    loss = rig.forward()
    rig.controller.note_coefficients(torch.zeros(2, 3), None)
    rig.controller.begin_backward()
    rig.controller.note_coefficients(torch.ones(2, 3), None)
    rig.backward(loss)
    assert rig.actions == "LLL"
