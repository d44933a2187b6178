"""NOTE [Recovery rules] of recovery/unit.py, rule by rule; and everything that a unit may take or give."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_hilore.core.errors import StateChanged
from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, Treatment
from ds_hilore.core.types import Action
from ds_hilore.recovery.unit import RecoveryContext, inside_unit
from tests.recovery.scenes import SCENES, Block, Cube, tensor, weights
from tests.recovery.units import CPU, WAYS, H, R, Units, assert_exact, gradients, same


@pytest.mark.parametrize("name", SCENES)
def test_whatever_a_unit_takes_or_gives_its_gradients_are_the_plain_ones(name: str) -> None:
    assert_exact(SCENES[name])


# -- R1, R2, R7 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [H, R])
def test_r1_outputs_are_those_of_the_plain_function_and_carry_a_graph(action: Action) -> None:
    block, x = weights(CPU, Block()), tensor(CPU)
    out = Units(action).run(block, x)
    assert torch.equal(out, block(x)) and out.requires_grad


def test_r2_one_replay_recovers_the_whole_call() -> None:
    block, x = weights(CPU, Block()), tensor(CPU)
    runs = []
    handle = block.gate.register_forward_hook(lambda *_: runs.append(1))
    units = Units(R)
    units.context.dead_work.enabled = False  # its proof replays more than once
    units.run(block.forward, x).sum().backward()
    handle.remove()
    assert len(runs) == 2  # forward and replay


def test_r7_a_unit_inside_a_unit_makes_no_call_of_its_own() -> None:
    block, x = weights(CPU, Block()), tensor(CPU)
    units = Units(R)
    seen = []

    def outer(a: Tensor) -> Tensor:
        seen.append(inside_unit())
        return units.run(block.forward, a) * 2

    units.run(outer, x).sum().backward()
    assert len(units.calls) == 1
    assert set(seen) == {True} and not inside_unit()


# -- R3: freed at the last use -------------------------------------------------------------------------------------


class Chain:
    """Three steps; notes the storages of what each `sin` saves, for the forward and for each replay."""

    def __init__(self) -> None:
        self.layers = [weights(CPU, nn.Linear(64, 64, bias=False)).requires_grad_(False) for _ in range(3)]
        self.saved: list[list[StorageWeakRef]] = []
        self.alive: list[list[bool]] = []

    def __call__(self, x: Tensor) -> Tensor:
        noted: list[StorageWeakRef] = []
        self.saved.append(noted)
        first = len(self.saved) == 1
        for layer in self.layers:
            x = layer(x)
            noted.append(StorageWeakRef(x.untyped_storage()))
            if first:
                x.register_hook(self._look)  # runs when the sin behind has run, before the layer in front
            x = x.sin()
        return x

    def _look(self, _gradient: Tensor) -> None:
        self.alive.append([not reference.expired() for reference in self.saved[-1]])


@pytest.mark.parametrize("action", [H, R])
def test_r3_each_value_is_gone_right_after_its_node_has_run(action: Action) -> None:
    chain, units = Chain(), Units(action)
    units.run(chain, tensor(CPU)).sum().backward()
    assert chain.alive == [[True, True, False], [True, False, False], [False, False, False]]


def test_r3_nothing_is_left_of_a_call_whose_backward_is_over() -> None:
    chain, units = Chain(), Units(H)
    loss = units.run(chain, tensor(CPU)).sum()
    assert units.calls[0].held_storages()
    loss.backward()
    assert all(reference.expired() for reference in chain.saved[0])
    assert units.calls[0].held_storages() == units.calls[0].input_storages()


@pytest.mark.parametrize("action", [H, R, OFFLOADED, INPUT_OFFLOADED], ids=str)
def test_r3_retain_graph_keeps_the_bundle_and_a_second_backward_without_it_raises(
    action: Action | Treatment,
) -> None:
    block, x = weights(CPU, Block(0.1)), tensor(CPU)
    loss = Units(action).run(block.forward, x).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad for parameter in block.parameters()]
    assert same([2 * gradient for gradient in once], twice)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("action", [H, R])
def test_r3_a_graph_without_backward_takes_its_bundle_along(action: Action) -> None:
    chain, units = Chain(), Units(action)
    out = units.run(chain, tensor(CPU))
    units.calls.clear()
    del out
    assert all(reference.expired() for reference in chain.saved[0])


def test_the_graph_of_an_input_is_not_kept_alive() -> None:
    class Upstream(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = torch.ones(1000)
            ctx.save_for_backward(kept)
            alive.append(StorageWeakRef(kept.untyped_storage()))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 2

    alive: list[StorageWeakRef] = []
    for action in (H, R):
        units = Units(action)
        unused = Upstream.apply(tensor(CPU))
        out = units.run(lambda used, _: used.sin(), tensor(CPU, 1), unused)
        del unused
        assert out.requires_grad and units.calls[0].inputs.held() and alive[-1].expired()


@pytest.mark.parametrize("action", [H, R])
def test_two_hundred_steps_leave_nothing_behind(action: Action) -> None:
    """Objects of ours are as many after 200 steps as after 20, and tensor bytes no more; shapes and plans vary. Tensors
    of other tests (compiled ones) may go meanwhile."""
    block, context = weights(CPU, Block(0.1)), RecoveryContext()

    def census() -> tuple[Counter[str], int]:
        gc.collect()
        objects = [item for item in gc.get_objects() if str(type(item).__module__).startswith("ds_hilore.recovery")]
        tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
        return Counter(type(item).__name__ for item in objects), sum(t.numel() * t.element_size() for t in tensors)

    counts = []
    for step in range(200):
        units = Units(action, context)
        x = tensor(CPU, step, (1 + step % 3, 4 + step % 5, 64))
        out = units.run(block.forward, x)
        if step % 4 == 0:
            units.drop()
        units.calls.clear()
        if step % 7:  # now and then a forward without backward
            out.square().sum().backward(retain_graph=step % 5 == 0)
            block.zero_grad()
        del units, x, out
        if step in (20, 199):
            counts.append(census())
    (objects, tensor_bytes), (later_objects, later_bytes) = counts
    assert later_objects == objects and later_bytes <= tensor_bytes


def test_saved_tensors_that_are_read_twice_cost_one_replay_once_they_are_known() -> None:
    replays = []
    units = Units(R)
    units.context.dead_work.enabled = False

    def function(x: Tensor) -> Tensor:
        replays.append(1)
        return Cube.apply(Cube.apply(x.sin()))

    for _ in range(2):
        replays.clear()
        units.run(function, tensor(CPU)).sum().backward()
    assert len(replays) == 2  # the forward and one replay


# -- R4: store, then recompute -------------------------------------------------------------------------------------


def test_r4_drop_frees_everything_but_the_inputs_at_once() -> None:
    chain, units = Chain(), Units(H)
    out = units.run(chain, tensor(CPU))
    assert not any(reference.expired() for reference in chain.saved[0][:-1])
    units.drop()
    assert all(reference.expired() for reference in chain.saved[0])
    assert units.calls[0].held_storages() == units.calls[0].input_storages()
    out.sum().backward()


# -- R5, R6: versions and generation -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "action", "drop"), [way for way in WAYS if way[1] in (H, R)])
def test_r6_an_input_that_was_changed_in_place_is_named(name: str, action: Action, drop: bool) -> None:
    units = Units(action)
    x = tensor(CPU) * 1
    out = units.run(lambda a: a.sin(), x)
    if drop:
        units.drop()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(StateChanged, match=r"unit unit\.0 \(rank 0\): .*shape \(3, 8, 64\).*changed in place"):
        out.sum().backward()


def test_r6_a_saved_tensor_that_was_changed_in_place_is_named() -> None:
    noted: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        noted.append(x.exp())
        return noted[-1] * 2

    out = Units(H).run(function, tensor(CPU))
    noted[0].detach().mul_(2)
    with pytest.raises(StateChanged, match=r"unit unit\.0 \(rank 0\)"):
        out.sum().backward()


def test_r6_an_edited_output_raises_where_backward_needs_it() -> None:
    out = Units(H).run(lambda x: x.exp(), tensor(CPU))  # exp saves its result
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(StateChanged, match=r"unit unit\.0 \(rank 0\)"):
        out.sum().backward()


@pytest.mark.parametrize(("name", "action", "drop"), WAYS)
def test_r5_a_saved_parameter_that_was_changed_is_noticed(name: str, action: Action, drop: bool) -> None:
    block, units = weights(CPU, Block()), Units(action)
    out = units.run(block.forward, tensor(CPU))
    if drop:
        units.drop()
    with torch.no_grad():
        block.gate.weight.add_(1)
    with pytest.raises(StateChanged, match="parameter"):
        out.sum().backward()


@pytest.mark.parametrize("state", ["up.bias", "scale"])
def test_r5_a_replay_refuses_changed_state_that_nobody_saved(state: str) -> None:
    """A bias is in no bundle, and its edit is no error of the plain model: a replay alone would read the new one."""

    def scene(run: Any, device: torch.device, edit: bool = True) -> tuple[Tensor, list[Tensor]]:
        block, x = weights(device, Block()), tensor(device)
        block.norm.requires_grad_(False)  # else the plain model needs the value of `scale`
        out = run(block.forward, x).sum()
        changed = dict(block.named_parameters()) | dict(block.named_buffers())
        if state == "up.bias":
            with torch.no_grad():
                changed[state].add_(1)
        return out, [x]

    if state == "up.bias":
        assert same(gradients(scene, None), gradients(scene, Units(H)))
        with pytest.raises(StateChanged, match=r"unit unit\.0 .*parameter or buffer"):
            gradients(scene, Units(R))
        return
    block, units = weights(CPU, Block()), Units(R)
    out = units.run(block.forward, tensor(CPU)).sum()
    block.get_buffer(state).mul_(2)
    with pytest.raises(StateChanged, match=r"unit unit\.0 .*parameter or buffer"):
        out.backward()


@pytest.mark.parametrize(("name", "action", "drop"), WAYS)
def test_r6_a_step_between_forward_and_backward_is_noticed(name: str, action: Action, drop: bool) -> None:
    units = Units(action)
    out = units.run(lambda a: a.sin(), tensor(CPU))
    if drop:
        units.drop()
    units.context.generation += 1
    with pytest.raises(StateChanged, match=r"unit unit\.0 \(rank 0\): parameters were stepped or loaded"):
        out.sum().backward()


# -- more ----------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_exact_too() -> None:
    found = []
    for units in (None, Units(H), Units(R)):
        x = tensor(CPU)

        def function(a: Tensor) -> Tensor:
            return F.silu((a * 2).sin() * a).square()

        out = function(x * 1) if units is None else units.run(function, x * 1)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([x.grad])
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_settling_happens_once_before_anything_is_unpacked() -> None:
    units = Units(H)
    order: list[str] = []

    def settle() -> None:
        order.append("settle")
        units.context.settled = True
        units.drop()

    units.context.settle = settle
    units.context.settled = False

    def function(x: Tensor) -> Tensor:
        order.append("run")
        return x.sin().exp()

    units.run(function, tensor(CPU)).sum().backward()
    assert order == ["run", "settle", "run"]


def test_parameters_are_not_counted_as_state() -> None:
    layer, units = weights(CPU, nn.Linear(64, 64)), Units(H)
    x = tensor(CPU)
    _out = units.run(layer.forward, x)
    assert sum(units.calls[0].held_storages().values()) == x.untyped_storage().nbytes()
