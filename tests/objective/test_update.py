"""Advantages and token counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.update import count_tokens, count_update_tokens, group_advantages
from tests.objective.cases import untimed


@given(st.integers(2, 8), st.lists(st.floats(-10, 10), min_size=1, max_size=4))
@untimed(max_examples=100)
def test_advantages_are_standardised_within_their_group(size: int, offsets: list[float]) -> None:
    groups = [torch.arange(size, dtype=torch.float64) * (i + 1) + offset for i, offset in enumerate(offsets)]
    found = group_advantages(torch.cat(groups), size).view(-1, size)
    for row, group in zip(found, groups):
        torch.testing.assert_close(row, (group - group.mean()) / (group.std(unbiased=True) + 1e-4))


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    """Not 1e-8: a row whose advantage is not exactly 0 cannot be pruned."""
    assert torch.equal(group_advantages(torch.full((2 * size,), reward), size), torch.zeros(2 * size))


def test_integer_rewards_are_widened() -> None:
    found = group_advantages(torch.tensor([0, 1, 1, 1]), 2, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([-(0.5**0.5), 0.5**0.5, float("nan"), float("nan")]), equal_nan=True)


@pytest.mark.parametrize(("shape", "size"), [((5,), 2), ((4, 1), 2), ((4,), 0)])
def test_rewards_that_do_not_split_are_refused(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(UsageError, match="groups of"):
        group_advantages(torch.zeros(shape), size)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_counts_hold_for_every_kind_of_mask(dtype: torch.dtype) -> None:
    """1,000 tokens: more than bfloat16 can count one by one."""
    mask = torch.ones(4, 250).to(dtype)
    mask[0] = 0  # a truncated response
    assert count_tokens(mask).item() == 750
    assert count_update_tokens([mask, mask[:1], mask[1:]]).item() == 1500


def test_one_reduction_per_update() -> None:
    calls: list[Tensor] = []

    def reduce(total: Tensor) -> Tensor:
        calls.append(total)
        return total + 100

    assert count_update_tokens([torch.ones(2, 3), torch.zeros(1, 5)], reduce).item() == 106
    assert len(calls) == 1 and calls[0].dtype == torch.int64 and calls[0].dim() == 0


def test_an_idle_rank_must_still_reduce() -> None:
    with pytest.raises(UsageError, match="all-zero mask"):
        count_update_tokens([])
