"""transformers' Trainer under HiLoRe: next tokens of sums, with LoRA.

    deepspeed --num_gpus 2 examples/trainer_sft.py --model FOLDER --deepspeed configs/trainer_zero2.json --use_cpu

Everything after `--model` is transformers' TrainingArguments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import ds_hilore


@dataclass
class Arguments:
    model: str = field(metadata={"help": "folder of a transformers model"})
    examples: int = field(default=256, metadata={"help": "how many there are"})


def sums(tokenizer: Any, count: int) -> Dataset:
    """Questions without labels, answers with them."""
    drawn = random.Random(0)

    def one() -> dict[str, list[int]]:
        a, b = drawn.randrange(10), drawn.randrange(10)
        question, answer = tokenizer(f"{a} + {b} =").input_ids, tokenizer(f" {a + b}").input_ids
        return {
            "input_ids": question + answer,
            "attention_mask": [1] * len(question + answer),
            "labels": [-100] * len(question) + answer,
        }

    return Dataset.from_list([one() for _ in range(count)])


def main(arguments: Sequence[str] | None = None) -> Trainer:
    ours, args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses(arguments)
    ds_hilore.install()
    tokenizer = AutoTokenizer.from_pretrained(ours.model)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(ours.model),
        LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sums(tokenizer, ours.examples),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
