"""Tiny pipelines for tests: decoder blocks between a tied embedding and head, on the stages of real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ds_hilore
from tests.engines import before_each_step

VOCAB, WIDTH = 64, 32


class Block(nn.Module):
    """Causal attention and a gated MLP, with a residual stream."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TwoStreams(Block):
    """The block for stages that hand on several tensors: the hidden state, and a copy that it adds to."""

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, extra = given if isinstance(given, tuple) else (given, given)
        y = super().forward(x)
        return y, extra + 0.5 * y


class Join(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0] + given[1]


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(stages: int, blocks: int = 4, streams: int = 1, interval: int = 0) -> Any:
    """A PipelineModule with the same weights at every call."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    tied = {"num_embeddings": VOCAB, "embedding_dim": WIDTH}
    middle = [LayerSpec(Block if streams == 1 else TwoStreams) for _ in range(blocks)]
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, **tied),
        *middle,
        *([LayerSpec(Join)] if streams == 2 else []),
        LayerSpec(nn.RMSNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, forward_fn=head, **tied),
    ]
    return PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
        seed_layers=True,
        base_seed=7,
    )


def settings(microbatches: int = 4, rows: int = 2, stage: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": microbatches,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        **more,
    }


def start(module: Any, ds: dict[str, Any]) -> Any:
    """An engine; with our controller where the config has the block."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = ds_hilore.initialize(model=module, model_parameters=trainable, config=ds)
    return engine


def data(number: int, replica: int, rows: int = 2, tokens: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches of one update."""
    generator = torch.Generator().manual_seed(1000 * replica + number)
    while True:
        ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
        yield ids, ids


def update(engine: Any, number: int, **shape: int) -> tuple[dict[str, Tensor], float]:
    """One `train_batch`: this stage's reduced gradients just before the step, and the loss."""
    with before_each_step(engine) as found:
        torch.manual_seed(number)
        value = engine.train_batch(data(number, engine.grid.get_data_parallel_id(), **shape))
    return found[0], float(value)


def facts(engine: Any) -> dict[str, Any]:
    """Where this rank stands."""
    return {"rank": dist.get_rank(), "stage": engine.stage_id, "replica": engine.grid.get_data_parallel_id()}
