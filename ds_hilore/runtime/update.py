"""What the host tells about an update and its microbatches, and what the loss tells about its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.exposure import TokenFacts
from ds_hilore.runtime.forecast import Forecast
from ds_hilore.runtime.liveness import ExpectedLengths


@dataclass(frozen=True)
class MicrobatchFacts:
    """Known before a microbatch's forward. advantages [B], [B, 1] or [B, T]; mask [B, T]; weights as advantages.

    `exact_only`: the loss has parts that token coefficients do not hold, so no plan may compress.
    """

    advantages: Tensor
    mask: Tensor
    num_tokens: Tensor | float
    weights: Tensor | None = None
    exact_only: bool = False

    def __post_init__(self) -> None:
        if self.mask.dim() != 2:
            raise UsageError(f"mask must be [rows, tokens], got shape {tuple(self.mask.shape)}")
        rows, tokens = self.mask.shape
        for name in ("advantages", "weights"):
            given: Tensor | None = getattr(self, name)
            if given is not None and given.shape not in ((rows,), (rows, 1), (rows, tokens)):
                raise UsageError(
                    f"{name} has shape {tuple(given.shape)}, the mask {tuple(self.mask.shape)}: one entry per row, or "
                    "one per token"
                )

    @cached_property
    def forecast(self) -> Forecast:
        """Exposure and tokens as foreseen. Asking for it the first time sends it to the host."""
        return Forecast(self.advantages, self.mask, self.num_tokens, self.weights)

    @cached_property
    def expected(self) -> ExpectedLengths:
        """How far each row is optimised. Asking for it the first time sends it to the host."""
        return ExpectedLengths(self.advantages, self.mask, self.weights)


def announced_microbatches(
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    num_tokens: Tensor | float,
    weights: Sequence[Tensor] | None,
    exact_only: bool = False,
) -> list[MicrobatchFacts]:
    """One `MicrobatchFacts` per microbatch of this rank's update.

    Raises:
        UsageError: lists of different lengths, or shapes that do not fit.
    """
    if len(advantages) != len(masks) or (weights is not None and len(weights) != len(masks)):
        raise UsageError(
            f"begin_update: {len(advantages)} advantages, {len(masks)} masks and "
            f"{'no' if weights is None else len(weights)} weights; give one entry per microbatch"
        )
    per_batch = [None] * len(masks) if weights is None else list(weights)
    each = zip(advantages, masks, per_batch, strict=True)
    return [MicrobatchFacts(a, m, num_tokens, w, exact_only) for a, m, w in each]


class Announcements:
    """What the host told of one update's microbatches, handed out one entry each in their order."""

    def __init__(self) -> None:
        self._update: list[MicrobatchFacts] = []
        self._taken = 0
        self._next: MicrobatchFacts | None = None

    def __len__(self) -> int:
        """Microbatches of the update as announced, those already begun included."""
        return len(self._update)

    def announce_update(self, microbatches: Sequence[MicrobatchFacts]) -> None:
        self._update = list(microbatches)
        self._taken = 0

    def announce_microbatch(self, facts: MicrobatchFacts) -> None:
        self._next = facts

    def take(self) -> MicrobatchFacts | None:
        """Facts of the microbatch that begins now: its own announcement, else its entry of the update's."""
        facts, self._next = self._next, None
        if facts is None and self._taken < len(self._update):
            facts = self._update[self._taken]
        self._taken += 1
        return facts

    @property
    def begun(self) -> int:
        """Microbatches that have begun since the update did, or since it was announced."""
        return self._taken

    def restart(self) -> None:
        """The update begins again at its first microbatch."""
        self._taken = 0
        self._next = None

    def clear(self) -> None:
        """The update is over."""
        self._update = []
        self.restart()


class Source(Enum):
    """Where coefficients came from."""

    FORMULA = "formula"  # grpo_loss: closed form, before backward
    GRADIENT = "gradient"  # observe_logps: the gradient at the log-probabilities, at the start of backward


@dataclass
class Coefficients:
    """omega of one microbatch, free of accumulation, world size and loss scale (design section 5 "Scale")."""

    omega: Tensor
    source: Source
    mask: Tensor | None = None
    facts: TokenFacts = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad():
            self.facts = TokenFacts.of(self.omega, self.mask)


@dataclass(frozen=True)
class GradientScale:
    """What separates the gradient that a hook sees from omega.

    Attributes:
        data_parallel: ranks whose gradients are averaged; the caller multiplied the loss by them.
        loss_scale: of fp16 training; a 0-dim tensor where the host keeps it on the device (nothing waits for it).
        accumulation: what the caller multiplied by for accumulation, over what the host has divided by where the hook
            sits.
    """

    data_parallel: int = 1
    loss_scale: float | Tensor = 1.0
    accumulation: float = 1.0

    def omega(self, gradient: Tensor) -> Tensor:
        """The token coefficients in `gradient`, in float32 or wider: a loss scale is taken out without underflow."""
        wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
        return wide / (self.loss_scale * (self.data_parallel * self.accumulation))
