"""Configs of published models, as their config.json have them; no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def qwen25_3b() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def llama31_8b() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def qwen3_30b_a3b() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


#: By the name that docs/memory.md gives them.
PUBLISHED: dict[str, Callable[[], Any]] = {
    "Qwen2.5-3B": qwen25_3b,
    "Llama-3.1-8B": llama31_8b,
    "Qwen3-30B-A3B": qwen3_30b_a3b,
}


def write_config(name: str, folder: Path) -> Path:
    """Puts a model's config.json into a folder of its own; gives that folder."""
    path = folder / name
    config = PUBLISHED[name]()
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(path)
    return path
