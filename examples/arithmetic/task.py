"""Arithmetic tasks with verifiable rewards, made by reasoning-gym.

The mixture is one that SmolLM2-135M-Instruct solves now and then: about a fifth of its sampled answers are right, so
most groups hold right and wrong answers and have advantages to learn from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INSTRUCTION = "Answer with the final number only."

_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")  # the minus of "9-4" is no sign
_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@dataclass(frozen=True)
class TaskConfig:
    """What tasks are drawn.

    Args:
        seed: the same seed gives the same tasks.
        datasets: reasoning-gym's dataset names and their settings, drawn equally often.
        size: tasks that there are; drawing goes round.
    """

    seed: int = 0
    datasets: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"chain_sum": _ONE_DIGIT, "products": _ONE_DIGIT}
    )
    size: int = 1_000_000


@dataclass(frozen=True)
class Task:
    """One question, with what reasoning-gym needs in order to score an answer to it."""

    question: str
    entry: Mapping[str, Any]


class ArithmeticTasks:
    """An endless, reproducible list of tasks, and the reward of a response."""

    def __init__(self, config: TaskConfig = TaskConfig()) -> None:
        from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec

        specs = [DatasetSpec(name, 1.0, dict(settings)) for name, settings in config.datasets.items()]
        self._tasks = CompositeDataset(CompositeConfig(size=config.size, seed=config.seed, datasets=specs))

    def draw(self, first: int, count: int) -> list[Task]:
        """Tasks `first` to `first + count - 1`."""
        entries = [self._tasks[index % len(self._tasks)] for index in range(first, first + count)]
        return [Task(entry["question"], entry) for entry in entries]

    def reward(self, task: Task, response: str) -> float:
        """reasoning-gym's score of the last number in `response`: 1 if right, else 0 or a small part of it."""
        return float(self._tasks.score_answer(final_number(response), task.entry))


def final_number(text: str) -> str | None:
    """The last number in `text` as it is written, or None."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def as_prompt(task: Task, tokenizer: Any) -> str:
    """The task in the model's chat format, or as plain text where its tokenizer has none."""
    if not tokenizer.chat_template:
        return f"{INSTRUCTION}\n{task.question}\n"
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": task.question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
