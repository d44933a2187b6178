"""What the benchmarks measure: a real model (or its first layers) in a one-rank DeepSpeed engine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.objective.chunked import log_probs

LORA_RANK = 16
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Preset:
    """One size of the benchmark. `layers` None: all of them. Half of every row is prompt, half response."""

    layers: int | None
    rows: int
    row_tokens: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


PRESETS = {
    "quick": Preset(layers=8, rows=4, row_tokens=128),
    "full": Preset(layers=None, rows=8, row_tokens=256),
}


class Policy(nn.Module):
    """A causal language model as the engine sees it: forward gives the responses' log-probabilities, chunked."""

    def __init__(self, model: nn.Module, causal: Any) -> None:
        super().__init__()
        self.model = model
        self._causal = [causal]  # not a submodule of its own: it is inside `model`

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, T - 1] log-probabilities of ids[:, 1:], 0 where `mask` [B, T - 1] is false."""
        causal = self._causal[0]
        hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return log_probs(hidden[:, :-1], causal.get_output_embeddings(), ids[:, 1:], mask=mask)


@dataclass(frozen=True)
class Batch:
    """One microbatch of recorded rollouts: ids [B, T] int64, mask and old log-probabilities [B, T - 1]."""

    ids: Tensor
    mask: Tensor
    old_logps: Tensor
    advantages: Tensor

    @classmethod
    def random(cls, preset: Preset, vocabulary: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocabulary, (preset.rows, preset.row_tokens), generator=generator)
        mask = torch.zeros(preset.rows, preset.row_tokens - 1, dtype=torch.bool)
        mask[:, preset.row_tokens // 2 :] = True
        return cls(ids, mask, torch.full(mask.shape, -8.0), torch.randn(preset.rows, generator=generator))


def policy(path: Path, preset: Preset, full_finetuning: bool) -> tuple[Policy, int]:
    """The model at `path` cut to the preset's layers, with LoRA unless all of it is trained; and its vocabulary size.

    lora_B is random instead of zero, so that every adapter has a gradient.
    """
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if preset.layers is not None:
        causal.model.layers = causal.model.layers[: preset.layers]
        causal.config.num_hidden_layers = preset.layers
    model: nn.Module = causal if full_finetuning else _with_lora(causal)
    return Policy(model.train(), causal), causal.config.vocab_size


def _with_lora(causal: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(causal, LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return wrapped


def one_rank_environment() -> None:
    """What the launcher would set for a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def engine_for(model: nn.Module, budget: str, stage: int = 0) -> Any:
    """A one-rank hilore engine with learning rate 0: the optimizer steps, the parameters stay."""
    import ds_hilore

    one_rank_environment()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        "hilore": {"memory_budget": budget},
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=trainable, config=config)
    return engine
