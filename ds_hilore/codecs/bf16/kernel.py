"""bfloat16 in Triton; the twin of reference.py. Squares are summed in units of the largest value near by."""

# ruff: noqa: PLR0913, PLR0917 - a kernel takes what it needs one by one

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_hilore.codecs.base import Encoded
from ds_hilore.codecs.tiles.kernel import (
    LAUNCH,
    absmax_of,
    bf16_rounded,
    inverse_of,
    read,
    rounded_to,
    size_of,
    store_squares,
    tile,
    tiles_of,
    widened,
    write,
)


def encode(sheet: Tensor, group: int | None) -> Encoded:
    """See `Twin.encode`."""
    tiles = tiles_of(sheet, group)
    codes = sheet.new_empty(tiles.rows, tiles.length, dtype=torch.bfloat16)
    partials = tiles.partials(sheet)
    with torch.cuda.device_of(sheet):
        _encode[tiles.programs](sheet, codes, partials, *tiles.sizes, *sheet.stride(), **tiles.shape, **LAUNCH)
    return Encoded(codes, None, partials)


def decode(codes: Tensor, scales: Tensor | None, out: Tensor, group: int | None) -> None:
    """See `Twin.decode`."""
    tiles = tiles_of(codes, group)
    with torch.cuda.device_of(codes):
        _decode[tiles.programs](codes, out, *tiles.sizes, *out.stride(), **tiles.shape, **LAUNCH)


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    values_ptr, codes_ptr, partials_ptr, rows, length, groups, columns, stride_row, stride_column,
    GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, _, column, across = tile(columns, GROUP, K, R)
    inside = (row < rows) & (column < length)
    values = read(values_ptr, row, column, stride_row, stride_column, inside)
    nearest = bf16_rounded(values)
    tl.store(codes_ptr + row * length + column, rounded_to(nearest, tl.bfloat16), mask=inside)
    size = size_of(absmax_of(values))
    inverse = inverse_of(size)
    store_squares(partials_ptr, (nearest - values) * inverse, values * inverse, size, row, rows, across, columns)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    codes_ptr, out_ptr, rows, length, groups, columns, stride_row, stride_column,
    GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, _, column, _ = tile(columns, GROUP, K, R)
    inside = (row < rows) & (column < length)
    codes = tl.load(codes_ptr + row * length + column, mask=inside, other=0.0)
    write(out_ptr, row, column, stride_row, stride_column, widened(codes), inside)
