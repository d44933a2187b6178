"""fp8 e4m3 in Triton; the twin of reference.py.

Codes are made from the bits of float32 and not by the device's own conversion, which devices before compute capability
8.9 lack.

    scale = bf16(max(absmax / 448, 2^-126))    code = e4m3(value * (1 / scale))    decoded = code * scale
"""

# ruff: noqa: PLR0913, PLR0917 - a kernel takes what it needs one by one

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_hilore.codecs.base import Encoded, usable_factor
from ds_hilore.codecs.fp8_e4m3.reference import LARGEST
from ds_hilore.codecs.scaled import SCALE_DTYPE, largest_absmax
from ds_hilore.codecs.tiles.kernel import (
    LAUNCH,
    absmax_of,
    inverse_of,
    read,
    rounded_to,
    scale_of,
    size_of,
    store_squares,
    tile,
    tiles_of,
    widened,
    write,
)

INVERSE_LARGEST = tl.constexpr(1.0 / LARGEST)


def encode(sheet: Tensor, group: int | None) -> Encoded:
    """See `Twin.encode`. Without a group, codes are the rounded values; the one factor is NaN if any is not finite."""
    tiles = tiles_of(sheet, group)
    codes = sheet.new_empty(tiles.rows, tiles.length, dtype=torch.uint8)
    scales = None if group is None else sheet.new_empty(tiles.rows, tiles.groups, dtype=SCALE_DTYPE)
    partials = tiles.partials(sheet)
    with torch.cuda.device_of(sheet):
        _encode[tiles.programs](
            sheet, codes, scales, partials, *tiles.sizes, *sheet.stride(), largest_absmax(sheet.dtype),
            SCALED=group is not None, **tiles.shape, **LAUNCH,
        )  # fmt: skip
    return Encoded(codes.view(torch.float8_e4m3fn), usable_factor(partials) if scales is None else scales, partials)


def decode(codes: Tensor, scales: Tensor | None, out: Tensor, group: int | None) -> None:
    """See `Twin.decode`."""
    tiles = tiles_of(codes, group)
    with torch.cuda.device_of(codes):
        _decode[tiles.programs](
            codes.view(torch.uint8), scales, out, *tiles.sizes, *out.stride(),
            SCALED=group is not None, **tiles.shape, **LAUNCH,
        )  # fmt: skip


@triton.jit
def e4m3_of(values):  # type: ignore[no-untyped-def]
    """Codes of float32 values, rounded half to even, at most 448; 0x7F for NaN. As uint32."""
    bits = values.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    magnitude = tl.minimum(bits ^ sign, 0x43E00000)  # 448
    # Below 2^-6, the smallest normal number: 2^14 added, the last bit of the sum is worth 2^-9, and rounds as it must.
    lifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = lifted.to(tl.uint32, bitcast=True) - 0x46800000
    # Else: exponent from bias 127 to bias 7, and half of the last bit to be kept (less one bit if that is even) added.
    normal = (magnitude + 0xC407FFFF + ((magnitude >> 20) & 1)) >> 20
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return tl.where(values == values, code | (sign >> 24), 0x7F)  # noqa: PLR0124 - NaN


@triton.jit
def e4m3_value(codes):  # type: ignore[no-untyped-def]
    """What codes stand for, float32."""
    magnitude = codes.to(tl.int32) & 0x7F
    normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where((codes.to(tl.int32) & 0x80) != 0, -value, value)


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    values_ptr, codes_ptr, scales_ptr, partials_ptr, rows, length, groups, columns, stride_row, stride_column, limit,
    SCALED: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, group, column, across = tile(columns, GROUP, K, R)
    inside = (row < rows) & (column < length)
    values = read(values_ptr, row, column, stride_row, stride_column, inside)
    absmax = absmax_of(values)
    if SCALED:
        unit = scale_of(absmax, INVERSE_LARGEST, limit)
        inverse = inverse_of(unit)
        codes = e4m3_of(values * inverse)
        own = (row < rows) & (group < groups)
        tl.store(scales_ptr + row * groups + group, rounded_to(unit, tl.bfloat16), mask=own)
        decoded = widened(rounded_to(e4m3_value(codes) * unit, values_ptr.dtype.element_ty))
    else:
        unit = size_of(absmax)
        inverse = inverse_of(unit)
        codes = e4m3_of(values)
        decoded = e4m3_value(codes)
    tl.store(codes_ptr + row * length + column, codes.to(tl.uint8), mask=inside)
    store_squares(partials_ptr, (decoded - values) * inverse, values * inverse, unit, row, rows, across, columns)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, out_ptr, rows, length, groups, columns, stride_row, stride_column,
    SCALED: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, group, column, _ = tile(columns, GROUP, K, R)
    inside = (row < rows) & (column < length)
    values = e4m3_value(tl.load(codes_ptr + row * length + column, mask=inside, other=0))
    if SCALED:
        own = (row < rows) & (group < groups)
        values *= widened(tl.load(scales_ptr + row * groups + group, mask=own, other=1.0))
    else:
        values *= tl.load(scales_ptr)
    write(out_ptr, row, column, stride_row, stride_column, values, inside)
