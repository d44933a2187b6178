"""Microbatches with dead rows and short ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks.batches import SHORTEST, live_rows, with_dead_rows, with_lengths
from benchmarks.subject import PRESETS, Batch, sized


def batch(rows: int) -> Batch:
    return Batch.random(sized("quick", None, rows), vocabulary=100, seed=0)


@pytest.mark.parametrize(("dead", "live"), [(0.0, 8), (0.25, 6), (0.5, 4), (1.0, 0)])
def test_a_share_of_the_rows_is_dead_and_can_be_cut_out(dead: float, live: int) -> None:
    found = with_dead_rows(batch(8), dead)
    assert int((found.advantages != 0).sum()) == live
    cut = live_rows(found)
    assert len(cut.ids) == live and torch.equal(cut.ids, found.ids[found.advantages != 0])


def test_rows_end_evenly_between_the_shortest_and_the_longest() -> None:
    found = with_lengths(batch(10), SHORTEST)
    columns = PRESETS["quick"].row_tokens - 1
    lasts = [int(row.nonzero()[-1]) + 1 for row in found.mask]
    assert lasts[0] == -(-columns // 10) and lasts[-1] == columns and lasts == sorted(lasts)
    assert len(live_rows(found).ids) == 10, "short is not dead"
