"""Forward under watch: more held than foreseen turns later units to replays, and gradients stay the plain ones."""

from __future__ import annotations

import pytest

from ds_hilore.core.types import UnitId
from ds_hilore.runtime.guard import Defence
from tests.runtime.rig import Net, Rig, StubMeter, planner, same

MUCH = 1 << 30
MB = 1 << 20
BLOCKS = 4


class Rising(StubMeter):
    """Says a level that rises at the `at`-th look of a forward."""

    looks = 0
    at = BLOCKS + 1
    rises_to = 0

    def quick_level_bytes(self) -> int:
        self.looks += 1
        return self.rises_to if self.looks > self.at else self.level


def learnt(multiple: float = 2.0) -> tuple[Rig, Rising]:
    """A rig that follows its plans and stores everything, and its meter."""
    meter = Rising()
    rig = Rig(Net(BLOCKS), planner=planner(multiple), meter=meter)
    meter.script[:] = [MUCH]
    rig.learn()
    rig.update()
    rig.gradients()
    assert rig.actions == "HHHH" and meter.looks == BLOCKS
    meter.looks = 0
    return rig, meter


@pytest.mark.parametrize(("at", "left"), [(0, "RRRR"), (1, "HRRR"), (3, "HHHR"), (BLOCKS, "HHHH")])
def test_later_units_are_replayed(at: int, left: str) -> None:
    rig, meter = learnt()
    meter.at, meter.rises_to = at, 3 * MUCH
    rig.update()
    assert rig.actions == left
    assert same(rig.gradients(), rig.expected(rig.plain()))
    events = [event for event in rig.controller.events if event.defence is Defence.FORWARD]
    assert len(events) == (at < BLOCKS)
    if events:
        assert events[0].unit == UnitId(f"blocks.{at}") and events[0].short_bytes > 0
        assert list(events[0].dropped) == [UnitId(f"blocks.{k}") for k in range(at, BLOCKS)]


def test_as_many_as_it_takes() -> None:
    """One byte over what the plan left free: one unit is enough."""
    rig, meter = learnt()
    meter.at, meter.rises_to = 1, rig.controller.guard.levels.allowed[1] + 1
    rig.update()
    assert rig.controller.events[0].short_bytes == 1
    assert sorted(rig.actions) == ["H", "H", "H", "R"] and rig.actions[0] == "H"
    assert same(rig.gradients(), rig.expected(rig.plain()))


def test_what_the_budget_allows_is_no_shortage() -> None:
    rig, meter = learnt()
    meter.at, meter.rises_to = 1, MUCH // 2
    rig.update()
    assert rig.actions == "HHHH" and not rig.controller.events


def test_a_meter_that_means_nothing_is_not_asked() -> None:
    rig, meter = learnt()
    meter.exact = False
    meter.at, meter.rises_to = 0, 3 * MUCH
    rig.update()
    assert rig.actions == "HHHH" and meter.looks == 0


def test_units_that_nobody_planned_for_are_not_watched() -> None:
    """Two forwards before one backward: the second one's calls are no units of the plan."""
    rig, meter = learnt()
    meter.at, meter.rises_to = BLOCKS, 3 * MUCH
    losses = [rig.forward(), rig.forward(1)]
    rig.backward(losses[0] + losses[1])
    assert same(rig.gradients(), rig.expected(rig.plain(), rig.plain(1)))
    assert not [event for event in rig.controller.events if event.defence is Defence.FORWARD]


def test_a_shortage_is_left_room_for() -> None:
    rig, meter = learnt()
    before = rig.controller.parts.planner.margin_bytes
    meter.at, meter.rises_to = 1, 3 * MUCH
    rig.update()
    assert rig.controller.parts.planner.margin_bytes > before == 0
