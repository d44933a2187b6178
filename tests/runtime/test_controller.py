"""The microbatch state machine: phases, ends, and what is freed when. On torch layers, without any engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hilore.core.errors import StateChanged
from ds_hilore.core.types import Action, UnitId
from ds_hilore.integration.checkpoint import DeepSpeedCheckpointPatch, checkpoint
from ds_hilore.runtime.current import forward_of
from ds_hilore.runtime.microbatch import Phase
from ds_hilore.runtime.parts import Stage
from tests.runtime.rig import Block, Net, Rig, facts, planner, same, told

STORE, RECOMPUTE = Action.STORE, Action.RECOMPUTE


def test_phases_of_one_microbatch() -> None:
    rig = Rig()
    controller = rig.controller
    assert controller.phase is Phase.IDLE and controller.starts_microbatch
    loss = rig.forward()
    assert controller.phase is Phase.FORWARD and not controller.context.settled and not controller.starts_microbatch
    loss.backward()
    assert controller.phase is Phase.BACKWARD and controller.context.settled and controller.starts_microbatch
    controller.end_backward()
    assert controller.phase is Phase.IDLE and controller.context.settled
    assert rig.actions == "RRR"  # what ran can still be read


def test_two_forwards_before_one_backward_are_one_microbatch() -> None:
    rig = Rig()
    rig.controller.force(STORE)
    one = rig.forward(seed=1)
    plan = rig.controller.plan
    two = rig.forward(seed=2)
    assert rig.controller.plan is plan and rig.actions == "HHHHHH"
    assert UnitId("blocks.2", 1) in rig.controller.microbatch.ran
    expected = rig.expected(rig.plain(1), rig.plain(2))
    rig.backward(one + two)
    torch.testing.assert_close(rig.gradients(), expected)


def test_two_forwards_then_two_backwards() -> None:
    rig = Rig()
    one, two = rig.forward(seed=1), rig.forward(seed=2)
    for loss, seed in ((one, 1), (two, 2)):
        rig.backward(loss)
        assert same(rig.gradients(), rig.expected(rig.plain(seed)))


def test_a_dropped_graph_begins_a_new_microbatch() -> None:
    rig = Rig()
    loss = rig.forward()
    assert len(rig.controller.microbatch.alive()) == 3
    del loss
    assert rig.controller.starts_microbatch
    loss = rig.forward()
    assert rig.controller.microbatch.ran.keys() == {UnitId(f"blocks.{k}") for k in range(3)}
    assert rig.controller.phase is Phase.FORWARD
    rig.backward(loss)


def test_units_that_save_nothing_stay_in_their_microbatch() -> None:
    """Frozen layers below the first adapter leave no trace in the graph; each would begin a microbatch of its own."""
    rig = Rig(Net(blocks=4, frozen=3))
    rig.controller.announce_update([facts(1), facts(2)])
    for number in (1, 2):
        loss = rig.forward()
        assert len(rig.controller.microbatch.alive()) == 1
        assert rig.actions == "RRRR" and told(rig) == number
        rig.backward(loss)
        assert same(rig.gradients(), rig.expected(rig.plain()))


def test_a_model_without_anything_to_recover() -> None:
    rig = Rig(Net(blocks=2, frozen=2))
    loss = rig.forward()
    assert not loss.requires_grad
    rig.controller.note_coefficients(torch.ones(2, 3), None)
    rig.controller.begin_backward()  # coefficients, and no unit to settle
    rig.controller.end_update()
    assert rig.controller.stage is Stage.MEASURE_R and rig.controller.measurements.roster == []


def test_without_grad_and_inside_a_unit_calls_are_plain() -> None:
    rig = Rig()
    with torch.no_grad(), forward_of(rig.controller):
        rig.net(rig.inputs())
    assert rig.controller.phase is Phase.IDLE and not rig.controller.microbatch.ran

    def outer(x: Tensor) -> Tensor:
        return rig.controller.run_unit(rig.net.blocks[0].forward, (x,), {})

    with forward_of(rig.controller):
        rig.controller.run_unit(outer, (rig.inputs(),), {})
    (unit,) = rig.controller.microbatch.ran
    assert "outer" in unit.name


class Nested(nn.Module):
    """A unit whose own code checkpoints a part of it."""

    def __init__(self, through: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self._through = through

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self._through(self.first.forward, x))


@pytest.mark.parametrize("path", ["ours", "deepspeed's"])
@pytest.mark.parametrize("action", [STORE, RECOMPUTE])
def test_checkpoint_calls_within_a_unit_are_part_of_it(path: str, action: Action) -> None:
    from deepspeed import checkpointing as deepspeed_checkpointing

    DeepSpeedCheckpointPatch.apply()
    try:
        through = checkpoint if path == "ours" else deepspeed_checkpointing.checkpoint
        net, oracle = Net(), Net()
        net.blocks = nn.ModuleList([Nested(through), Nested(through)])
        oracle.blocks = nn.ModuleList([Nested(lambda function, x: function(x)) for _ in range(2)])
        oracle.load_state_dict(net.state_dict())
        expected = Rig(oracle).expected(Rig(oracle).plain())
        rig = Rig(net)
        rig.controller.force(action)
        rig.backward(rig.forward())
        assert len(rig.actions) == 2 and same(rig.gradients(), expected)
    finally:
        DeepSpeedCheckpointPatch.undo()


def test_the_next_forward_finishes_what_a_direct_backward_left() -> None:
    rig = Rig()
    rig.forward().backward()
    assert rig.controller.phase is Phase.BACKWARD
    first = rig.controller.microbatch
    loss = rig.forward()
    assert rig.controller.phase is Phase.FORWARD and rig.controller.microbatch is not first
    loss.backward()
    rig.controller.end_update()
    assert rig.controller.phase is Phase.IDLE


@pytest.mark.parametrize("action", [STORE, RECOMPUTE])
def test_retained_graph(action: Action) -> None:
    rig = Rig()
    rig.controller.force(action)
    loss = rig.forward()
    expected = rig.expected(rig.plain())
    rig.backward(loss, retain_graph=True)
    calls = len(rig.controller.microbatch.alive())
    assert same(rig.gradients(), expected)
    rig.backward(loss)
    assert same(rig.gradients(), expected)
    gc.collect()
    assert (calls, rig.controller.microbatch.alive()) == (3, [])  # freed at the last use
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("action", [STORE, RECOMPUTE])
def test_a_step_between_forward_and_backward_is_noticed(action: Action) -> None:
    rig = Rig()
    rig.controller.force(action)
    loss = rig.forward()
    rig.controller.end_update()
    with pytest.raises(StateChanged, match=r"unit blocks\.2 \(rank 0\)"):
        loss.backward()


def test_an_aborted_microbatch_is_forgotten() -> None:
    rig = Rig()
    controller = rig.controller
    controller.announce_update([facts(1), facts(2)])
    rig.backward(rig.forward())
    left_over = rig.forward()
    controller.abort()
    assert controller.phase is Phase.IDLE and controller.context.settled and controller.starts_microbatch
    assert not controller.microbatch.ran and not controller.coefficients
    rig.gradients()
    seen = []
    for _ in range(2):  # the whole update again, announced once
        rig.backward(rig.forward())
        seen.append(told(rig))
    assert seen == [1, 2]
    torch.testing.assert_close(rig.gradients(), rig.expected(rig.plain(), rig.plain()))
    del left_over


class Host:
    """Makes the calls of a host by name; checks every backward against the plain model."""

    def __init__(self) -> None:
        self.rig = Rig(Net(blocks=2), planner=planner(1.5))
        self.waiting: list[tuple[Tensor, int]] = []  # losses without their backward yet, and their seeds
        self.seed = 0

    def forward(self) -> None:
        self.seed += 1
        self.waiting.append((self.rig.forward(self.seed), self.seed))

    def observed_forward(self) -> None:
        self.forward()
        loss, seed = self.waiting.pop()
        logps = loss.reshape(1)
        self.rig.controller.observe(logps, None)
        self.waiting.append((logps.sum(), seed))

    def paused_forward(self) -> None:
        with self.rig.controller.paused():
            self.forward()

    def backward(self, direct: bool = False, retain: bool = False) -> None:
        if not self.waiting:
            return
        loss, seed = self.waiting.pop()
        for retain_graph in [True, False] if retain else [False]:
            if direct:
                loss.backward(retain_graph=retain_graph)
            else:
                self.rig.backward(loss, retain_graph=retain_graph)
            assert same(self.rig.gradients(), self.rig.expected(self.rig.plain(seed)))

    def direct_backward(self) -> None:
        self.backward(direct=True)

    def two_backwards(self) -> None:
        self.backward(retain=True)

    def dropped_graph(self) -> None:
        self.waiting.clear()

    def step(self) -> None:
        self.waiting.clear()
        self.rig.controller.end_update()

    def abort(self) -> None:
        self.waiting.clear()
        self.rig.controller.abort()

    def force_store(self) -> None:
        self.rig.controller.force(STORE)

    def force_nothing(self) -> None:
        self.rig.controller.force(None)


CALLS = [name for name in vars(Host) if not name.startswith("_")]


@given(st.lists(st.sampled_from([*CALLS, "forward", "backward", "step"]), min_size=2, max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_order_of_calls_gives_plain_gradients(calls: list[str]) -> None:
    """Whatever a host does, in whatever stage: gradients are the plain ones, bit for bit, and phases fit together."""
    host = Host()
    controller = host.rig.controller
    for call in [*calls, "step", "forward", "backward"]:
        getattr(host, call)()
        assert controller.context.settled == (controller.phase is not Phase.FORWARD)
        assert controller.phase is not Phase.FORWARD or controller.microbatch.ran
    assert controller.phase is Phase.IDLE
