"""The gated product against what autograd makes of `activation(x) * up`, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hilore.recovery.gated import Gate, gated_product

GATES = [Gate(), Gate("none"), Gate("tanh")]
SHAPES = [(7,), (3, 5), (2, 9, 33), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple((3 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(3))  # type: ignore[return-value]


def run(function: Any, x: Tensor, up: Tensor, grad: Tensor, wants: tuple[bool, bool] = (True, True)) -> list[Any]:
    x, up = x.detach().requires_grad_(wants[0]), up.detach().requires_grad_(wants[1])
    out = function(x, up)
    out.backward(grad)
    return [out.detach(), x.grad, up.grad]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a is b is None or (a.stride() == b.stride() and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bitwise(gate: Gate, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = operands(shape, dtype)
    plain = run(lambda x, up: gate.apply(x) * up, *given)
    assert same(run(lambda x, up: gated_product(x, up, gate), *given), plain)


@pytest.mark.parametrize("wants", [(True, False), (False, True)], ids=["gate only", "up only"])
def test_one_operand_needs_no_gradient(wants: tuple[bool, bool]) -> None:
    given = operands((4, 6), torch.float32)
    plain = run(lambda x, up: Gate().apply(x) * up, *given, wants)
    assert same(run(lambda x, up: gated_product(x, up, Gate()), *given, wants), plain)


def test_zeros_infinities_and_nan() -> None:
    given = operands((4, 6), torch.float32)
    for tensor, value in zip(given, (float("inf"), float("nan"), 0.0)):
        tensor[0] = value
    plain = run(lambda x, up: Gate().apply(x) * up, *given)
    assert same(run(lambda x, up: gated_product(x, up, Gate()), *given), plain)


def test_halves_of_one_projection() -> None:
    joint, grad = torch.randn(5, 12), torch.randn(5, 6)

    def through(function: Any) -> list[Tensor]:
        leaf = joint.detach().requires_grad_()
        out = function(*leaf.chunk(2, dim=-1))
        out.backward(grad)
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    assert same(through(lambda x, up: gated_product(x, up, Gate())), through(lambda x, up: Gate().apply(x) * up))


def test_operands_that_differ_in_dtype_or_shape_are_left_to_torch() -> None:
    x, up = torch.randn(4, 6, requires_grad=True), torch.randn(6, dtype=torch.float64)
    assert gated_product(x, up, Gate()).grad_fn.name() == "MulBackward0"  # type: ignore[union-attr]


def test_incoming_gradient_and_operands_are_left_as_they_were() -> None:
    x, up, grad = operands((3, 4), torch.float32)
    before = [tensor.clone() for tensor in (x, up, grad)]
    run(lambda x, up: gated_product(x, up, Gate()), x, up, grad)
    assert all(torch.equal(a, b) for a, b in zip((x, up, grad), before))


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_second_derivatives(gate: Gate) -> None:
    x, up, _ = operands((2, 3), torch.float64)
    x.requires_grad_(), up.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, up: gated_product(x, up, gate), (x, up))


def test_retained_graph_gives_the_same_twice() -> None:
    x, up, grad = operands((3, 4), torch.float32)
    x.requires_grad_()
    out = gated_product(x, up, Gate())
    (first,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (second,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(first, second)


def test_saves_its_two_operands_only() -> None:
    saved: list[Tensor] = []
    x, up, _ = operands((3, 4), torch.float32)
    x.requires_grad_(), up.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda held: held):
        gated_product(x, up, Gate())
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr(), up.data_ptr()]
