"""TRL's GRPOTrainer under HiLoRe: TRL's own script, one more line, and a block in the DeepSpeed JSON.

    deepspeed --num_gpus 2 examples/trl_grpo.py --model FOLDER --deepspeed configs/trl_zero2.json --use_cpu

Everything after `--model` is TRL's GRPOConfig: `--loss_type`, `--beta`, `--max_completion_length` and so on. Prompts
are sums; a response is worth 1 where its last number is right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

import ds_hilore


@dataclass
class Arguments:
    model: str = field(metadata={"help": "folder of a transformers model"})
    prompts: int = field(default=256, metadata={"help": "how many there are"})


def sums(count: int) -> Dataset:
    drawn = random.Random(0)
    pairs = [(drawn.randrange(10), drawn.randrange(10)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs])


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    found = [re.findall(r"\d+", text) for text in completions]
    return [float(bool(numbers) and numbers[-1] == true) for numbers, true in zip(found, answer, strict=True)]


def main(arguments: Sequence[str] | None = None) -> GRPOTrainer:
    ours, args = HfArgumentParser((Arguments, GRPOConfig)).parse_args_into_dataclasses(arguments)
    ds_hilore.install()
    trainer = GRPOTrainer(
        model=ours.model,
        args=args,
        reward_funcs=right,
        train_dataset=sums(ours.prompts),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
