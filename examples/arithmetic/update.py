"""One GRPO update through a DeepSpeed engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

import ds_hilore
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.objective.update import count_update_tokens

from .rollout import Microbatch


@dataclass(frozen=True)
class StepSeconds:
    """Where the seconds of one training step went on one rank: sampling, old log-probabilities, update."""

    sample: float
    score: float
    update: float

    @property
    def total(self) -> float:
        return self.sample + self.score + self.update


class Stopwatch:
    """Seconds between laps, with all queued device work done."""

    def __init__(self) -> None:
        self._last = self._now()

    def lap(self) -> float:
        """Seconds since the last lap, or since the stopwatch was made."""
        last, self._last = self._last, self._now()
        return self._last - last

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def run_update(
    engine: Any,
    microbatches: Sequence[Microbatch],
    config: GRPOLossConfig,
    before_step: Callable[[], None] | None = None,
) -> float:
    """Forward and backward of every microbatch, then the optimizer step.

    Args:
        engine: what `ds_hilore.initialize` (or `deepspeed.initialize`) gave.
        microbatches: as many as the engine's gradient accumulation steps.
        before_step: called when the gradients of the whole update are there, before the optimizer uses them.

    Returns:
        This rank's share of the update's loss.
    """
    num_tokens = count_update_tokens([m.mask for m in microbatches], reduce=sum_over_ranks)
    # The loss counts the tokens of the whole update; the engine averages over ranks and accumulation steps.
    scale = dist.get_world_size() * engine.gradient_accumulation_steps()
    ds_hilore.begin_update([m.advantages for m in microbatches], [m.mask for m in microbatches], num_tokens)
    total = 0.0
    for index, microbatch in enumerate(microbatches):
        ds_hilore.begin_microbatch(microbatch.advantages, microbatch.mask, num_tokens)
        loss = ds_hilore.grpo_loss(
            engine(*microbatch.sequences),
            microbatch.old_logps,
            microbatch.advantages,
            microbatch.mask,
            num_tokens,
            config=config,
            ref_logps=microbatch.ref_logps,
        )
        engine.backward(loss * scale)
        total += loss.item()
        if before_step is not None and index == len(microbatches) - 1:
            before_step()
        engine.step()
    return total


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks; `value` itself holds it afterwards."""
    dist.all_reduce(value)
    return value
