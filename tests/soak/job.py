"""One rank of a soak: an engine that lives from one call of `advance` to the next, and what each update needed.

The ranks run under the malloc variables of design fact 20, without which a physical peak on CPU means nothing. Shapes,
dead rows and budgets are drawn by each rank for itself: data-parallel ranks need not agree on any of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.integration.causal import response_log_probs
from ds_hilore.memory.meter import CpuMeter
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.runtime.parts import Stage
from tests.engines import config
from tests.integration import updates
from tests.models import llama, lora

LOSS = GRPOLossConfig(beta=0.0)  # rows without an advantage cannot change the model
#: Updates under one budget.
BUDGET_FOR = 25
#: Part of what storing everything adds to all-R's peak that a budget leaves, at least and at most.
HEADROOM = (0.15, 1.0)


@dataclass(frozen=True)
class Kind:
    """A model, and the shapes of its microbatches."""

    build: Callable[[], nn.Module]
    rows: int
    tokens: int
    least_tokens: int = 32


def _tiny() -> nn.Module:
    return llama(layers=6, hidden=192)


def _quick() -> nn.Module:
    """The shape of SmolLM2-135M's first 8 layers; random weights, of which memory knows nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()


KINDS = {"tiny": Kind(_tiny, rows=8, tokens=160), "quick": Kind(_quick, rows=4, tokens=128)}


class Policy(nn.Module):
    """Log-probabilities of the tokens that it is shown."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        base: Any = self.causal
        return response_log_probs(base.get_base_model(), ids, mask, whole_logits=False)


@dataclass(frozen=True)
class Seen:
    """One update of one rank; bytes of the process.

    Args:
        budget: in force.
        peak: measured.
        level: after the step, what is free but resident given back.
        predicted: the plan's; 0 where every unit was replayed.
        tokens: of its microbatches.
        stored, units: of its newest microbatch.
        dead: share of its rows that were announced as dead.
    """

    update: int
    budget: int
    peak: int
    level: int
    predicted: int
    tokens: int
    stored: int
    units: int
    dead: float


class Soak:
    """The run of this rank."""

    def __init__(self, model: str, stage: int, accumulation: int, seed: int) -> None:
        self._kind = KINDS[model]
        self._draw = random.Random(1000 * seed + dist.get_rank())
        self._meter = CpuMeter()
        self._number = 0
        policy = Policy(lora(self._kind.build()))
        # without its fused form the optimizer's own temporaries would set every peak
        settings = config(stage, accumulation)
        self._engine = updates.hilore_engine(policy, settings, memory_budget="1000x")
        self._hilore = self._engine.hilore
        self._least, self._most = self._learn()

    def advance(self, count: int) -> list[Seen]:
        """So many updates more."""
        return [self._update() for _ in range(count)]

    def _learn(self) -> tuple[int, int]:
        """Until plans are followed; then peaks of replaying and of storing everything, at the largest shape."""
        largest = (self._kind.rows, self._kind.tokens)
        while self._hilore.stage is not Stage.PLANNED:
            self._run([self._batch(largest, dead=0.0)] * self._engine.gradient_accumulation_steps())
        found = []
        for action in (Action.RECOMPUTE, Action.STORE):
            self._hilore.force(action)
            peaks = []
            for _ in range(2):
                self._meter.reset()
                self._run([self._batch(largest, dead=0.0)] * self._engine.gradient_accumulation_steps())
                peaks.append(self._meter.peak_bytes())
            found.append(max(peaks))
        self._hilore.force(None)
        return found[0], found[1]

    def _update(self) -> Seen:
        planner, kind = self._hilore.parts.planner, self._kind
        if self._number % BUDGET_FOR == 0:
            share = self._draw.uniform(*HEADROOM)
            planner.set_budget(self._least + int(share * (self._most - self._least)))
        dead = self._draw.choice([0.0, 0.0, 0.25, 0.5, 1.0])
        batches = []
        for _ in range(self._engine.gradient_accumulation_steps()):
            shape = (self._draw.randint(1, kind.rows), self._draw.randint(kind.least_tokens, kind.tokens))
            batches.append(self._batch(shape, dead))
        self._meter.reset()
        predicted = self._run(batches)
        peak = self._meter.peak_bytes()
        self._meter.settle()
        ran = list(self._hilore.microbatch.ran.values())
        rows = [row for _, advantages, _ in batches for row in advantages.tolist()]
        self._number += 1
        return Seen(
            update=self._number - 1,
            budget=planner.budget_bytes,
            peak=peak,
            level=self._meter.level_bytes(),
            predicted=predicted,
            tokens=sum(ids.numel() for ids, _, _ in batches),
            stored=ran.count(Action.STORE),
            units=len(ran),
            dead=sum(value == 0 for value in rows) / len(rows),
        )

    def _batch(self, shape: tuple[int, int], dead: float) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [rows, tokens], advantages [rows], of which a share is 0, and mask [rows, tokens - 1]."""
        rows, tokens = shape
        made = torch.Generator().manual_seed(self._draw.randrange(2**31))
        vocabulary: Any = self._engine.module.causal.config.vocab_size
        ids = torch.randint(0, vocabulary, shape, generator=made)
        advantages = torch.randn(rows, generator=made)
        advantages[: round(dead * rows)] = 0.0
        ends = torch.randint(tokens // 2, tokens, (rows, 1), generator=made)
        place = torch.arange(tokens - 1)
        return ids, advantages, (place >= tokens // 4) & (place < ends)

    def _run(self, batches: list[tuple[Tensor, Tensor, Tensor]]) -> int:
        """One announced update. Gives the highest peak that its plans promised."""
        engine, predicted = self._engine, 0
        count = float(self._kind.rows * self._kind.tokens * len(batches) * dist.get_world_size())
        ds_hilore.begin_update([each[1] for each in batches], [each[2] for each in batches], count, engine=engine)
        for ids, advantages, mask in batches:
            logps = engine(ids, mask)
            loss = ds_hilore.grpo_loss(logps, None, advantages, mask, count, config=LOSS)
            engine.backward(loss * dist.get_world_size() * len(batches))
            predicted = max(predicted, self._hilore.plan.peak_bytes)
            engine.step()
        return predicted


@functools.cache
def soak(model: str, stage: int, accumulation: int, seed: int) -> Soak:
    """The run of this process."""
    return Soak(model, stage, accumulation, seed)


def advance(count: int, **run: Any) -> list[Seen]:
    """So many updates more of the run that `run` says."""
    return soak(**run).advance(count)
