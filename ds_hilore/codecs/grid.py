"""Rows cut into groups, and groups into parts that stay in cache: the frame of the torch twins.

A twin passes over its input a dozen times. Over parts of 2^18 values (1 MB per buffer) these passes read the caches of
the processor and not its memory; scratch is made once and used for every part. Smaller parts cost more in calls of
operations, and in threads that wait for each other after each of them, than they gain (measured: 6.4 ms for int8 of
2048 x 3072 float32 on two threads, 10.4 ms with parts of 2^16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Values of one part on the CPU: torch gives a thread 32,768 of them at least.
FEWEST_VALUES = 1 << 18
VALUES_PER_THREAD = 1 << 15

#: On other devices, where calls and not caches decide.
VALUES_ON_DEVICE = 1 << 24


@dataclass(frozen=True)
class Part:
    """A few rows, or a piece of one row, in whole groups (the last group of a row may be short)."""

    rows: slice
    columns: slice
    groups: slice


@dataclass(frozen=True)
class Grid:
    """Rows [R, L] in groups of `group` along L; the last group of a row is short where L is no multiple.

    R rows, L values of a row, G groups of a row, g values of a group (suffixes of tensors in the twins).
    """

    rows: int
    length: int
    group: int

    @property
    def groups(self) -> int:
        return -(-self.length // self.group) if self.length else 0

    def parts(self, device: torch.device) -> Iterator[Part]:
        """Parts that cover everything, in order."""
        if self.rows * self.length == 0:
            return
        values = part_values(device)
        width = self.groups * self.group
        step = max(1, values // width)
        across = self.groups if width <= values else max(1, values // self.group)
        for row in range(0, self.rows, step):
            for group in range(0, self.groups, across):
                last = min(group + across, self.groups)
                yield Part(
                    slice(row, min(row + step, self.rows)),
                    slice(group * self.group, min(last * self.group, self.length)),
                    slice(group, last),
                )


def part_values(device: torch.device) -> int:
    """Values of one part."""
    if device.type != "cpu":
        return VALUES_ON_DEVICE
    return max(FEWEST_VALUES, VALUES_PER_THREAD * torch.get_num_threads())


class Scratch:
    """Buffers of one part, made at first use and given out again for the next part."""

    def __init__(self, grid: Grid, device: torch.device) -> None:
        self._grid, self._device = grid, device
        self._flat: dict[str, Tensor] = {}

    def groups(self, name: str, part: Part, dtype: torch.dtype = torch.float32) -> Tensor:
        """Buffer `name` as [rows, groups, g] of the part. Holds whatever it held before."""
        shape = (part.rows.stop - part.rows.start, part.groups.stop - part.groups.start, self._grid.group)
        needed = shape[0] * shape[1] * shape[2]
        flat = self._flat.get(name)
        if flat is None:  # the first part is the largest
            flat = self._flat[name] = torch.empty(needed, dtype=dtype, device=self._device)
        return flat[:needed].view(shape)

    def load(self, name: str, sheet: Tensor, part: Part) -> Tensor:
        """The part of `sheet` as float32 [rows, groups, g], short groups filled up with zeros.

        A view where `sheet` has that form already, else a copy in buffer `name`: read only.
        """
        block = sheet[part.rows, part.columns]
        rows, width = block.shape
        groups = part.groups.stop - part.groups.start
        whole = width == groups * self._grid.group
        if whole and block.dtype is torch.float32 and block.is_contiguous():
            return block.view(rows, groups, self._grid.group)
        buffer = self.groups(name, part)
        flat = buffer.view(rows, -1)
        if not whole:
            flat[:, width:].zero_()
        flat[:, :width].copy_(block)
        return buffer
