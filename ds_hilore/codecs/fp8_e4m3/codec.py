"""fp8 e4m3 with one bfloat16 scale per group, or, as the paper has it, without scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hilore.codecs.base import Codec, Twin
from ds_hilore.codecs.fp8_e4m3 import reference
from ds_hilore.codecs.grouped import GroupedCodec, step_of, with_rounding

#: Half a unit in the last place: of a normal number, as a share of it; of a subnormal one, in units of the scale.
HALF_ULP = 2.0**-4
HALF_SUBNORMAL = 2.0**-10

FACTOR_BYTES = torch.float32.itemsize


def _half_step(tensor: Tensor, step: Tensor | float) -> Tensor:
    return torch.maximum(tensor.double().abs() * HALF_ULP, torch.as_tensor(step * HALF_SUBNORMAL, dtype=torch.float64))


class _E4M3(Codec):
    """Both have one pair of twins, which look at whether there are groups."""

    def _reference(self) -> Twin:
        return reference

    def _kernel(self) -> Twin:
        from ds_hilore.codecs.fp8_e4m3 import kernel

        return kernel


class Fp8E4M3(_E4M3, GroupedCodec):
    """Error: 2^-4 of the value, or 2^-19 of its group's absmax where that is more."""

    def error_bound(self, tensor: Tensor) -> Tensor:
        step = step_of(tensor, self.group, reference.LARGEST).view(tensor.shape)
        return with_rounding(tensor, _half_step(tensor, step))


class UnscaledFp8E4M3(_E4M3):
    """Error: 2^-4 of the value, at least 2^-10; beyond 448, values become 448."""

    def error_bound(self, tensor: Tensor) -> Tensor:
        return with_rounding(tensor, torch.maximum(_half_step(tensor, 1.0), tensor.double().abs() - reference.LARGEST))

    def _row_bytes(self, length: int) -> int:
        return length

    def _fixed_bytes(self) -> int:
        return FACTOR_BYTES
