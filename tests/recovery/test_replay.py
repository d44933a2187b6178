"""Replays: what they must find again, and how they end (recovery/replay.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hilore.core.errors import RecoveryMismatch
from tests.recovery.scenes import Block, tensor, weights
from tests.recovery.units import CPU, R, Run, Units, assert_exact


class Fickle:
    """Does something else in its second and later runs."""

    def __init__(self, first: Callable[[Tensor], Tensor], later: Callable[[Tensor], Tensor]) -> None:
        self.first, self.later = first, later
        self.runs = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (self.first if self.runs == 1 else self.later)(x)


_WEIGHT = torch.nn.Parameter(torch.ones(64))
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "fewer tensors": (lambda x: x.sin().cos(), lambda x: x.sin(), r"the replay saved 1 tensors.* at least 2"),
    "another shape": (lambda x: x.sin().cos(), lambda x: x[:1].sin().cos(), r"tensor 0 .*\(1, 8, 64\).*\(3, 8, 64\)"),
    "another shape later": (lambda x: x.sin().cos(), lambda x: x.sin()[:1].cos(), r"tensor 1 .*\(1, 8, 64\)"),
    "another dtype": (lambda x: x.sin(), lambda x: x.double().sin(), r"tensor 0 .*float64.*float32"),
    "a parameter in place of a tensor": (
        lambda x: x * x.detach(),
        lambda x: x * _WEIGHT,
        r"tensor 0 .*a parameter of shape \(64,\)",
    ),
    "a tensor in place of a parameter": (
        lambda x: (x.detach() * _WEIGHT).sin(),
        lambda x: (x * torch.ones(64)).sin().cos(),
        r"saved tensor",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_replay_that_saves_something_else_names_unit_slot_and_difference(name: str) -> None:
    first, later, words = CHANGES[name]
    out = Units(R).run(Fickle(first, later), tensor(CPU) * 1)
    with pytest.raises(RecoveryMismatch, match=r"unit unit\.0 \(rank 0\): ") as caught:
        out.sum().backward()
    assert caught.match(words)
    assert caught.match("the same work twice")


def test_a_unit_that_catches_exceptions_does_not_swallow_the_early_stop() -> None:
    ends: list[str] = []

    def function(x: Tensor) -> Tensor:
        try:
            y = x.sin().exp()  # exp saves its result: the last slot
            ends.append("through")
        except Exception:
            ends.append("swallowed")
            return x
        return y + 1

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x = tensor(device)
        return run(function, x * 1).sum(), [x]

    assert_exact(scene)
    assert "swallowed" not in ends


def test_not_even_one_that_catches_everything() -> None:
    caught: list[str] = []

    def function(x: Tensor) -> Tensor:
        try:
            y = x.sin().exp()
        except BaseException as stop:
            caught.append(type(stop).__name__)
            y = x.cos().exp()  # and goes on to save more
        return y + 1

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x = tensor(device)
        return run(function, x * 1).sum(), [x]

    assert_exact(scene)
    assert set(caught) == {"EarlyStop"}


def test_a_mismatch_that_the_unit_catches_is_raised_all_the_same() -> None:
    def later(x: Tensor) -> Tensor:
        try:
            x[:1].sin()
        except Exception:
            return x.cos().cos()  # right shapes from here on
        raise AssertionError("a mismatch was to be found")

    out = Units(R).run(Fickle(lambda x: x.sin().cos(), later), tensor(CPU) * 1)
    with pytest.raises(RecoveryMismatch, match=r"saved tensor 0 .*\(1, 8, 64\)"):
        out.sum().backward()


def test_an_error_of_the_unit_itself_comes_out_of_backward() -> None:
    def later(x: Tensor) -> Tensor:
        raise LookupError("the unit's own")

    out = Units(R).run(Fickle(lambda x: x.sin(), later), tensor(CPU) * 1)
    with pytest.raises(LookupError, match="the unit's own"):
        out.sum().backward()


def test_a_replay_ends_right_after_the_last_slot_that_is_no_parameter() -> None:
    block, x = weights(CPU, Block()).requires_grad_(False), tensor(CPU)
    seen: list[str] = []
    for name, child in block.named_children():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))  # type: ignore[misc]
    units = Units(R)
    units.context.dead_work.enabled = False
    out = units.run(block.forward, x)
    assert seen == ["norm", "gate", "up", "down", "drop"]
    seen.clear()
    out.sum().backward()
    assert seen == ["norm", "gate", "up"]  # `down` saves nothing but its weight


def test_a_replay_leaves_no_hook_behind_even_when_it_fails() -> None:
    block, x = weights(CPU, Block()).requires_grad_(False), tensor(CPU)
    original = block.up.forward
    units = Units(R)
    out = units.run(block.forward, x)

    def broken(*args: Any) -> Tensor:
        raise LookupError

    block.up.forward = broken  # type: ignore[method-assign]
    with pytest.raises(LookupError):
        out.sum().backward()
    block.up.forward = original  # type: ignore[method-assign]
    assert all(not child._forward_hooks and not child._forward_pre_hooks for child in block.modules())


def test_another_attention_kernel_in_backward_is_a_mismatch_not_a_wrong_gradient() -> None:
    """The choice of kernel is global state that a replay does not restore: it saves other tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = tensor(CPU, shape=(1, 2, 8, 16))
    with sdpa_kernel(SDPBackend.MATH):
        out = Units(R).run(lambda a: F.scaled_dot_product_attention(a, a * 2, a * 3), q * 1)
    with pytest.raises(RecoveryMismatch, match=r"unit unit\.0"):
        out.sum().backward()
