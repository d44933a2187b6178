"""Sketches say how far tensors are apart, and taps show every gradient once, in any kind of backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.integration.sketch import WIDTH, GradientTap, Sketcher, Sketches


def _of(sketcher: Sketcher, **tensors: Tensor) -> Sketches:
    found = Sketches(sketcher)
    for name, tensor in tensors.items():
        found.add(name, tensor)
    return found


@pytest.mark.parametrize("shape", [(), (1,), (63,), (3, 100, 7), (65537,), (300, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distances_are_estimated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one, other = (torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(2))
    sketcher = Sketcher()
    estimate = _of(sketcher, x=one).distances(_of(sketcher, x=other))["x"]
    assert estimate == pytest.approx(float((one.double() - other.double()).norm()), rel=4 / math.sqrt(2 * WIDTH))


def test_equal_tensors_have_equal_sketches_whatever_their_strides() -> None:
    tensor = torch.randn(129, 1000)
    sketcher = Sketcher()
    assert torch.equal(sketcher.of(tensor), sketcher.of(tensor.t().contiguous().t()))


@pytest.mark.parametrize("rows", [(0, 1), (5, 250)])
def test_differences_that_cancel_along_rows_are_seen(rows: tuple[int, int]) -> None:
    """As the gradients of a softmax do."""
    tensor = torch.randn(300, 4096)
    other = tensor.clone()
    other[rows[0]] += 0.5
    other[rows[1]] -= 0.5
    sketcher = Sketcher()
    expected = float((tensor - other).norm())
    assert _of(sketcher, x=tensor).distances(_of(sketcher, x=other))["x"] == pytest.approx(expected, rel=0.2)


def test_what_is_missing_is_zero_and_what_is_not_finite_is_infinitely_far() -> None:
    sketcher, tensor = Sketcher(), torch.ones(10)
    assert _of(sketcher, x=tensor).distances(_of(sketcher))["x"] == pytest.approx(math.sqrt(10))
    assert _of(sketcher).distances(_of(sketcher, x=tensor))["x"] == pytest.approx(math.sqrt(10))
    assert _of(sketcher, x=tensor).distances(_of(sketcher, x=tensor * math.nan))["x"] == math.inf


def test_contributions_add_up_and_norms_do_not_cancel() -> None:
    sketcher, tensor = Sketcher(), torch.randn(1000)
    found = _of(sketcher, x=tensor)
    found.add("x", -tensor)
    assert found.distances(_of(sketcher))["x"] == 0.0
    assert found.norms()["x"] == pytest.approx(math.sqrt(2) * float(tensor.norm()), rel=0.2)


def test_random_streams_are_left_alone() -> None:
    before = torch.get_rng_state()
    Sketcher().of(torch.ones(5))
    assert torch.equal(before, torch.get_rng_state())


class Inner(torch.autograd.Function):
    """Differentiates by a backward of its own, as pruned units do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, view: Tensor) -> Tensor:
        ctx.held = x.detach(), weight
        return (x * weight).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.held
        with torch.enable_grad():
            (found,) = torch.autograd.grad(x * weight, weight, gradients[0])
        return None, None, found


def test_a_tap_on_an_engine_s_backward_shows_each_gradient_once_and_changes_nothing() -> None:
    shown: list[Tensor] = []
    weight, x = nn.Parameter(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 4.0])
    tap = GradientTap({"weight": weight}, lambda name, gradient: shown.append(gradient.clone()))
    tap.open_for_engine()
    (Inner.apply(x, weight, weight.expand_as(weight)) + weight.square()).sum().backward()
    tap.close()
    weight.square().sum().backward()
    assert len(shown) == 1 and torch.equal(shown[0], x + 2 * weight.detach())
    assert weight.grad is not None and torch.equal(weight.grad, shown[0] + 2 * weight.detach())


def test_a_tap_on_grad_shows_each_gradient_and_holds_none() -> None:
    shown: list[Tensor] = []
    weight = nn.Parameter(torch.randn(1000))
    tap = GradientTap({"weight": weight}, lambda name, gradient: shown.append(gradient.clone()))
    tap.open_for_grad()
    (found,) = torch.autograd.grad(weight.square().sum(), [weight])
    tap.close()
    assert torch.equal(shown[0], 2 * weight.detach())
    assert found.shape == weight.shape and found.untyped_storage().nbytes() == found.element_size()
    (found,) = torch.autograd.grad(weight.square().sum(), [weight])
    assert torch.equal(found, shown[0]) and len(shown) == 1
