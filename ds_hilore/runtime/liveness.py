"""What announcements tell of the rows that will be live, before any forward pass.

A forecast decides whether a microbatch's replays run pruned; what they leave out is read from the gradient itself
(recovery/live.py). A wrong forecast costs time, never a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hilore.core.types import Shape
from ds_hilore.recovery.live import HostCopy


class ExpectedLengths:
    """How far each row of a microbatch is optimised, on its way to the host since it was announced.

    Args:
        advantages, mask, weights: those of `MicrobatchFacts`.
    """

    def __init__(self, advantages: Tensor, mask: Tensor, weights: Tensor | None) -> None:
        optimised = mask != 0
        policy = optimised & by_token(advantages != 0)
        if weights is not None:
            policy = policy & by_token(weights != 0)
        self.columns = mask.shape[1]
        self._lengths = HostCopy(torch.stack([_last(policy), _last(optimised)]))

    @property
    def ready(self) -> bool:
        """Whether reading waits for nobody."""
        return self._lengths.ready

    def shares(self, shape: Shape) -> tuple[float, float]:
        """Live positions of a microbatch of this shape, as shares of all: where a token without an advantage has no
        gradient, and where it has one (a KL or entropy term). Waits for the copy.

        The mask covers a row's last `columns` positions, whatever comes before them is its prompt.
        """
        by_policy, optimised = self._lengths.get().tolist()
        return self._share(by_policy, shape), self._share(optimised, shape)

    def _share(self, lengths: list[int], shape: Shape) -> float:
        if shape.segments != len(lengths) or shape.length < self.columns:  # packed rows
            return sum(lengths) / max(1, len(lengths) * self.columns)
        prompt = shape.length - self.columns
        return sum(prompt + length for length in lengths if length) / max(1, shape.tokens)


def by_token(per_row: Tensor) -> Tensor:
    """What is given as [B], [B, 1] or [B, T], in a form that goes with a mask [B, T]."""
    return per_row[:, None] if per_row.dim() == 1 else per_row


def _last(live: Tensor) -> Tensor:
    """[B] int64: behind the last true column of [B, T], 0 where there is none."""
    count = torch.arange(1, live.shape[1] + 1, device=live.device)
    return torch.where(live, count, 0).amax(1) if live.shape[1] else live.new_zeros(len(live), dtype=torch.long)
