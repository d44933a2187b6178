"""Memory that runs short in backward: units give up their state, and gradients are the plain ones bit for bit."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.core.types import Action, Shape, UnitId
from ds_hilore.runtime.budget import all_units
from ds_hilore.runtime.guard import CALM_UPDATES, Defence
from tests.runtime.rig import Net, Rig, planner, same
from tests.runtime.shortage import Shortage

BLOCKS = 5
MUCH = 1 << 30


def forced(stored: int) -> Rig:
    """A rig of five units of which the first `stored` are stored."""
    rig = Rig(Net(BLOCKS))
    rig.controller.force(all_units([UnitId(f"blocks.{k}") for k in range(stored)], Action.STORE))
    return rig


def learnt() -> Rig:
    """A rig that follows its own plans and stores everything."""
    rig = Rig(planner=planner(2.0))
    rig.meter.script[:] = [MUCH]
    rig.learn()
    return rig


@pytest.mark.parametrize(("times", "left"), [(1, "RHHRR"), (2, "RRRRR"), (3, None)])
def test_a_replay_that_fails_is_done_again_with_less_held(times: int, left: str | None) -> None:
    """One unit is enough for what was asked for; after that, twice as much is given up."""
    rig = forced(stored=3)
    loss = rig.forward()
    with Shortage(times).in_replays_of(rig.net.blocks[3].up) as shortage:
        if left is None:
            with pytest.raises(MemoryExhausted):
                rig.backward(loss)
            return
        rig.backward(loss)
    assert shortage.failed == times and rig.actions == left
    assert same(rig.gradients(), rig.expected(rig.plain()))
    assert [event.defence for event in rig.controller.events] == [Defence.ALLOCATION] * times
    first = rig.controller.events[0]
    assert (first.unit, first.short_bytes, first.dropped) == (UnitId("blocks.3"), 1, (UnitId("blocks.0"),))


def test_nothing_is_given_up_where_other_ranks_would_not_replay_it() -> None:
    """Nor is the replay done again, whose collectives they have done once."""
    stored = frozenset(UnitId(f"blocks.{k}") for k in range(3))
    rig = forced(stored=3)
    loss = rig.forward()
    rig.controller.microbatch.agree(stored)
    with Shortage(1).in_replays_of(rig.net.blocks[3].up) as shortage, pytest.raises(MemoryExhausted, match="given up"):
        rig.backward(loss)
    assert shortage.failed == 1 and rig.actions == "HHHRR"
    assert [event.defence for event in rig.controller.events] == [Defence.FAILURE]


def test_as_much_is_given_up_as_was_asked_for() -> None:
    rig = forced(stored=4)
    loss = rig.forward()
    call = rig.controller.microbatch.alive()[0]
    held = sum(call.held_storages().values()) - sum(call.input_storages().values())
    del call
    with Shortage(asked=2 * held).in_replays_of(rig.net.blocks[4].up):
        rig.backward(loss)
    assert rig.actions == "RRHHR"
    assert same(rig.gradients(), rig.expected(rig.plain()))


def test_units_that_are_used_already_come_last() -> None:
    """A second backward of a graph that was kept: all have been asked, and all can still be replayed."""
    rig = forced(stored=2)
    loss = rig.forward()
    rig.backward(loss, retain_graph=True)
    rig.gradients()
    with Shortage(asked=MUCH).in_replays_of(rig.net.blocks[2].up) as shortage:
        rig.backward(loss)
    assert shortage.failed == 1 and rig.actions == "RRRRR"
    assert same(rig.gradients(), rig.expected(rig.plain()))


@pytest.mark.parametrize("error", [ValueError("other"), RuntimeError("shape '[2]' is invalid")])
def test_other_exceptions_are_nobodys_business(error: Exception) -> None:
    rig = forced(stored=3)
    loss = rig.forward()
    struck = Shortage(error=lambda asked: error).in_replays_of(rig.net.blocks[4].up)
    with struck, pytest.raises(type(error)) as caught:
        rig.backward(loss)
    assert caught.value is error and not rig.controller.events and rig.actions == "HHHRR"


def test_a_failed_replay_leaves_nothing_behind() -> None:
    """Its tensors are gone before it is done again: the traceback of the exception held them."""
    rig = forced(stored=1)
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []
    up = rig.net.blocks[4].up

    def note(_module: object, _args: object, output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() >= 0:
            alive.append(sum(reference() is not None for reference in seen))
            seen.append(weakref.ref(output))

    loss = rig.forward()
    with up.register_forward_hook(note), Shortage().in_replays_of(up):
        rig.backward(loss)
    assert alive == [0, 0]


def test_nothing_left_is_a_typed_error_and_the_update_can_run_again() -> None:
    rig = learnt()
    rig.controller.guard.events.clear()
    loss = rig.forward()
    assert rig.actions == "HHH"
    rig.controller.microbatch.alive()[2].drop()  # as the plan after forward may
    said = r"rank 0 at or after unit blocks\.2: 7 bytes .* whole update"
    with Shortage(times=9, asked=7).in_replays_of(rig.net.blocks[2].up), pytest.raises(MemoryExhausted, match=said):
        rig.backward(loss)
    rig.controller.abort()
    rig.gradients()
    events = list(rig.controller.events)
    assert [event.defence for event in events] == [Defence.ALLOCATION, Defence.ALLOCATION, Defence.FAILURE]
    rig.update()
    assert rig.actions == "RRR"  # the safest there is
    assert same(rig.gradients(), rig.expected(rig.plain()))
    rig.update()
    assert rig.actions == "HHH"  # and plans again, with more room


def test_failures_outside_of_units_are_named_by_the_unit_before() -> None:
    rig = forced(stored=3)
    rig.forward()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB.")
    raised = rig.controller.abort(error)
    assert raised is not None and str(raised).startswith("rank 0 at or after unit blocks.4: 2048 bytes")
    assert rig.controller.abort(ValueError("else")) is None
    assert rig.controller.abort(raised) is None  # it is what is raised already


def test_the_next_plans_leave_the_room_that_was_missing() -> None:
    rig = learnt()
    guard, made = rig.controller.guard, rig.controller.parts.planner
    rig.update()
    before = made.problem_for(Shape(2, 3))
    loss = rig.forward()
    rig.controller.microbatch.alive()[2].drop()
    with Shortage(asked=MUCH // 4).in_replays_of(rig.net.blocks[2].up):
        rig.backward(loss)
    rig.update()
    after = made.problem_for(Shape(2, 3))
    assert before is not None and after is not None
    assert after.budget_bytes == before.budget_bytes - MUCH // 4
    assert rig.controller.metrics()["guard_room_bytes"] == MUCH // 4
    for _ in range(2 * CALM_UPDATES):
        guard.end_update()
    assert guard.metrics()["guard_room_bytes"] == MUCH // 16


def test_each_kind_of_event_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rig = forced(stored=4)
        for _ in range(3):
            loss = rig.forward()
            with Shortage().in_replays_of(rig.net.blocks[4].up):
                rig.backward(loss)
    assert sum("shorter than foreseen" in record.message for record in caplog.records) == 1
    assert rig.controller.metrics()["guard_allocation"] == 3


def test_events_are_bounded() -> None:
    rig = Rig()
    for _ in range(1000):
        rig.controller.guard.failed(MemoryError())
    assert len(rig.controller.events) < 1000 and rig.controller.metrics()["guard_failure"] == 1000


def test_a_room_that_nothing_fits_in_still_gives_a_plan() -> None:
    """All-R is the least there is; no more than that is stored."""
    rig = learnt()
    made = rig.controller.parts.planner
    made.leave_room(100 * MUCH)
    rig.update()
    assert rig.actions == "RRR"
    assert rig.controller.parts.planner.infeasible is None
