"""Frozen projections whose output nobody needs, left out of a replay that is differentiated itself.

Dead work (deadwork.py) is work whose output no saved tensor depends on, so no gradient does either. What is still
needed of such a projection is its own derivative: gradient times weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def skipped(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Inside, the first call of each named submodule gives zeros without computing, and differentiates as ever.

    A submodule that is no plain linear layer, or whose forward someone has replaced, runs as it is.
    """
    changed = []
    for name in names:
        child = module.get_submodule(name)
        if _weight_for(child) is not None and "forward" not in child.__dict__:
            child.__dict__["forward"] = functools.partial(_once, child)
            changed.append(child)
    try:
        yield
    finally:
        for child in changed:
            child.__dict__.pop("forward", None)


def _once(module: nn.Module, x: Tensor) -> Tensor:
    module.__dict__.pop("forward", None)
    weight = _weight_for(module)
    assert weight is not None
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    output: Tensor = _Skipped.apply(x, weight)
    return output


def _weight_for(module: nn.Module) -> Tensor | None:
    """[out, in], of the two kinds of layers that compute x @ weight.T and nothing that a gradient would notice."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if type(module) is nn.Linear:
        return weight
    return weight.t() if type(module).__name__ == "Conv1D" else None


class _Skipped(torch.autograd.Function):
    """x [..., in] -> zeros [..., out]; the gradient is that of x @ weight.T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight  # as it is: under ZeRO-3 it is gathered until the unit's backward is over
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.to(gradient.dtype), None
