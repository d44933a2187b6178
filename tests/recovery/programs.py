"""Random functions of tensors, as lists of numbers that hypothesis draws: views, edits in place, several outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

#: Of every tensor that a program takes.
SHAPE = (4, 8, 64)

_UNARY: list[Callable[[Tensor], Tensor]] = [
    F.silu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    torch.sin,
    lambda x: x * 0.5,
    lambda x: -x,
    lambda x: x.pow(2),
    lambda x: x.to(torch.bfloat16).to(torch.float32),
    lambda x: x.softmax(-1),
    lambda x: F.layer_norm(x, (64,)),
    lambda x: F.rms_norm(x, (64,), eps=1e-6),
    lambda x: F.dropout(x, 0.1),
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x: x.view(-1, 64).view(x.shape),
    lambda x: torch.cat((x[..., 32:], -x[..., :32]), -1),
    lambda x: x[:, :1].expand_as(x),
    lambda x: x.flip(1).clone(),
    lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
]
_BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.mul,
    torch.add,
    torch.sub,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.add(x, y, alpha=0.3),
    lambda x, y: torch.where(y > 0, x, y),
    lambda x, y: x.clone().mul_(y),
    lambda x, y: x.clone().add_(y),
]
Step = tuple[int, int, int]


def _edit(x: Tensor, y: Tensor) -> Tensor:
    """In place on part of a fresh tensor: CopySlices in the graph."""
    x = x.clone()
    x[..., ::2].mul_(0.5)
    x[:, 0] = y[:, 1]
    return x


def program(steps: list[Step], outputs: list[int]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of two tensors and a weight: each step appends a tensor made from earlier ones.

    Args:
        steps: (operation, place of its first operand, of its second).
        outputs: places of what it gives.
    """
    binary = [*_BINARY, _edit]

    def function(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        pool = [x, y]
        for kind, first, second in steps:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            if kind < len(_UNARY):
                pool.append(_UNARY[kind](a))
            elif kind < len(_UNARY) + len(binary):
                pool.append(binary[kind - len(_UNARY)](a, b))
            elif kind % 2:
                pool.append(a @ weight)
            elif len(pool) > 2 and pool[-1] is not x and pool[-1] is not y and not pool[-1]._is_view():
                pool[-1].mul_(0.7)  # in place on an intermediate: plain autograd may refuse it
        return tuple(pool[index % len(pool)] for index in outputs)

    return function


def steps_of_programs(most: int) -> st.SearchStrategy[list[Step]]:
    """Lists of at most so many steps."""
    return st.lists(st.tuples(st.integers(0, 33), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=most)
