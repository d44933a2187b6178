"""Shared ground of the Triton kernels: how rows are cut into tiles, and arithmetic that equals torch's bit for bit.

A program works on a tile [R, K, GROUP]: R rows, K groups of each, GROUP values of a group (the next power of two; a
mask takes off what is beyond the row). It reads its values once; codes, scales and sums of squares come from registers.
Sums are written per row and tile and added up by torch afterwards: no atomics, so they are the same at every run.

What keeps the twins equal: values are multiplied by the correctly rounded inverse of the scale; no multiplication is
fused with an addition (`LAUNCH`); bfloat16 is made from bits and read as bits, as Triton's interpreter truncates and
loses subnormal numbers (on a device this is what the conversion does anyway).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_hilore.codecs.plain import PIECE
from ds_hilore.codecs.scaled import SMALLEST_SCALE

#: Values of one tile, unless one group is longer.
TILE_VALUES = 4096

#: Options of every launch.
LAUNCH: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "enable_fp_fusion": False})

SMALLEST = tl.constexpr(SMALLEST_SCALE)
LARGEST_SIZE = tl.constexpr(2.0**126)  # its inverse is still a normal number


@dataclass(frozen=True)
class Tiles:
    """Rows [R, L] cut into tiles. `columns`: tiles side by side."""

    rows: int
    length: int
    group: int

    @property
    def groups(self) -> int:
        return -(-self.length // self.group)

    @property
    def columns(self) -> int:
        return triton.cdiv(self.groups, self.shape["K"])

    @property
    def shape(self) -> dict[str, int]:
        """Constants of the kernels."""
        group = triton.next_power_of_2(self.group)
        across = max(1, min(triton.next_power_of_2(self.groups), TILE_VALUES // group))
        down = max(1, min(triton.next_power_of_2(self.rows), TILE_VALUES // (group * across)))
        return {"GROUP": group, "K": across, "R": down}

    @property
    def programs(self) -> tuple[int]:
        return (triton.cdiv(self.rows, self.shape["R"]) * self.columns,)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What every kernel is told, in this order."""
        return self.rows, self.length, self.groups, self.columns

    def partials(self, sheet: Tensor) -> Tensor:
        """Where kernels leave their sums of squares: errors, then values."""
        return sheet.new_empty(2, self.rows, self.columns, dtype=torch.float64)


def tiles_of(sheet: Tensor, group: int | None) -> Tiles:
    """Tiles of rows [R, L]; codecs without groups have pieces of a size of their own."""
    return Tiles(sheet.shape[0], sheet.shape[1], group or PIECE)


@triton.jit
def tile(columns, GROUP: tl.constexpr, K: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [R, 1, 1], groups [1, K, 1] and columns [1, K, GROUP] of this program; index of the tile in its rows."""
    program = tl.program_id(0)
    across = program % columns
    row = ((program // columns) * R + tl.arange(0, R)).to(tl.int64)[:, None, None]
    group = (across * K + tl.arange(0, K))[None, :, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    return row, group, column, across


@triton.jit
def absmax_of(values):  # type: ignore[no-untyped-def]
    """Largest magnitude of each group, [R, K, 1]. As integers, the bits of NaN and infinity are the largest."""
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitudes, 2, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def bf16_rounded(values):  # type: ignore[no-untyped-def]
    """float32 rounded half to even to what bfloat16 can hold, still float32."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)  # noqa: PLR0124 - NaN


@triton.jit
def rounded_to(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values in `dtype`, rounded half to even."""
    if dtype == tl.bfloat16:
        bits = bf16_rounded(values).to(tl.uint32, bitcast=True) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(dtype)
    return result


@triton.jit
def widened(values):  # type: ignore[no-untyped-def]
    """Values of any floating dtype as float32."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = values.to(tl.float32)
    return result


@triton.jit
def read(pointer, row, column, stride_row, stride_column, inside):  # type: ignore[no-untyped-def]
    """The tile's values as float32, 0 outside of the rows. Strides may be any."""
    return widened(tl.load(pointer + row * stride_row + column.to(tl.int64) * stride_column, mask=inside, other=0.0))


@triton.jit
def write(pointer, row, column, stride_row, stride_column, values, inside):  # type: ignore[no-untyped-def]
    """Stores float32 values of the tile in the dtype of what they are stored into."""
    rounded = rounded_to(values, pointer.dtype.element_ty)
    tl.store(pointer + row * stride_row + column.to(tl.int64) * stride_column, rounded, mask=inside)


@triton.jit
def scale_of(absmax, inverse_largest, limit):  # type: ignore[no-untyped-def]
    """As `scaled.scales_of`, float32."""
    scale = bf16_rounded(tl.maximum(absmax * inverse_largest, SMALLEST))
    return tl.where(absmax <= limit, scale, float("nan"))


@triton.jit
def inverse_of(scale):  # type: ignore[no-untyped-def]
    """1 / scale, correctly rounded."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def size_of(absmax):  # type: ignore[no-untyped-def]
    """A positive number near the absmax of a group, to bring its squares into the range of float32."""
    return tl.minimum(tl.maximum(absmax, SMALLEST), LARGEST_SIZE)


@triton.jit
def store_squares(partials, errors, values, unit, row, rows, across, columns):  # type: ignore[no-untyped-def]
    """Sums over each row of the tile of squared errors and values, both given in units of `unit`, [R, K, 1]."""
    square = unit.to(tl.float64) * unit.to(tl.float64)
    error_square = tl.sum(tl.sum(errors * errors, 2, keep_dims=True).to(tl.float64) * square, 1, keep_dims=True)
    value_square = tl.sum(tl.sum(values * values, 2, keep_dims=True).to(tl.float64) * square, 1, keep_dims=True)
    tl.store(partials + row * columns + across, error_square, mask=row < rows)
    tl.store(partials + (rows + row) * columns + across, value_square, mask=row < rows)
