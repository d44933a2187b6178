"""What the benchmarks measure: a real model (or its first layers, or its shape) in a one-rank DeepSpeed engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.integration.causal import response_log_probs
from ds_hilore.integration.rehearsal import free_port, let_adapters_matter

LORA_RANK = 16
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

#: Qwen2.5-3B (its published config.json), for random weights.
QWEN_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True)
class Preset:
    """One size of the benchmark. `layers` None: all of them. Half of every row is prompt, half response.

    `shape`: a Qwen2 config for random weights in place of the real model. `turns`: updates per method by default.
    """

    layers: int | None
    rows: int
    row_tokens: int
    turns: int
    budgets: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    shape: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


#: Microbatches of calibration. They are all the same one here, so few will do.
CALIBRATION = 2

SWEEP = ("phi=0", "phi=0.05", "phi=0.1", "phi=0.25", "phi=0.5", "phi=0.75", "1.10x", "1.20x", "unlimited")
PRESETS = {
    "quick": Preset(8, rows=4, row_tokens=128, turns=14, budgets=("1.10x",)),
    "full": Preset(None, rows=8, row_tokens=256, turns=3, budgets=SWEEP),
    "gpu": Preset(
        None, rows=4, row_tokens=1024, turns=10, budgets=("1.10x", "1.20x"), dtype=torch.bfloat16, shape=QWEN_3B
    ),
}


def sized(preset: str, layers: int | None, rows: int | None) -> Preset:
    """The preset with other numbers of layers and of sequences a microbatch; None leaves one as it is."""
    given = {"layers": layers, "rows": rows}
    return replace(PRESETS[preset], **{name: count for name, count in given.items() if count is not None})


class Policy(nn.Module):
    """A causal language model as the engine sees it: forward gives the responses' log-probabilities.

    `whole_logits`: as many loops still have them, [B, T, vocab] at once; else in chunks.
    """

    def __init__(self, model: nn.Module, causal: Any, whole_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.whole_logits = whole_logits
        self._causal = [causal]  # not a submodule of its own: it is inside `model`

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, T - 1] log-probabilities of ids[:, 1:], 0 where `mask` [B, T - 1] is false."""
        return response_log_probs(self._causal[0], ids, mask, self.whole_logits)


@dataclass(frozen=True)
class Batch:
    """One microbatch of recorded rollouts: ids [B, T] int64, mask and old log-probabilities [B, T - 1]."""

    ids: Tensor
    mask: Tensor
    old_logps: Tensor
    advantages: Tensor

    @classmethod
    def random(cls, preset: Preset, vocabulary: int, seed: int, device: torch.device | str = "cpu") -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocabulary, (preset.rows, preset.row_tokens), generator=generator)
        mask = torch.zeros(preset.rows, preset.row_tokens - 1, dtype=torch.bool)
        mask[:, preset.row_tokens // 2 :] = True
        advantages = torch.randn(preset.rows, generator=generator)
        return cls(*(tensor.to(device) for tensor in (ids, mask, torch.full(mask.shape, -8.0), advantages)))


def policy(path: Path | None, preset: Preset, full_finetuning: bool, whole_logits: bool = False) -> tuple[Policy, int]:
    """The model at `path` (or of the preset's shape) cut to the preset's layers, with LoRA unless all of it is trained;
    and its vocabulary size. lora_B is random instead of zero, so that every adapter has a gradient."""
    causal = _random_model(preset) if preset.shape is not None else _local_model(path, preset)
    model: nn.Module = causal if full_finetuning else _with_lora(causal)
    return Policy(model.train(), causal, whole_logits), causal.config.vocab_size


def _local_model(path: Path | None, preset: Preset) -> Any:
    from transformers import AutoModelForCausalLM

    assert path is not None
    causal = AutoModelForCausalLM.from_pretrained(path, dtype=preset.dtype)
    if preset.layers is not None:
        causal.model.layers = causal.model.layers[: preset.layers]
        causal.config.num_hidden_layers = preset.layers
    return causal


def _random_model(preset: Preset) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {**(preset.shape or {})}
    if preset.layers is not None:
        shape["num_hidden_layers"] = preset.layers
    before = torch.get_default_dtype()
    torch.set_default_dtype(preset.dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return Qwen2ForCausalLM(Qwen2Config(**shape))
    finally:
        torch.set_default_dtype(before)


def _with_lora(causal: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(causal, LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS))  # type: ignore[arg-type]
    let_adapters_matter(wrapped)
    return wrapped


def one_rank_environment() -> None:
    """What the launcher would set for a single rank."""
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


#: Mode paper in models of any size: tensors of 32 MiB, and bfloat16, are for the large ones on a GPU.
PAPER = {"mode": "paper", "paper": {"least_tensor_bytes": 0, "dtypes": ["bfloat16", "float32"]}}


def engine_for(
    model: nn.Module, budget: str, stage: int = 0, max_gradient_error: float = 0.0, paper: bool = False
) -> Any:
    """A one-rank hilore engine with learning rate 0: the optimizer steps, the parameters stay. `paper`: in that mode.

    The optimizer is torch's fused one, which needs no memory of its own while it steps: else its temporaries, not the
    update, would set the peak of every method alike.
    """
    import ds_hilore

    one_rank_environment()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True, "fused": True},
        },
        "steps_per_print": 10**9,
        "hilore": {
            "memory_budget": budget,
            "max_gradient_error": max_gradient_error,
            "selfcheck": {"updates": 0},  # what is measured is to be the plan's own
            "profile": {"calibration_microbatches": CALIBRATION, "audit_interval": 0},
            **(PAPER if paper else {}),
        },
    }
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=trainable, config=config)
    return engine
