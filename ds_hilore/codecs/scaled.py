"""Torch side of codecs with one scale per group: code = round(value / scale), scale = absmax / largest code.

Scales are bfloat16: the range of float32 at half its bytes (float16 cannot hold 1e-38 to 1e38). Codes are made with
the rounded scale, so its rounding costs only a step that is up to 2^-8 wider. The largest value still gets the largest
code: absmax / scale is at most largest * (1 + 2^-8), which is 127.496 for int8 and 449.75 for e4m3. A scale is never
below the smallest normal number, so that groups of zeros need no case of their own and no scale is subnormal.

Statistics are sums in units of the scale, where they neither overflow nor vanish, times its square in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hilore.codecs.base import Encoded
from ds_hilore.codecs.grid import Grid, Part, Scratch

SCALE_DTYPE = torch.bfloat16

#: Smallest scale: the smallest normal number of bfloat16 and float32.
SMALLEST_SCALE = 2.0**-126

#: Rounding a scale to bfloat16 widens the step by at most this factor.
WIDEST = 1 + 2.0**-8

#: Rounds values in code units, [R, G, g]: returns codes, and writes what they stand for into the second argument.
Rounder = Callable[[Tensor, Tensor, Scratch, Part], Tensor]


def largest_absmax(dtype: torch.dtype) -> float:
    """Largest absmax of a group that can be encoded: above it, largest code x scale may overflow `dtype` (rule C6)."""
    return (1 - 2.0**-7) * (2.0**16 if dtype is torch.float16 else 2.0**128)


def scales_of(absmax: Tensor, inverse_largest: float, dtype: torch.dtype) -> Tensor:
    """bfloat16 scales of groups; NaN where a group cannot be encoded (rule C6).

    Multiplies by the inverse of the largest code, as torch on CUDA would do with a division by a number.
    """
    scales = (absmax * inverse_largest).clamp_(min=SMALLEST_SCALE)
    # An absmax of NaN is still NaN here.
    return scales.masked_fill_(absmax > largest_absmax(dtype), torch.nan).to(SCALE_DTYPE)


def encode(sheet: Tensor, group: int, largest: float, code_dtype: torch.dtype, rounder: Rounder) -> Encoded:
    """Encodes rows [R, L] in one pass over memory; see `Twin.encode`."""
    rows, length = sheet.shape
    grid = Grid(rows, length, group)
    codes_RL = sheet.new_empty(rows, length, dtype=code_dtype)
    scales_RG = sheet.new_empty(rows, grid.groups, dtype=SCALE_DTYPE)
    squares_RG = sheet.new_empty(2, rows, grid.groups, dtype=torch.float32)
    scratch = Scratch(grid, sheet.device)
    for part in grid.parts(sheet.device):
        values_RGg = scratch.load("values", sheet, part)
        units_RGg, nearest_RGg = scratch.groups("units", part), scratch.groups("nearest", part)
        absmax_RG = torch.abs(values_RGg, out=units_RGg).amax(-1)
        scale_RG = scales_of(absmax_RG, 1.0 / largest, sheet.dtype)
        scales_RG[part.rows, part.groups] = scale_RG
        scale_RG1 = scale_RG.float().unsqueeze_(-1)
        inverse_RG1 = scale_RG1.reciprocal()
        torch.mul(values_RGg, inverse_RG1, out=units_RGg)
        codes = rounder(units_RGg, nearest_RGg, scratch, part)
        width = part.columns.stop - part.columns.start
        codes_RL[part.rows, part.columns] = codes.view(codes.shape[0], -1)[:, :width]
        if sheet.dtype is torch.float32:
            nearest_RGg.sub_(units_RGg)
        else:  # decode rounds once more, to the tensor's dtype
            rounded = scratch.groups("rounded", part, sheet.dtype).copy_(nearest_RGg.mul_(scale_RG1))
            nearest_RGg.copy_(rounded).sub_(values_RGg).mul_(inverse_RG1)
        squares_RG[0, part.rows, part.groups] = nearest_RGg.square_().sum(-1)
        squares_RG[1, part.rows, part.groups] = units_RGg.square_().sum(-1)
    partials = (squares_RG * scales_RG.double().square_()).sum(-1, keepdim=True)
    return Encoded(codes_RL, scales_RG, partials)


def decode(codes: Tensor, scales: Tensor, out: Tensor, group: int, widen: Callable[[Tensor, Tensor], object]) -> None:
    """Writes codes x scales into rows `out`, [R, L]; scales are [R, G], or one for all (0-dim).

    `widen(codes, into)` gives what codes stand for, as float32.
    """
    grid = Grid(codes.shape[0], codes.shape[1], group)
    scratch = Scratch(grid, codes.device)
    for part in grid.parts(codes.device):
        block, target = codes[part.rows, part.columns], out[part.rows, part.columns]
        rows, width = block.shape
        groups = part.groups.stop - part.groups.start
        in_place = width == groups * group and target.dtype is torch.float32 and target.is_contiguous()
        values_RGg = target.view(rows, groups, group) if in_place else scratch.groups("values", part)
        values_RL = values_RGg.view(rows, -1)
        if width < values_RL.shape[1]:
            values_RL[:, width:].zero_()
        widen(block, values_RL[:, :width])
        values_RGg.mul_(scales[part.rows, part.groups].float().unsqueeze_(-1) if scales.dim() else scales)
        if not in_place:
            target.copy_(values_RL[:, :width])
