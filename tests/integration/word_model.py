"""A tiny random Llama with a tokenizer of whole words, and what TRL trains it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import VOCAB, llama


def save_word_model(folder: Path) -> None:
    """Writes model and tokenizer as transformers would find them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<end>", *(f"w{i}" for i in range(VOCAB - 2))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(folder)
    llama().save_pretrained(folder)  # type: ignore[operator]


def grpo_trainer(model: Path, config: Any, lora: bool = True) -> Any:
    """TRL's GRPOTrainer, rewards by the letters of responses. Args: config: a GRPOConfig."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOTrainer

    return GRPOTrainer(
        model=str(model),
        args=config,
        reward_funcs=lambda completions, **_: [float(len(set(text)) % 5) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )
