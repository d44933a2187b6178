"""Gated MLPs in less memory: activation(gate) * up as one autograd function that saves gate and up only.

What autograd does by itself saves four tensors of the MLP's width (gate, its activation, up, and the product for the
next projection) and holds six of them in the backward of the product: that, not the loss, sets the peak of a replay
(design fact 13). This function holds four at its peak and gives the same bits, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """An activation with its derivative, as torch's own autograd computes both. `gelu`: None, "none" or "tanh"."""

    gelu: str | None = None

    @property
    def name(self) -> str:
        return "silu" if self.gelu is None else f"gelu_{self.gelu}"

    def apply(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.gelu is None else F.gelu(x, approximate=self.gelu)

    def backward_(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of `apply` at `x`, written over `grad`."""
        if self.gelu is None:
            return torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)
        return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=self.gelu, grad_input=grad)


class GatedProduct(torch.autograd.Function):
    """`gate.apply(x) * up`. Both operands of one dtype and shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.gate = gate
        product = gate.apply(x)
        # Through `data`, whose version is its own: an output that counts as written in place would never be derived.
        product.data.mul_(up)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Each tensor is let go of at its last use. In a replay nobody else holds it then: unpacking gave it away.
        x, up = ctx.saved_tensors
        gate: Gate = ctx.gate
        wants_x, wants_up, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # second derivatives: every step must be differentiable itself
            return _differentiable(gate, x, up, grad, (wants_x, wants_up))
        grad_x = grad * up if wants_x else None
        del up
        grad_up = gate.apply(x).mul_(grad) if wants_up else None
        return None if grad_x is None else gate.backward_(grad_x, x), grad_up, None


def _differentiable(
    gate: Gate, x: Tensor, up: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None, None]:
    activated = gate.apply(x)
    grad_x = torch.autograd.grad(activated, x, grad * up, create_graph=True)[0] if wants[0] else None
    return grad_x, grad * activated if wants[1] else None, None


def gated_product(x: Tensor, up: Tensor, gate: Gate) -> Tensor:
    """`gate.apply(x) * up`, bit for bit; with little saved state where autograd follows it."""
    if x.dtype != up.dtype or x.shape != up.shape or x.stride() != up.stride():
        return gate.apply(x) * up
    product: Tensor = GatedProduct.apply(x, up, gate)
    return product
