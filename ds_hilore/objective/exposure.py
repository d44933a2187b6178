"""What the token coefficients omega say about a microbatch: exposure, reach, live rows (design section 3).

omega is [B, T]: dLoss/dlogp, from `grpo.token_coefficients` or from a gradient hook on the log-probabilities of any
other loss. A hook's values at masked positions are nobody's promise, so each function takes the mask and selects by it.
Nothing here waits for the device: results are tensors, and `TokenFacts.packed` makes one copy of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError


def exposure(omega: Tensor, mask: Tensor | None = None) -> Tensor:
    """E = sum of |omega| over live tokens, 0-dim, float32 or wider. NaN at a live token stays NaN.

    Args:
        omega: [B, T].
        mask: [B, T] bool or 0/1, true where live. None: everywhere.

    Raises:
        UsageError: the shapes differ.

    Source: design section 3, E_u with full reach (S = c = 1).
    """
    return magnitude_of(omega, mask).sum()


def live_rows(omega: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B] bool: rows with a live token whose omega is not exactly 0. A row that holds NaN is live.

    All other rows have exactly zero gradient through these log-probabilities (design fact 18).

    Args and Raises as `exposure`.
    """
    return (magnitude_of(omega, mask) != 0).any(1)


def reach_weights(omega: Tensor, segment_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """w_p = sum of |omega| over positions >= p of the same segment: how much of the loss causal state at p can reach.

    Args:
        omega: [B, T] laid out by position: column p holds the coefficient of the token that position p predicts,
            0 in the prompt (whose positions then carry the whole sum).
        segment_ids: [B, T] integers, equal within a segment and different between neighbours: packed rows. None:
            each row is one segment.
        mask: as in `exposure`.

    Returns:
        [B, T], dtype of `exposure`; exactly 0 where nothing live follows in the segment.

    Raises:
        UsageError: the shapes differ.

    Source: design section 3, "Token-resolved form".
    """
    magnitude = magnitude_of(omega, mask)
    # float64, because the sum behind a segment is subtracted again: in float32 a calm segment before a violent one
    # would be left with rounding error.
    suffix = magnitude.double().flip(1).cumsum(1).flip(1)
    if segment_ids is None:
        return suffix.to(magnitude.dtype)
    if segment_ids.shape != omega.shape:
        raise UsageError(f"segment_ids {tuple(segment_ids.shape)} must have the shape of omega {tuple(omega.shape)}")
    behind = torch.cat([suffix, suffix.new_zeros(len(suffix), 1)], 1).gather(1, next_segment(segment_ids))
    return (suffix - behind).to(magnitude.dtype)


@dataclass(frozen=True)
class TokenFacts:
    """What the planner and pruning read of one microbatch's omega, still on the device.

    Args:
        exposure: 0-dim, see `exposure`.
        finite: 0-dim bool, every live coefficient is finite.
        live_rows: [B] bool, see `live_rows`.
    """

    exposure: Tensor
    finite: Tensor
    live_rows: Tensor

    @classmethod
    def of(cls, omega: Tensor, mask: Tensor | None = None) -> TokenFacts:
        """Args and Raises as `exposure`."""
        magnitude = magnitude_of(omega, mask)
        return cls(magnitude.sum(), magnitude.isfinite().all(), (magnitude != 0).any(1))

    def packed(self) -> Tensor:
        """[2 + B] float64: exposure, finite, live rows. One copy brings all of it to the host."""
        return torch.cat([torch.stack([self.exposure.double(), self.finite.double()]), self.live_rows.double()])

    @classmethod
    def unpacked(cls, packed: Tensor) -> TokenFacts:
        """The facts again, from `packed` or a copy of it; exposure is float64."""
        return cls(packed[0], packed[1] != 0, packed[2:] != 0)


def magnitude_of(omega: Tensor, mask: Tensor | None) -> Tensor:
    """|omega|, [B, T] float32 or wider, 0 at masked positions whatever they hold."""
    if omega.dim() != 2 or (mask is not None and mask.shape != omega.shape):
        shape = None if mask is None else tuple(mask.shape)
        raise UsageError(f"omega {tuple(omega.shape)} and mask {shape} must have one shape, [rows, tokens]")
    wide = omega.detach().to(torch.promote_types(omega.dtype, torch.float32)).abs()
    return wide if mask is None else torch.where(mask != 0, wide, 0.0)


def next_segment(segment_ids: Tensor) -> Tensor:
    """[B, T] int64: for each position, where the next segment of its row starts (T after the last one)."""
    tokens = segment_ids.shape[1]
    position = torch.arange(tokens, device=segment_ids.device)
    starts_next = torch.ones_like(segment_ids, dtype=torch.bool)
    starts_next[:, :-1] = segment_ids[:, 1:] != segment_ids[:, :-1]
    # a segment's last position knows where the next one starts; the others take the nearest one behind them
    boundary = torch.where(starts_next, position + 1, tokens)
    return boundary.flip(1).cummin(1).values.flip(1)
