"""Ranks whose collectives a replay repeats agree on who replays: no more is replayed after that, whatever comes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ds_hilore.core.treatment import treatment_of
from ds_hilore.core.types import Action, Plan, UnitId
from tests.runtime.rig import Net, Rig, planner, same
from tests.runtime.test_levels import Rising

BLOCKS = 4
MUCH = 1 << 30


class Others:
    """Ranks that must replay some units. `asked`: what this rank would store, of each microbatch."""

    def __init__(self, replayed: Iterable[int] = ()) -> None:
        self.replayed = {UnitId(f"blocks.{number}") for number in replayed}
        self.asked: list[frozenset[UnitId]] = []
        self.closed = False

    def stored(self, plan: Plan, calls: Iterable[UnitId]) -> frozenset[UnitId]:
        mine = {call for call in calls if treatment_of(plan, call).action is not Action.RECOMPUTE}
        self.asked.append(frozenset(mine))
        return frozenset(mine - self.replayed)

    def close(self) -> None:
        self.closed = True


def learnt(others: Others | None) -> tuple[Rig, Rising]:
    """A rig whose own plan stores everything, and its meter."""
    meter = Rising()
    rig = Rig(Net(BLOCKS), planner=planner(2.0), meter=meter, agreement=others)
    meter.script[:] = [MUCH]
    rig.learn()
    return rig, meter


def test_what_others_must_replay_is_replayed() -> None:
    others = Others(replayed=[1, 2])
    rig, _ = learnt(others)
    asked = len(others.asked)
    rig.update()
    assert rig.actions == "HRRH" and len(others.asked) == asked + 1, "once per microbatch"
    assert len(others.asked[-1]) == BLOCKS, "the plan is this rank's own"
    assert same(rig.gradients(), rig.expected(rig.plain()))


def test_a_unit_is_stored_in_the_calls_that_were_agreed_on() -> None:
    """A second forward of the same microbatch runs calls that nobody knew of."""
    rig, _ = learnt(Others())
    first, second = rig.forward(1), rig.forward(2)
    rig.backward(first + second)
    assert rig.actions == "HHHHRRRR"
    assert same(rig.gradients(), rig.expected(rig.plain(1), rig.plain(2)))


def run_short(rig: Rig, meter: Rising, when: str) -> None:
    """A microbatch whose memory is taken by somebody else, from its second unit or from its loss on."""
    meter.looks, meter.at, meter.rises_to = 0, 1 if when == "forward" else BLOCKS, 3 * MUCH
    loss = rig.forward()
    meter.level = 3 * MUCH
    rig.backward(loss)


@pytest.mark.parametrize("when", ["forward", "loss"])
def test_memory_that_runs_short_later_adds_no_replays(when: str) -> None:
    rig, meter = learnt(Others())
    run_short(rig, meter, when)
    assert rig.actions == "HHHH" and not rig.controller.events
    assert same(rig.gradients(), rig.expected(rig.plain()))


@pytest.mark.parametrize("when", ["forward", "loss"])
def test_where_nobody_need_agree_it_does(when: str) -> None:
    """Or the test above would show nothing."""
    rig, meter = learnt(None)
    run_short(rig, meter, when)
    assert "R" in rig.actions and rig.controller.events


def test_the_group_is_given_back_with_the_controller() -> None:
    others = Others()
    Rig(agreement=others).controller.close()
    assert others.closed
