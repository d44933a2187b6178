"""float32 state as bfloat16: half the bytes at 0.2 % error, and the cheapest codec there is."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hilore.codecs.base import Codec, Twin
from ds_hilore.codecs.bf16 import reference


class Bf16(Codec):
    """Error: half a unit in the last place of bfloat16, 2^-8 of the value at most."""

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32  # other dtypes have two bytes already

    def error_bound(self, tensor: Tensor) -> Tensor:
        info = torch.finfo(torch.bfloat16)
        return tensor.double().abs() * (info.eps / 2) + info.smallest_normal * info.eps / 2

    def _reference(self) -> Twin:
        return reference

    def _kernel(self) -> Twin:
        from ds_hilore.codecs.bf16 import kernel

        return kernel

    def _row_bytes(self, length: int) -> int:
        return length * torch.bfloat16.itemsize
