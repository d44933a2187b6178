"""HiLoRe against torch's activation checkpointing and against no checkpointing, on the same recorded rollouts.

Every method runs the same whole update (same microbatches, loss, chunked log-probabilities, parameters). The learning
rate is 0 meanwhile, so that the optimizer step is part of the time and the parameters stay what they are. The methods
take turns, all ranks the same one at the same time, and ratios are taken within a turn: what else happens on the
machine meets all of them. Times and peaks come from different runs, because measuring the physical peak on CPU slows
memory-heavy methods down (design fact 20).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hilore.core.types import Action
from ds_hilore.memory.glibc import tight_malloc
from ds_hilore.memory.meter import peak_meter

from .update import Stopwatch

#: Below this part of the update's time, what checkpointing costs is lost in the noise of a busy machine.
SMALLEST_EXTRA = 0.05


class Method(Enum):
    """How the saved state of the decoder layers reaches backward, in the order of a turn; HiLoRe is the last."""

    NONE = "no checkpointing"  # every tensor is kept: the reference of gradients
    CHECKPOINTING = "checkpointing"  # torch, non-reentrant: the reference of times and peaks
    HILORE = "HiLoRe"


@dataclass(frozen=True)
class RankFigures:
    """What the comparison found on one rank.

    Args:
        seconds: per method, one whole update per turn.
        peak_bytes: per method, the physical peak of the process during one update.
        budget_bytes: what the rank's plan may reach.
        actions: decoder layers per action letter in the last microbatch's plan.
        gradient_error: per method, `largest_difference` from no checkpointing.
        update_share: update seconds over all seconds of a training step.
    """

    rank: int
    seconds: Mapping[Method, Sequence[float]]
    peak_bytes: Mapping[Method, int]
    budget_bytes: int | None
    actions: Mapping[str, int]
    gradient_error: Mapping[Method, float]
    update_share: float

    def median_ratio(self, method: Method, base: Method) -> float:
        """Median over turns of the time of `method` over that of `base`."""
        return median(a / b for a, b in zip(self.seconds[method], self.seconds[base]))

    def recovered_share(self) -> float | None:
        """Part of checkpointing's extra time over no checkpointing that HiLoRe saves (design section 2).

        None where that extra time is too small a part of the update to be measured.
        """
        possible = 1 - self.median_ratio(Method.NONE, Method.CHECKPOINTING)
        if possible < SMALLEST_EXTRA:
            return None
        return (1 - self.median_ratio(Method.HILORE, Method.CHECKPOINTING)) / possible


class Comparison:
    """Runs the methods on one engine and gathers what they cost on this rank.

    Args:
        engine: a hilore engine.
        update: runs one whole update, and calls its argument when the gradients are there.
        advance: called after each update, for a progress bar.
    """

    def __init__(
        self, engine: Any, update: Callable[[Callable[[], None] | None], Any], advance: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._update = update
        self._advance = advance

    @staticmethod
    def updates(turns: int) -> int:
        """Updates that `run` takes."""
        return len(Method) * (turns + 2)

    def run(self, turns: int, update_share: float) -> RankFigures:
        with frozen_parameters(self._engine):
            gradient_error = self._gradient_errors()  # warms every method up, too
            seconds = self._seconds(turns)
            peak_bytes = self._peaks()
        hilore = self._engine.hilore  # its plan is that of the last update, and the last method is HiLoRe
        return RankFigures(
            rank=dist.get_rank(),
            seconds=seconds,
            peak_bytes=peak_bytes,
            budget_bytes=hilore.budget_bytes,
            actions={action.letter: hilore.plan.count(action) for action in Action if hilore.plan.count(action)},
            gradient_error=gradient_error,
            update_share=update_share,
        )

    def _gradient_errors(self) -> dict[Method, float]:
        """Keeps no gradient: copies that stay would be part of every peak measured later."""
        exact = self._gradients(Method.NONE)
        others = [method for method in Method if method is not Method.NONE]
        return {Method.NONE: 0.0} | {m: largest_difference(self._gradients(m), exact) for m in others}

    def _gradients(self, method: Method) -> list[Tensor]:
        found: list[Tensor] = []
        self._run(method, before_step=lambda: found.extend(full_gradients(self._engine.module)))
        return found

    def _seconds(self, turns: int) -> dict[Method, list[float]]:
        methods = list(Method)
        seconds: dict[Method, list[float]] = {method: [] for method in methods}
        for turn in range(turns):
            first = turn % len(methods)
            for method in methods[first:] + methods[:first]:
                seconds[method].append(self._run(method))
        return seconds

    def _peaks(self) -> dict[Method, int]:
        peaks = {}
        device = next(self._engine.module.parameters()).device
        with tight_malloc() if device.type == "cpu" else contextlib.nullcontext():
            meter = peak_meter(device)
            for method in Method:
                meter.reset()
                self._run(method)
                peaks[method] = meter.peak_bytes()
        return peaks

    def _run(self, method: Method, before_step: Callable[[], None] | None = None) -> float:
        """Seconds of one update under `method`."""
        with self._recovery(method):
            dist.barrier()
            watch = Stopwatch()
            self._update(before_step)
            seconds = watch.lap()
        self._advance()
        return seconds

    def _recovery(self, method: Method) -> contextlib.AbstractContextManager[Any]:
        hilore = self._engine.hilore
        if method is Method.NONE:
            return hilore.paused()
        if method is Method.CHECKPOINTING:
            return hilore.host_checkpointing(partial(checkpoint, use_reentrant=False))
        return contextlib.nullcontext()


@contextlib.contextmanager
def frozen_parameters(engine: Any) -> Iterator[None]:
    """Inside, optimizer steps leave the parameters as they are: learning rate 0, no schedule, no weight decay."""
    groups = engine.optimizer.param_groups
    kept = [(group["lr"], group.get("weight_decay", 0.0)) for group in groups]
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    for group in groups:
        group.update(lr=0.0, weight_decay=0.0)
    try:
        yield
    finally:
        for group, (lr, weight_decay) in zip(groups, kept):
            group.update(lr=lr, weight_decay=weight_decay)
        engine.lr_scheduler = scheduler


def full_gradients(module: torch.nn.Module) -> list[Tensor]:
    """Copies of the reduced gradients of all trainable parameters. A collective under ZeRO: all ranks in step."""
    return [safe_get_full_grad(p).clone() for p in module.parameters() if p.requires_grad]


def largest_difference(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest over tensors of max|g - exact| / max|exact|. A tensor that is exactly zero must be met exactly."""
    worst = 0.0
    for gradient, reference in zip(gradients, exact, strict=True):
        difference, size = (gradient - reference).abs().max().item(), reference.abs().max().item()
        if difference > 0:
            worst = max(worst, difference / size if size > 0 else float("inf"))
    return worst


def gather(figures: RankFigures) -> list[RankFigures]:
    """The figures of all ranks in rank order, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    return gathered
