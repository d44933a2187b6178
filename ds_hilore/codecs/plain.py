"""Torch side of codecs without scales: code = value rounded to another dtype.

Statistics are summed in float64, where the squares of all float32 values have room.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hilore.codecs.base import Encoded
from ds_hilore.codecs.grid import Grid, Scratch

#: Rows are cut at multiples of this only where one row is longer than a part.
PIECE = 64


#: Writes a conversion of the first argument into the second.
Conversion = Callable[[Tensor, Tensor], object]


def encode(sheet: Tensor, code_dtype: torch.dtype, narrow: Conversion, widen: Conversion) -> Encoded:
    """Encodes rows [R, L] in one pass over memory: `narrow` makes codes of float32 values, `widen` the reverse."""
    rows, length = sheet.shape
    grid = Grid(rows, length, PIECE)
    codes_RL = sheet.new_empty(rows, length, dtype=code_dtype)
    partials = sheet.new_zeros(2, rows, 1, dtype=torch.float64)
    scratch = Scratch(grid, sheet.device)
    for part in grid.parts(sheet.device):
        values_RGg = scratch.load("values", sheet, part)
        rows_of_part = values_RGg.shape[0]
        codes = scratch.groups("codes", part, code_dtype)
        narrow(values_RGg, codes)
        width = part.columns.stop - part.columns.start
        codes_RL[part.rows, part.columns] = codes.view(rows_of_part, -1)[:, :width]
        nearest_RGg, wide_RGg = scratch.groups("nearest", part), scratch.groups("wide", part, torch.float64)
        widen(codes, nearest_RGg)
        nearest_RGg.sub_(values_RGg)
        for which, parts in enumerate((nearest_RGg, values_RGg)):
            norm_R = torch.linalg.vector_norm(wide_RGg.copy_(parts).view(rows_of_part, -1), dim=-1)
            partials[which, part.rows, 0] += norm_R.square_()
    return Encoded(codes_RL, None, partials)
