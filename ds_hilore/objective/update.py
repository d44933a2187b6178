"""What is known of an update before any forward pass: how much it optimises, and the advantages of its responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError

Count = int | float | Tensor
"""A number of tokens or rows: a Python number or a 0-dim tensor."""


@dataclass(frozen=True)
class UpdateSize:
    """Size of the whole update over all ranks and microbatches; each is clamped to at least 1.

    Args:
        tokens: live (optimised) tokens; see `count_update_tokens`.
        rows: all rows, fully masked ones included.
    """

    tokens: Count
    rows: Count


def group_advantages(rewards: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (std + eps) within each group of consecutive rewards; sample standard deviation, as in TRL.

    Args:
        rewards: [G * group_size], the responses of one prompt next to each other.
        group_size: responses per prompt. A group of one has no spread: its advantage is 0.
        eps: added to the standard deviation. A group of equal rewards gets exactly 0.

    Returns:
        [G * group_size] in float32 or wider.

    Raises:
        UsageError: `rewards` is not 1-D, or its length is no multiple of `group_size`.
    """
    if group_size < 1 or rewards.dim() != 1 or rewards.numel() % group_size:
        raise UsageError(
            f"rewards of shape {tuple(rewards.shape)} do not split into groups of {group_size}; pass one reward per "
            "response, [prompts * group_size]"
        )
    groups = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, group_size)
    # Measured from the first reward: equal rewards then give exactly 0, whatever their mean rounds to.
    offset = groups - groups[:, :1]
    centred = offset - offset.mean(1, keepdim=True)
    if group_size == 1:
        return centred.flatten()
    return (centred / (offset.std(1, keepdim=True) + eps)).flatten()


def count_tokens(mask: Tensor) -> Tensor:
    """Optimised tokens of one microbatch as a 0-dim int64 tensor on the mask's device. Does not synchronise."""
    return (mask != 0).sum()


def count_update_tokens(masks: Sequence[Tensor], reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """N: optimised tokens of the whole update, with at most one all-reduce. Does not clamp; the loss does.

    Rows that are masked altogether (truncated responses) count nothing.

    Args:
        masks: one [B, T] mask per microbatch of this rank; at least one (an idle rank passes an all-zero mask, so
            that it takes part in the reduction).
        reduce: sums a 0-dim int64 tensor over all data-parallel ranks and gives the sum back. None: one rank.

    Returns:
        0-dim int64 tensor.

    Raises:
        UsageError: `masks` is empty.
    """
    if not masks:
        raise UsageError("masks is empty; a rank without microbatches passes one all-zero mask")
    total = torch.stack([count_tokens(mask) for mask in masks]).sum()
    return total if reduce is None else reduce(total)
