"""What codecs with one scale per group of values have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hilore.codecs.base import Codec, Implementation
from ds_hilore.codecs.scaled import SCALE_DTYPE, SMALLEST_SCALE, WIDEST

#: Room for the few float32 roundings (2^-24 each) between a value and its code; in steps, times the largest code.
SLACK = 1 + 2.0**-12


class GroupedCodec(Codec):
    """Codes of one byte and a bfloat16 scale per group of a row.

    Args:
        group: values that share a scale, along the last dimension; None: one scale per row (per token).
    """

    def __init__(self, name: str, group: int | None = 32, implementation: Implementation = Implementation.AUTO) -> None:
        super().__init__(name, implementation)
        self.group = group

    def _group(self, length: int) -> int:
        return self.group or max(length, 1)

    def _row_bytes(self, length: int) -> int:
        return length + -(-length // self._group(length)) * SCALE_DTYPE.itemsize


def step_of(tensor: Tensor, group: int | None, largest: float) -> Tensor:
    """Largest scale that the group around each value may have; float64, of the tensor's shape (at least 1-D)."""
    values = torch.atleast_1d(tensor).double().abs()
    length = values.shape[-1]
    group = group or max(length, 1)
    padded = torch.nn.functional.pad(values, (0, -length % group)).unflatten(-1, (-1, group))
    absmax = padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., :length]
    return (absmax / largest * WIDEST).clamp_(min=SMALLEST_SCALE)


def with_rounding(tensor: Tensor, bound: Tensor) -> Tensor:
    """`bound` on the decoded float32 value, and in addition its rounding to the tensor's dtype."""
    info = torch.finfo(tensor.dtype)
    largest = tensor.double().abs() + bound
    return bound * SLACK + largest * (info.eps / 2) + info.smallest_normal * info.eps / 2
