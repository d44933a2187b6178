"""Symmetric int8, one bfloat16 scale per group along the last dimension, or per row."""

from __future__ import annotations

from torch import Tensor

from ds_hilore.codecs.base import Twin
from ds_hilore.codecs.grouped import GroupedCodec, step_of, with_rounding
from ds_hilore.codecs.int8 import reference


class Int8(GroupedCodec):
    """Error: half a step of absmax / 127 of its group."""

    def error_bound(self, tensor: Tensor) -> Tensor:
        step = step_of(tensor, self.group, reference.LARGEST).view(tensor.shape)
        return with_rounding(tensor, step / 2)

    def _reference(self) -> Twin:
        return reference

    def _kernel(self) -> Twin:
        from ds_hilore.codecs.int8 import kernel

        return kernel
