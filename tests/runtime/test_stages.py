"""From measuring to plans, and the ways around both."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Plan, Shape, UnitId
from ds_hilore.runtime.microbatch import Phase
from ds_hilore.runtime.parts import Stage
from tests.runtime.rig import Net, Rig, facts, planner, same, told

STORE, RECOMPUTE = Action.STORE, Action.RECOMPUTE


def test_measure_r_twice_then_h_once_then_plans() -> None:
    rig = Rig(classes=["A", "B", "A"], planner=planner(1.0))
    seen = []
    for _ in range(4):
        rig.update()
        seen.append((rig.actions, rig.controller.stage, rig.controller.budget_bytes))
    # the last unit of each class is stored, the others are replayed; then nothing fits "1.0x" but all-R
    assert seen == [
        ("RRR", Stage.MEASURE_R, 0),
        ("RRR", Stage.MEASURE_H, 0),
        ("RHH", Stage.PLANNED, 1000),
        ("RRR", Stage.PLANNED, 1000),
    ]


def test_one_microbatch_measures_h_the_next_follows_a_plan() -> None:
    rig = Rig(planner=planner(100.0))
    rig.update()
    rig.update()
    rig.backward(rig.forward())
    assert rig.actions == "RRH"
    rig.backward(rig.forward())
    assert rig.actions == "HHH" and rig.controller.plan.saved_seconds == pytest.approx(3.0)
    metrics = rig.controller.metrics()
    assert not any(metrics.pop(name) for name in list(metrics) if name.startswith("guard_"))
    assert metrics == {
        "stored_units": 3,
        "compressed_units": 0,
        "replayed_units": 0,
        "offloaded_units": 0,
        "saved_seconds": rig.controller.plan.saved_seconds,
        "predicted_peak_bytes": rig.controller.plan.peak_bytes,
        "budget_bytes": 100_000,
    }
    assert 0 < rig.controller.plan.peak_bytes <= 100_000


def test_a_sample_that_never_reached_backward_is_taken_again() -> None:
    rig = Rig()
    rig.update()
    rig.update()
    rig.forward()
    assert rig.controller.stage is Stage.MEASURE_H and rig.actions == "RRH"
    rig.update()
    assert rig.controller.stage is Stage.PLANNED and rig.actions == "RRH"


def test_units_that_may_only_be_replayed_do_not_hold_planning_up() -> None:
    net = Net()
    rig = Rig(net, classes=["A", "B", "A"], replay_only=lambda module: module is net.blocks[1])
    for _ in range(3):
        rig.update()
    assert rig.controller.stage is Stage.PLANNED and rig.actions == "RRH"
    profile = rig.controller.measurements.profiles(Shape(2, 3))[1]
    assert [variant.name for variant in profile.variants] == ["R"]


def test_forced_plans() -> None:
    rig = Rig()
    rig.controller.force(Plan(choice={UnitId("blocks.1"): "H"}, actions={UnitId("blocks.1"): STORE}))
    rig.update()
    assert rig.actions == "RHR"
    rig.controller.force(STORE)
    rig.update()
    assert rig.actions == "HHH" and rig.controller.progress()["forced"] is True
    assert rig.controller.metrics()["stored_units"] == 3
    with pytest.raises(UsageError, match="needs codecs"):
        rig.controller.force(Action.COMPRESS)
    rig.controller.force(None)
    assert rig.controller.progress()["forced"] is False


@pytest.mark.parametrize("first", ["forced", "paused"])
def test_updates_of_the_users_own_choosing_only_put_measuring_off(first: str) -> None:
    """The second update is not the only one that can be measured: a comparison may run before."""
    rig = Rig()
    for _ in range(3):
        if first == "forced":
            rig.controller.force(STORE)
            rig.update()
            rig.controller.force(None)
        else:
            with rig.controller.paused():
                rig.update()
    assert rig.controller.stage is Stage.MEASURE_R
    rig.update()  # has optimizer state: an earlier update made it
    assert rig.controller.stage is Stage.MEASURE_H
    rig.update()
    assert rig.controller.stage is Stage.PLANNED


def test_an_update_forced_half_way_is_not_the_baseline() -> None:
    rig = Rig()
    rig.update()
    rig.backward(rig.forward())
    rig.controller.force(STORE)
    rig.backward(rig.forward())
    rig.controller.force(None)
    rig.controller.end_update()
    assert rig.controller.stage is Stage.MEASURE_R
    rig.update()
    assert rig.controller.stage is Stage.MEASURE_H


def test_an_aborted_baseline_is_measured_again() -> None:
    rig = Rig()
    rig.update()
    rig.forward()
    rig.controller.abort()
    assert rig.controller.stage is Stage.MEASURE_R
    rig.update()
    assert rig.controller.stage is Stage.MEASURE_H


def test_paused_units_run_plainly() -> None:
    rig = Rig()
    rig.controller.announce_update([facts(1), facts(2)])
    with rig.controller.paused():
        loss = rig.forward()
    assert not rig.controller.microbatch.ran and rig.controller.phase is Phase.IDLE
    assert told(rig) == 1  # it is a microbatch all the same
    rig.backward(loss)
    assert same(rig.gradients(), rig.expected(rig.plain()))
    rig.backward(rig.forward())
    assert told(rig) == 2 and rig.actions == "RRR"


def test_the_hosts_own_checkpointing() -> None:
    rig = Rig()
    calls: list[Any] = []

    def host(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(function.__self__)
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    with rig.controller.host_checkpointing(host):
        loss = rig.forward()
        with rig.controller.paused():
            rig.forward()
        rig.forward()  # the outer one holds again
    assert calls == [*rig.net.blocks, *rig.net.blocks]
    rig.backward(loss)
    assert same(rig.gradients(), rig.expected(rig.plain()))
    rig.forward()
    assert rig.actions == "RRR"


def test_coefficients_do_not_pile_up_while_paused() -> None:
    rig = Rig()
    with rig.controller.paused():
        for _ in range(3):
            loss = rig.forward()
            rig.controller.note_coefficients(torch.ones(2, 3), None)
            rig.backward(loss)
    assert len(rig.controller.coefficients) == 1


def test_what_there_is_to_win_is_known_with_the_first_plan(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(planner=planner(100.0))
    for _ in range(3):
        rig.update()
    assert rig.controller.learning.prize is None
    rig.update()
    prize = rig.controller.learning.prize
    assert prize is not None
    assert prize.budget_bytes == 100 * prize.replayed_peak_bytes and prize.free_bytes > 0
    assert prize.replay_seconds == pytest.approx(3.0)  # of FakeClock, one a unit
    assert prize.planned_share == pytest.approx(1.0)
    assert prize.storing_bytes is not None and prize.storing_bytes > 0
    assert "free under the budget" in caplog.text and "storing every unit takes" in caplog.text
