"""Verifiable tasks of three kinds with answers of a few tokens, made by reasoning-gym, and rollouts on them.

Answers are short so that a real model's training fits a CPU. The prompt begins the answer ("Answer:"), and only the
first thing after it that could be an answer counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.objective.update import group_advantages
from examples.arithmetic.model import Actor, Sequences
from examples.arithmetic.rollout import PROMPT_MULTIPLE, Rollout, Sampling, decode, generate

#: Begins every answer.
LEAD = "Answer:"
#: Tasks of a dataset that training draws from; those after them are for validation.
TRAINING = 1_000_000


@dataclass(frozen=True)
class Kind:
    """One dataset of reasoning-gym.

    Args:
        settings: its own, for tasks that are as easy as they come.
        answer: a pattern of what could be an answer.
    """

    name: str
    settings: Mapping[str, Any]
    answer: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.answer, re.IGNORECASE)


#: Arithmetic; transformation of a string; logic.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, r"-?\d+"),
            Kind("spell_backward", {"min_word_len": 3, "max_word_len": 3}, r"[a-z]+"),
            Kind("syllogism", {}, r"\b(?:yes|no)\b"),
        )
    }
)


@dataclass(frozen=True)
class Question:
    """One task: its kind, its text, and the entry that reasoning-gym scores an answer with."""

    kind: Kind
    text: str
    entry: Mapping[str, Any]

    @property
    def answer(self) -> str:
        return str(self.entry["answer"])


class Tasks:
    """A reproducible list of questions, kinds in turn; and what a response to one is worth.

    Args:
        seed: the same seed gives the same questions.
        kinds: names in `KINDS`.
    """

    def __init__(self, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> None:
        from reasoning_gym.factory import create_dataset

        self._kinds = [KINDS[name] for name in kinds]
        self._sets = {
            kind.name: create_dataset(kind.name, size=2 * TRAINING, seed=seed, **kind.settings) for kind in self._kinds
        }

    def draw(self, first: int, count: int) -> list[Question]:
        """Questions `first` to `first + count - 1`."""
        found = []
        for index in range(first, first + count):
            kind = self._kinds[index % len(self._kinds)]
            entry = self._sets[kind.name][index // len(self._kinds)]
            found.append(Question(kind, entry["question"].strip(), entry))
        return found

    def held_out(self, count: int) -> list[Question]:
        """Questions that training does not draw."""
        return self.draw(TRAINING * len(self._kinds), count)

    def reward(self, question: Question, response: str) -> float:
        """reasoning-gym's score, 0 to 1, of the first thing in `response` that could be an answer."""
        found = question.kind.pattern.search(response)
        if found is None:
            return 0.0
        given = found.group()
        alike = given.lower() == question.answer.lower()  # "yes" is Yes
        return float(self._sets[question.kind.name].score_answer(question.answer if alike else given, question.entry))


def as_prompt(question: Question) -> str:
    """The question with the beginning of the answer; without the model's chat format, which is longer than both."""
    return f"{question.text}\n{LEAD}"


def sample(actor: Actor, tokenizer: Any, tasks: Tasks, drawn: Sequence[Question], sampling: Sampling) -> Rollout:
    """`sampling.group_size` responses to each question, scored. torch's generator decides: seed it to repeat them."""
    device = next(actor.parameters()).device
    prompts = tokenizer(
        [as_prompt(question) for question in drawn],
        return_tensors="pt",
        padding=True,
        pad_to_multiple_of=PROMPT_MULTIPLE,
    ).to(device)
    sequences = generate(actor, prompts["input_ids"], prompts["attention_mask"], sampling)
    texts = decode(tokenizer, sequences)
    scores = [tasks.reward(drawn[row // sampling.group_size], text) for row, text in enumerate(texts)]
    rewards = torch.tensor(scores, device=device)
    return Rollout(sequences, texts, rewards, group_advantages(rewards, sampling.group_size))


def trimmed(sequences: Sequences) -> Sequences:
    """Without what is padding in every row before the prompts, but for a few positions that keep shapes few."""
    ids, attention, mask = sequences
    begins = int(attention.any(0).int().argmax()) // PROMPT_MULTIPLE * PROMPT_MULTIPLE
    return Sequences(ids[:, begins:], attention[:, begins:], mask)


def right_answers(tokenizer: Any, drawn: Sequence[Question]) -> Sequences:
    """Every question with its right answer as the response: what `expected_score` reads."""
    prompts = [tokenizer(as_prompt(each)).input_ids for each in drawn]
    answers = [tokenizer(f" {each.answer}", add_special_tokens=False).input_ids for each in drawn]
    before, after = max(map(len, prompts)), max(map(len, answers))
    ids = torch.full((len(drawn), before + after), tokenizer.pad_token_id)
    attention = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        span = slice(before - len(prompt), before + len(answer))
        ids[row, span] = torch.tensor(prompt + answer)
        attention[row, span] = 1
    return Sequences(ids, attention, attention[:, before:].bool())


def expected_score(actor: Actor, answers: Sequences, rows: int = 16) -> float:
    """The mean probability, in points, that a sampled response begins with the right answer.

    It is what the score of sampled responses estimates, without its noise: a single response of a hundred that turns
    from right to wrong would be a point. Args: see `right_answers`; `rows` at a time.
    """
    found: list[Tensor] = []
    with actor.observed():
        for start in range(0, len(answers.input_ids), rows):
            found.append(actor(*answers.rows(slice(start, start + rows))).double().sum(1).exp())
    return 100 * float(torch.cat(found).mean())


def cut(actor: Actor, layers: int | None) -> None:
    """Leaves only the first decoder layers; None: all."""
    if layers is None:
        return
    causal = actor.model.get_base_model()
    kept: nn.ModuleList = causal.model.layers[:layers]
    causal.model.layers = kept
    causal.config.num_hidden_layers = len(kept)
