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


def grpo_trainer(model: Path, config: Any, lora: bool = True, kind: Any = None) -> Any:
    """TRL's GRPOTrainer, rewards by the letters of responses, but for every other prompt.

    Args:
        config: a GRPOConfig.
        kind: a subclass to make in its place.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOTrainer

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        # Every other prompt's responses are all worth the same: their advantages are zero.
        same = [int(prompt.split()[0][1:]) % 2 for prompt in prompts]
        return [0.0 if even else float(len(set(text)) % 5) for even, text in zip(same, completions, strict=True)]

    return (kind or GRPOTrainer)(
        model=str(model),
        args=config,
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )
