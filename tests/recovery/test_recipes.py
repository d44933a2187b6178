"""Recipes are proven before they are used; whatever a unit computes, its gradients are the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hilore.recovery import recipes
from ds_hilore.recovery.recipes import MIN_DERIVED_BYTES
from ds_hilore.recovery.rules import RULES
from ds_hilore.recovery.unit import RecoveryContext
from tests.recovery.programs import SHAPE, Step, program, steps_of_programs
from tests.recovery.scenes import Block, tensor, weights
from tests.recovery.units import CPU, WAYS, H, R, Run, Scene, Units, assert_exact, gradients, same


class Weigh(torch.autograd.Function):
    """x * w; notes the strides of x as backward reads it."""

    strides: list[tuple[int, ...]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, strides: list[tuple[int, ...]]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.strides = strides
        strides.append(x.stride())
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        ctx.strides.append(x.stride())
        return grads[0] * w, grads[0] * x, None


def _scene(function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = SHAPE) -> Scene:
    """A function whose result is saved by a product with a second leaf."""

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x = tensor(device, shape=shape)
        weight = nn.Parameter(tensor(device, 1, tuple(function(x).shape)).detach())
        return run(lambda a: function(a) * weight, x * 1).sum(), [x, weight]

    return scene


# -- proofs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [H, R])
def test_a_recipe_that_is_not_bitwise_is_rejected(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    def wrong(builder: Any, node: Any, edge: Any, depth: int) -> Any:
        operand = builder.operand(node, "self", 0, depth)
        return None if operand is None else ("wrong", lambda x: F.silu(x) * (1 + 2**-20), (operand,))

    monkeypatch.setitem(RULES, "SiluBackward0", wrong)
    monkeypatch.setattr(recipes, "COSTLY", frozenset())  # tried in replays too
    scene = _scene(F.silu)
    units = Units(action)
    assert same(gradients(scene, None), gradients(scene, units))
    assert units.context.proofs.rejected() == 1
    assert same(gradients(scene, None), gradients(scene, units)), "nor is it used later"


def test_a_recipe_that_raises_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(builder: Any, node: Any, edge: Any, depth: int) -> Any:
        return "wrong", lambda x: x[999], (builder.operand(node, "self", 0, depth),)

    monkeypatch.setitem(RULES, "SiluBackward0", wrong)
    units = Units(H)
    assert same(gradients(_scene(F.silu), None), gradients(_scene(F.silu), units))
    assert units.context.proofs.rejected() == 1


def test_a_recipe_with_other_strides_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_layout(builder: Any, node: Any, edge: Any, depth: int) -> Any:
        operand = builder.operand(node, "self", 0, depth)
        return "other", lambda x: F.silu(x).transpose(0, 1).contiguous().transpose(0, 1), (operand,)

    monkeypatch.setitem(RULES, "SiluBackward0", other_layout)
    units = Units(H)
    assert same(gradients(_scene(F.silu), None), gradients(_scene(F.silu), units))
    assert units.context.proofs.rejected() == 1


#: name -> what is saved of a [rows, tokens, width] tensor, seen as heads of 64
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed copy": lambda x: _heads(x).clone(memory_format=torch.contiguous_format),
    "function of a transposed copy": lambda x: _heads(x).clone(memory_format=torch.contiguous_format).sigmoid(),
    "view of a transposed copy": lambda x: _heads(x).clone(memory_format=torch.contiguous_format).flatten(2),
    "reshape": lambda x: _heads(F.silu(x)).reshape(-1, 64),
    "chunk": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "expanded": lambda x: F.silu(x[:, :1]).expand_as(x),
}


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, 64).transpose(1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [(40, 1, 64), (1, 8, 256), (40, 5, 256)], ids=str)
def test_a_recipe_proven_on_one_shape_gives_bits_and_strides_on_others(layout: str, first: tuple[int, ...]) -> None:
    """With one head and one token a transposed tensor has the layout of its copy: the proof there says little."""
    strides: list[tuple[int, ...]] = []
    context = RecoveryContext()
    for shape in (first, (40, 5, 256), (1, 8, 256), (40, 1, 64), (3, 7, 128)):

        def scene(run: Run, device: torch.device, shape: tuple[int, ...] = shape) -> tuple[Tensor, list[Tensor]]:
            x = tensor(device, 0, shape)
            weight = nn.Parameter(torch.ones_like(LAYOUTS[layout](x)).contiguous())
            return run(lambda a: Weigh.apply(LAYOUTS[layout](a), weight, strides), x * 1).sum(), [x, weight]

        plain = gradients(scene, None)
        for _, action, drop in WAYS:
            strides.clear()
            assert same(plain, gradients(scene, Units(action, context), drop)), shape
            assert len(set(strides)) == 1, strides


def test_dtype_may_change_between_calls() -> None:
    context = RecoveryContext()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):

        def scene(run: Run, device: torch.device, dtype: torch.dtype = dtype) -> tuple[Tensor, list[Tensor]]:
            x, weight = tensor(device).to(dtype).detach().requires_grad_(), tensor(device, 1).to(dtype)
            return run(lambda a: F.silu(a * 2 + a) * weight, x * 1).sum(), [x]

        for _, action, drop in WAYS:
            assert same(gradients(scene, None), gradients(scene, Units(action, context), drop))


def test_layers_of_one_class_may_differ_in_a_norms_epsilon() -> None:
    """The kernel does not save it; what was found for one layer must not be taken for another."""
    context = RecoveryContext()
    for eps in (1e-5, 1e-6, 1e-12, 1e-3):

        def scene(run: Run, device: torch.device, eps: float = eps) -> tuple[Tensor, list[Tensor]]:
            norm, x = nn.LayerNorm(64, eps=eps).to(device), tensor(device)
            weight = nn.Parameter(tensor(device, 1).detach())
            return run(lambda a: norm(a) * weight, x * 1e-3).sum(), [x, weight]

        for _, action, drop in WAYS:
            assert same(gradients(scene, None), gradients(scene, Units(action, context), drop)), eps


def test_numbers_that_change_from_call_to_call_need_no_new_proof() -> None:
    context = RecoveryContext()
    counts = set()
    for step in range(5):
        factor = 1.0 + step / 7
        scene = _scene(lambda x, factor=factor: x * factor)  # type: ignore[misc]
        assert same(gradients(scene, None), gradients(scene, Units(H, context)))
        counts.add((len(context.proofs.proven), len(context.proofs._names)))
    assert len(counts) == 1


def test_an_edit_in_a_later_call_only_does_not_meet_an_old_proof() -> None:
    """The proof is from a call without edit; autograd's node looks the same in both."""
    context = RecoveryContext()
    for edited in (False, True):

        def function(x: Tensor, w: Tensor, edited: bool = edited) -> Tensor:
            y = F.silu(x)
            if edited:
                with torch.no_grad():
                    y.mul_(2)
            return y * w

        def scene(run: Run, device: torch.device, function: Any = function) -> tuple[Tensor, list[Tensor]]:
            x, w = tensor(device), tensor(device, 1)
            return run(function, x * 1, w).sum(), [x, w]

        for _, action, drop in WAYS:
            assert same(gradients(scene, None), gradients(scene, Units(action, context), drop)), edited


# -- what is worth it ----------------------------------------------------------------------------------------------


def _stored(function: Callable[..., Any], *args: Any) -> int:
    units = Units(H)
    _out = units.run(function, *args)
    return sum(units.calls[0].held_storages().values())


def test_a_gated_mlp_holds_base_tensors_only() -> None:
    """Of norm output, its scaled form, gate, silu(gate), up, product only gate and up are held (and small things)."""
    block = weights(CPU, Block())
    x = tensor(CPU, shape=SHAPE)
    numbers = SHAPE[0] * SHAPE[1]
    statistics, buffer = 4 * numbers * 2, 4 * 64
    assert _stored(block.forward, x) == 4 * numbers * (64 + 128 + 128) + statistics + buffer


def test_small_tensors_are_held() -> None:
    rows = MIN_DERIVED_BYTES // 4
    for count, held in ((rows, 1), (rows - 1, 2)):
        assert _stored(lambda x: F.silu(x) * x, torch.ones(count, requires_grad=True) * 1) == 4 * count * held


def test_a_slot_without_hope_is_looked_at_once() -> None:
    """`hopeless` is a matter of memory only: another call that puts a derivable tensor into the slot holds it."""
    context = RecoveryContext()
    hopeless, derivable = _scene(lambda x: x.cumsum(-1)), _scene(F.silu)
    for scene in (hopeless, derivable, hopeless):
        assert same(gradients(scene, None), gradients(scene, Units(H, context)))


# -- whatever a unit computes --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    steps=steps_of_programs(most=9),
    outputs=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    frozen=st.booleans(),
    unused=st.booleans(),
)
def test_random_functions_have_the_plain_gradients(
    steps: list[Step], outputs: list[int], frozen: bool, unused: bool
) -> None:
    function = program(steps, outputs)

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x, y = tensor(device, shape=SHAPE), tensor(device, 1, SHAPE)
        weight = nn.Parameter(0.2 * tensor(device, 2, (64, 64)).detach(), requires_grad=not frozen)
        results = run(function, x * 1, y * 1, weight)
        used = results[:1] if unused else results
        loss = sum((result.square().sum() for result in used), torch.zeros((), device=device))
        return loss + 0 * x.sum(), [x, y, weight]

    try:
        gradients(scene, None)
    except RuntimeError:
        assume(False)  # plain autograd refuses an in-place edit of what it saved
    assert_exact(scene)
