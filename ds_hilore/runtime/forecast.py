"""What a microbatch's advantages tell of its exposure, before any forward pass.

Ratios are taken to be 1 (GRPO's first pass over its data), terms without an advantage (KL) to be nothing, and so are
prompts, whose length nobody has told. A constant factor between forecasts and what comes is learnt
(planning/margin.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_hilore.objective.reach import CAUSAL, exposures
from ds_hilore.recovery.live import HostCopy
from ds_hilore.runtime.liveness import by_token


class Forecast:
    """Foreseen exposure and number of optimised tokens, on their way to the host since the announcement.

    Args:
        advantages, mask, num_tokens, weights: those of `MicrobatchFacts`.
    """

    def __init__(self, advantages: Tensor, mask: Tensor, num_tokens: Tensor | float, weights: Tensor | None) -> None:
        live = mask != 0
        magnitude = by_token(advantages.detach().abs().double())
        if weights is not None:
            magnitude = magnitude * by_token(weights.detach().abs().double())
        magnitude = torch.where(live, magnitude, 0.0) / num_tokens
        self._numbers = HostCopy(torch.cat([exposures(magnitude, (CAUSAL,), mask), live.sum().double().reshape(1)]))

    @property
    def ready(self) -> bool:
        """Whether reading waits for nobody."""
        return self._numbers.ready

    @property
    def usable(self) -> bool:
        """Whether it foresees anything: advantages, weights and the number of tokens may not be numbers."""
        return 0 <= self.exposure < math.inf

    @property
    def exposure(self) -> float:
        return float(self._numbers.get()[0])

    @property
    def tokens(self) -> int:
        return int(self._numbers.get()[1])
