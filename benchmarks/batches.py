"""Microbatches of which some rows, or the ends of some, cannot change the model."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.subject import Batch

#: Of the longest row, in `with_lengths`.
SHORTEST = 0.1


def with_dead_rows(batch: Batch, dead: float) -> Batch:
    """A share of the rows, spread evenly, gets advantage 0."""
    rows = len(batch.advantages)
    chosen = torch.arange(rows, device=batch.ids.device) * dead % 1 < dead
    return dataclasses.replace(batch, advantages=torch.where(chosen, 0.0, batch.advantages))


def with_lengths(batch: Batch, shortest: float = SHORTEST) -> Batch:
    """Rows end evenly between `shortest` and all of their tokens; what lies behind is padding on the right."""
    rows, columns = batch.mask.shape
    share = torch.linspace(shortest, 1.0, rows, device=batch.ids.device)
    ends = (share * columns).ceil().long()
    mask = torch.arange(columns, device=batch.ids.device) < ends[:, None]
    # short rows are responses from their beginning, or the prompt would be all there is of them
    return dataclasses.replace(batch, mask=mask & (batch.mask | (ends <= columns - columns // 2)[:, None]))


def live_rows(batch: Batch) -> Batch:
    """The microbatch without the rows that have no gradient."""
    live = (batch.advantages != 0) & batch.mask.any(1)
    return Batch(batch.ids[live], batch.mask[live], batch.old_logps[live], batch.advantages[live])
