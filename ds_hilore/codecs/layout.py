"""Shape and strides of an encoded tensor: how it is read as rows, and how its decoded form is laid out again.

Rows run along the last dimension, in the order in which they lie in memory, so a transposed or chunked view is read
where it stands. Dimensions of stride 0 (broadcasts) are read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Shape and strides in elements. `strides` never let two elements share memory, but for stride 0."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Layout of `tensor`; contiguous where its elements overlap (sliding windows), as they cannot be written so."""
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, _contiguous(shape) if _overlaps(shape, strides) else strides)

    @property
    def repeats(self) -> int:
        """How often each element that is held appears in the tensor."""
        return math.prod(size for size, stride in zip(self.shape, self.strides) if stride == 0 and size > 1)

    @property
    def base(self) -> tuple[int, ...]:
        """The shape without repetitions: 1 in dimensions of stride 0. (1,) for a scalar."""
        return tuple(1 if stride == 0 and size else size for size, stride in zip(self.shape, self.strides)) or (1,)

    @property
    def row_length(self) -> int:
        return self.base[-1]

    @property
    def row_count(self) -> int:
        return math.prod(self.base[:-1])

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions but the last, outermost in memory first."""
        return tuple(sorted(range(len(self.base) - 1), key=lambda dim: -self.strides[dim]))

    @property
    def inverse(self) -> tuple[int, ...]:
        """Undoes `order`."""
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    def rows(self, tensor: Tensor) -> Tensor:
        """`tensor` as [row_count, row_length]: a view where its memory allows, else a copy."""
        return self.permuted(tensor).reshape(self.row_count, self.row_length)

    def rows_in_place(self, tensor: Tensor) -> Tensor | None:
        """`tensor` as [row_count, row_length] sharing its memory; None where no such view exists."""
        try:
            return self.permuted(tensor).view(self.row_count, self.row_length)
        except RuntimeError:  # torch has no question for this, only the attempt
            return None

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor of this shape and these strides."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)

    def spread(self, values: Tensor) -> Tensor:
        """Values of rows, [row_count], as a tensor of shape[:-1]."""
        base = self.base
        return values.view([base[dim] for dim in self.order]).permute(self.inverse).expand(self.shape[:-1])

    def permuted(self, tensor: Tensor) -> Tensor:
        """View of `tensor` without repetitions, outermost dimension in memory first, the last dimension last."""
        if not self.shape:
            return tensor.view(1)
        for dim, (size, held) in enumerate(zip(self.shape, self.base)):
            if size != held:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.permute(*self.order, len(self.shape) - 1)

    def unfolded(self, sheet: Tensor) -> Tensor:
        """Dense rows, [row_count, row_length], in the shape of `permuted`."""
        base = self.base
        return sheet.view([base[dim] for dim in (*self.order, len(base) - 1)])

    def whole(self, sheet: Tensor) -> Tensor:
        """Dense rows, [row_count, row_length], as a view of the tensor's shape."""
        if not self.shape:
            return sheet.view(())
        return self.unfolded(sheet).permute(*self.inverse, len(self.shape) - 1).expand(self.shape)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements may share memory, repetitions aside. May say yes to interleaved dimensions that do not."""
    if 0 in shape:
        return False
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size > 1 and stride):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False
