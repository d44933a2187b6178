"""Tensor-parallel models on CPU ranks: a small Megatron-Core GPT, and layers as Megatron-DeepSpeed checkpoints them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64

# ------------------------------------------------------------------------------------------------ Megatron-Core


def prepare(tp: int) -> None:
    """Process groups and random states of `tp` tensor-parallel ranks, in place of those that there were.

    What Megatron asks of CUDA is asked of the CPU's generator instead.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    there = parallel_state.model_parallel_is_initialized()
    if there and parallel_state.get_tensor_model_parallel_world_size() != tp:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    torch.manual_seed(100 + dist.get_rank())  # attention's dropout differs between shards
    tracker.set_states({"model-parallel-rng": torch.get_rng_state()})
    torch.manual_seed(0)


def gpt(
    tp: int, recompute: int | None = 1, layers: int = 4, hidden: int = 32, length: int = 16, **settings: Any
) -> nn.Module:
    """Dropout everywhere. `recompute`: layers per group of `recompute_granularity="full"`; None: no recompute."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    if recompute is not None:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": recompute}
        settings = {**full, **settings}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        ffn_hidden_size=2 * hidden,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **settings,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=length)


def gpt_loss(engine: Any, seed: int, rows: int = 2, length: int = 16) -> Tensor:
    """Of one microbatch, the same on all tensor-parallel ranks."""
    return gpt_losses(engine, seed, rows, length).mean()


def gpt_losses(engine: Any, seed: int, rows: int = 2, length: int = 16) -> Tensor:
    """[rows, length]: of every token, from the vocabulary's shards."""
    ids = tokens(seed, rows, length)
    positions = torch.arange(length).expand(rows, -1)
    future = torch.ones(length, length).triu(1).bool()[None, None]
    losses: Tensor = engine(ids, positions, future, labels=ids)
    return losses


def tokens(seed: int, rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ Megatron-DeepSpeed


class OlderMpu:
    """What Megatron-DeepSpeed hands to DeepSpeed: all ranks of the job share one copy of the model."""

    def __init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), list(range(dist.get_world_size()))
        self._model = dist.new_group(self._ranks)
        self._data = [dist.new_group([rank]) for rank in self._ranks][self._rank]

    def get_model_parallel_world_size(self) -> int:
        return len(self._ranks)

    def get_model_parallel_rank(self) -> int:
        return self._rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data


class _Copied(torch.autograd.Function):
    """To every shard; gradients of all shards add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Reduced(torch.autograd.Function):
    """The sum over shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class ShardedMLP(nn.Module):
    """A residual MLP whose inner units are split over a group; dropout on them is each shard's own."""

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        shard, rank = 2 * width // group.size(), group.rank()
        up, down = torch.randn(2 * width, width) / width**0.5, torch.randn(width, 2 * width) / width**0.5
        self.up = nn.Parameter(up[rank * shard : (rank + 1) * shard].clone())
        self.down = nn.Parameter(down[:, rank * shard : (rank + 1) * shard].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        import deepspeed

        inner = F.gelu(F.linear(_Copied.apply(x, self.group), self.up))
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            inner = F.dropout(inner, 0.1)
        return x + F.dropout(_Reduced.apply(F.linear(inner, self.down), self.group), 0.1)


class ShardedModel(nn.Module):
    """Layers that go through `deepspeed.checkpointing.checkpoint` one by one, as Megatron-DeepSpeed's do."""

    def __init__(self, group: dist.ProcessGroup, layers: int = 4, width: int = 16, checkpoints: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(ShardedMLP(width, group) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        import deepspeed

        hidden = self.embedding(ids)
        for number in range(len(self.layers)):
            run = self._custom(number, number + 1)
            hidden = deepspeed.checkpointing.checkpoint(run, hidden) if self.checkpoints else run(hidden)
        return F.cross_entropy((hidden @ self.embedding.weight.T).flatten(0, 1), ids.flatten())

    def _custom(self, start: int, end: int) -> Callable[[Tensor], Tensor]:
        def custom_forward(hidden: Tensor) -> Tensor:
            for layer in self.layers[start:end]:
                hidden = layer(hidden)
            return hidden

        return custom_forward
