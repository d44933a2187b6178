"""fp8 e4m3 in torch: sign, four bits of exponent (bias 7), three of mantissa; up to 448, no infinity.

torch reads float8 slowly on the CPU (3 ns a value, 15 times what int8 takes), so codes are widened by way of float16,
which holds e4m3 shifted left by seven bits, with a bias that is larger by 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hilore.codecs import plain, scaled
from ds_hilore.codecs.base import Encoded, usable_factor
from ds_hilore.codecs.grid import Part, Scratch

LARGEST = 448.0

#: Float16 reads the shifted bits with a bias of 15, not 7.
BIAS_FACTOR = 2.0**8

#: All bits of an int16 but the one below the sign, which the shift fills with a copy of the sign.
WITHOUT_COPY_OF_SIGN = ~(1 << 14)


def encode(sheet: Tensor, group: int | None) -> Encoded:
    """See `Twin.encode`. Without a group, codes are the rounded values; the one factor is NaN if any is not finite."""
    if group is not None:
        return scaled.encode(sheet, group, LARGEST, torch.float8_e4m3fn, _round)
    encoded = plain.encode(sheet, torch.float8_e4m3fn, _saturated, _widen)
    return Encoded(encoded.codes, usable_factor(encoded.partials), encoded.partials)


def decode(codes: Tensor, scales: Tensor | None, out: Tensor, group: int | None) -> None:
    """See `Twin.decode`."""
    assert scales is not None
    # Exact: a scale is at most 2^119, so that its product with 2^8 is finite.
    scaled.decode(codes, scales * BIAS_FACTOR, out, group or plain.PIECE, _shift)


def _round(units_RGg: Tensor, nearest_RGg: Tensor, scratch: Scratch, part: Part) -> Tensor:
    """No saturation: no value is beyond 449.8 (scaled.py), and up to 464 all round to 448."""
    codes_RGg = scratch.groups("codes", part, torch.float8_e4m3fn).copy_(units_RGg)
    _widen(codes_RGg, nearest_RGg)
    return codes_RGg


def _saturated(values: Tensor, into: Tensor) -> None:
    """Rounds `values`, at most to 448 (what the conversion itself does beyond 464 depends on torch's version)."""
    into.copy_(values.clamp(-LARGEST, LARGEST))


def _widen(codes: Tensor, into: Tensor) -> None:
    """Writes what `codes` stand for into float32 `into`; NaN, which has a code of its own, becomes 480."""
    _shift(codes, into)
    into.mul_(BIAS_FACTOR)


def _shift(codes: Tensor, into: Tensor) -> None:
    """As `_widen`, divided by the bias factor."""
    bits = codes.view(torch.int8).to(torch.int16)
    into.copy_(bits.bitwise_left_shift_(7).bitwise_and_(WITHOUT_COPY_OF_SIGN).view(torch.float16))
