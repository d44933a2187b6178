"""Rows of tensors of any strides, and back."""

from __future__ import annotations

import pytest
import torch

from ds_hilore.codecs.grid import Grid
from ds_hilore.codecs.layout import Layout
from tests.codecs import tensors as t


@pytest.mark.parametrize("view", sorted(t.VIEWS))
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 8), (1, 1, 4), (2, 1, 3, 6), (0, 4), (3, 0)])
def test_rows_and_back(view: str, shape: tuple[int, ...]) -> None:
    tensor = t.VIEWS[view](torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))
    layout = Layout.of(tensor)
    rows = layout.rows(tensor)
    assert rows.shape == (layout.row_count, layout.row_length)
    assert torch.equal(layout.whole(rows.contiguous()), tensor)
    assert layout.row_count * layout.row_length * layout.repeats == tensor.numel() or tensor.numel() == 0
    per_row = layout.spread(rows.double().sum(-1)) * (tensor.shape[-1] // max(layout.row_length, 1))
    torch.testing.assert_close(per_row, tensor.double().sum(-1))


@pytest.mark.parametrize(
    ("tensor", "copies"),
    [
        (torch.zeros(2, 3, 8), False),
        (torch.zeros(8, 3).t(), False),
        (torch.zeros(2, 5, 4, 8).transpose(1, 2), False),  # attention heads
        (torch.zeros(2, 3, 16)[..., :8], False),  # a chunk
        (torch.zeros(2, 8, 3).transpose(1, 2), True),  # rows at two distances
        (torch.zeros(2, 4, 8)[:, :3], True),
    ],
)
def test_rows_are_views_where_memory_allows(tensor: torch.Tensor, copies: bool) -> None:
    layout = Layout.of(tensor)
    assert (layout.rows(tensor).data_ptr() != tensor.data_ptr()) == copies
    assert (layout.rows_in_place(tensor) is None) == copies


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (0, 1), (4, 2)])
def test_overlap(strides: tuple[int, int]) -> None:
    tensor = torch.zeros(64).as_strided((4, 3), strides)
    expected = (3, 1) if strides in ((1, 1), (2, 1), (4, 2)) else strides
    assert Layout.of(tensor).strides == expected


@pytest.mark.parametrize("size", [(1, 1, 32), (7, 100, 32), (3, 200000, 64), (100000, 40, 32), (5, 7, 7), (0, 5, 32)])
def test_parts_cover_all_once(size: tuple[int, int, int]) -> None:
    grid = Grid(*size)
    seen = torch.zeros(grid.rows, grid.length, dtype=torch.uint8)
    groups = torch.zeros(grid.rows, grid.groups, dtype=torch.uint8)
    for part in grid.parts(torch.device("cpu")):
        seen[part.rows, part.columns] += 1
        groups[part.rows, part.groups] += 1
        assert part.columns.start == part.groups.start * grid.group
    assert seen.eq(1).all() and groups.eq(1).all()
