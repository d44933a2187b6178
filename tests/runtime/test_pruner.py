"""Which microbatches run pruned: what was announced, and what was seen of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_hilore.core.types import Shape
from ds_hilore.recovery.roles import UnitRoles
from ds_hilore.runtime.liveness import ExpectedLengths
from ds_hilore.runtime.microbatch import Microbatch
from ds_hilore.runtime.pruner import Pruner
from ds_hilore.runtime.update import MicrobatchFacts

#: Responses of 4 tokens behind prompts of 6.
SHAPE = Shape(4, 10)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 2.0])


def _shares(
    advantages: Tensor, mask: Tensor, weights: Tensor | None = None, shape: Shape = SHAPE
) -> tuple[float, float]:
    return ExpectedLengths(advantages, mask, weights).shares(shape)


@pytest.mark.parametrize("advantages", [ADVANTAGES, ADVANTAGES[:, None], ADVANTAGES[:, None].expand(4, 4)])
def test_shares(advantages: Tensor) -> None:
    """Rows live to their last optimised token, the prompt included; rows 2 and 3 are dead."""
    assert _shares(advantages, MASK) == ((10 + 8) / 40, (10 + 8 + 10) / 40)


def test_weights_of_zero_spare_like_advantages() -> None:
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert _shares(ADVANTAGES, MASK, weights)[0] == 8 / 40


def test_other_shapes_count_responses_only() -> None:
    """Packed rows: where the responses lie is not told."""
    assert _shares(ADVANTAGES, MASK, shape=Shape(1, 25)) == ((4 + 2) / 16, (4 + 2 + 4) / 16)


def _begun(pruner: Pruner, advantages: Tensor = ADVANTAGES, mask: Tensor = MASK, measuring: bool = False) -> Microbatch:
    facts = MicrobatchFacts(advantages, mask, 10)
    pruner.announced(facts)
    batch = Microbatch(facts=facts, shape=SHAPE)
    pruner.begin(batch, measuring)
    return batch


def _pruner() -> Pruner:
    return Pruner(lambda _: UnitRoles({}), rank=0)


def test_dead_and_short_rows_are_pruned() -> None:
    batch = _begun(_pruner())
    assert batch.prunes and batch.live_share == (10 + 8) / 40


def test_full_rows_are_not() -> None:
    batch = _begun(_pruner(), torch.ones(4), torch.ones(4, 4))
    assert not batch.prunes and batch.live_share == 1.0


def test_nothing_is_pruned_while_replays_are_measured() -> None:
    batch = _begun(_pruner(), measuring=True)
    assert not batch.prunes and batch.live_share == (10 + 8) / 40


def test_nothing_is_pruned_without_roles_or_announcement() -> None:
    assert not _begun(Pruner(None, rank=0)).prunes
    batch = Microbatch(shape=SHAPE)
    _pruner().begin(batch, measuring=False)
    assert not batch.prunes and batch.live_share is None


def _ended(pruner: Pruner, measured: float) -> bool:
    """What is believed of tokens without an advantage after a backward that ran this share."""
    batch = _begun(pruner)
    assert pruner._pruning is not None
    pruner._pruning.live_share = measured
    pruner.end(batch)
    assert batch.live_share == measured
    return pruner.spares_zero_advantages


def test_a_gradient_without_advantage_is_learnt() -> None:
    pruner = _pruner()
    assert _ended(pruner, 18 / 40)
    assert not _ended(pruner, 28 / 40)
    batch = _begun(pruner)
    assert batch.live_share == 28 / 40 and batch.prunes  # short rows are left
    assert _ended(pruner, 18 / 40)


def test_what_cannot_be_told_apart_teaches_nothing() -> None:
    pruner = _pruner()
    batch = _begun(pruner, torch.ones(4))
    assert pruner._pruning is not None
    pruner._pruning.live_share = 1.0
    pruner.end(batch)
    assert pruner.spares_zero_advantages
