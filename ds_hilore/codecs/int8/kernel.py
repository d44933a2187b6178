"""int8 in Triton; the twin of reference.py.

scale = bf16(max(absmax / 127, 2^-126))    code = rint(value * (1 / scale))    decoded = code * scale
"""

# ruff: noqa: PLR0913, PLR0917 - a kernel takes what it needs one by one

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_hilore.codecs.base import Encoded
from ds_hilore.codecs.int8.reference import LARGEST
from ds_hilore.codecs.scaled import SCALE_DTYPE, largest_absmax
from ds_hilore.codecs.tiles.kernel import (
    LAUNCH,
    absmax_of,
    inverse_of,
    read,
    rounded_to,
    scale_of,
    store_squares,
    tile,
    tiles_of,
    widened,
    write,
)

INVERSE_LARGEST = tl.constexpr(1.0 / LARGEST)

#: Added to a number below 2^22, it leaves the number rounded half to even, in the low bits as an integer.
ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


def encode(sheet: Tensor, group: int | None) -> Encoded:
    """See `Twin.encode`."""
    tiles = tiles_of(sheet, group)
    codes = sheet.new_empty(tiles.rows, tiles.length, dtype=torch.int8)
    scales = sheet.new_empty(tiles.rows, tiles.groups, dtype=SCALE_DTYPE)
    partials = tiles.partials(sheet)
    with torch.cuda.device_of(sheet):
        _encode[tiles.programs](
            sheet, codes, scales, partials, *tiles.sizes, *sheet.stride(), largest_absmax(sheet.dtype),
            **tiles.shape, **LAUNCH,
        )  # fmt: skip
    return Encoded(codes, scales, partials)


def decode(codes: Tensor, scales: Tensor | None, out: Tensor, group: int | None) -> None:
    """See `Twin.decode`."""
    tiles = tiles_of(codes, group)
    with torch.cuda.device_of(codes):
        _decode[tiles.programs](codes, scales, out, *tiles.sizes, *out.stride(), **tiles.shape, **LAUNCH)


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    values_ptr, codes_ptr, scales_ptr, partials_ptr, rows, length, groups, columns, stride_row, stride_column, limit,
    GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, group, column, across = tile(columns, GROUP, K, R)
    inside = (row < rows) & (column < length)
    values = read(values_ptr, row, column, stride_row, stride_column, inside)
    scale = scale_of(absmax_of(values), INVERSE_LARGEST, limit)
    inverse = inverse_of(scale)
    units = values * inverse
    shifted = units + ROUND_TO_INTEGER
    tl.store(codes_ptr + row * length + column, shifted.to(tl.int32, bitcast=True).to(tl.int8), mask=inside)
    own = (row < rows) & (group < groups)
    tl.store(scales_ptr + row * groups + group, rounded_to(scale, tl.bfloat16), mask=own)
    decoded = widened(rounded_to((shifted - ROUND_TO_INTEGER) * scale, values_ptr.dtype.element_ty))
    store_squares(partials_ptr, (decoded - values) * inverse, units, scale, row, rows, across, columns)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, out_ptr, rows, length, groups, columns, stride_row, stride_column,
    GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, group, column, _ = tile(columns, GROUP, K, R)
    inside = (row < rows) & (column < length)
    codes = tl.load(codes_ptr + row * length + column, mask=inside, other=0)
    scale = tl.load(scales_ptr + row * groups + group, mask=(row < rows) & (group < groups), other=1.0)
    values = codes.to(tl.float32) * widened(scale)
    write(out_ptr, row, column, stride_row, stride_column, values, inside)
