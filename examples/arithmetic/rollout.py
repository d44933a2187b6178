"""Sampled responses, their rewards and advantages, cut into microbatches. B rows, P prompt and R response positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hilore.objective.update import group_advantages

from .model import Actor, Sequences
from .task import ArithmeticTasks, Task, as_prompt

#: Prompts are padded to a multiple of this, so that few different shapes occur.
PROMPT_MULTIPLE = 8


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: from the policy itself, so there is no top-k and no temperature but 1.

    Args:
        group_size: responses per prompt.
        max_new_tokens: longer responses are cut off there.
    """

    group_size: int = 8
    max_new_tokens: int = 48


@dataclass(frozen=True)
class Rollout:
    """Responses to some tasks, those to one task next to each other. `rewards` [B] and `advantages` [B] are float32."""

    sequences: Sequences
    responses: list[str]
    rewards: Tensor
    advantages: Tensor

    @property
    def lengths(self) -> Tensor:
        """[B] response tokens, the ending one included."""
        return self.sequences.response_mask.sum(1)

    @property
    def teaches(self) -> bool:
        """False where every group has equal rewards: then there is no gradient but that of the KL term."""
        return bool(self.advantages.any())

    @property
    def prompt_width(self) -> int:
        return self.sequences.input_ids.shape[1] - self.sequences.response_mask.shape[1]


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward pass learns from; log-probabilities are [B, R], `ref_logps` only where beta > 0."""

    sequences: Sequences
    advantages: Tensor
    old_logps: Tensor
    ref_logps: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        return self.sequences.response_mask


def sample(actor: Actor, tokenizer: Any, tasks: ArithmeticTasks, drawn: Sequence[Task], sampling: Sampling) -> Rollout:
    """Samples `group_size` responses to each drawn task with a KV cache, and scores them."""
    device = next(actor.parameters()).device
    prompts = tokenizer(
        [as_prompt(task, tokenizer) for task in drawn],
        return_tensors="pt",
        padding=True,
        pad_to_multiple_of=PROMPT_MULTIPLE,
        add_special_tokens=not tokenizer.chat_template,  # a chat template has them in its text
    ).to(device)
    sequences = generate(actor, prompts["input_ids"], prompts["attention_mask"], sampling)
    responses = decode(tokenizer, sequences)
    rewards = torch.tensor(
        [tasks.reward(drawn[row // sampling.group_size], text) for row, text in enumerate(responses)], device=device
    )
    return Rollout(sequences, responses, rewards, group_advantages(rewards, sampling.group_size))


def generate(actor: Actor, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Sampling) -> Sequences:
    """`group_size` sampled continuations of each prompt, side by side with it."""
    end_ids = _end_ids(actor)
    with actor.observed():
        input_ids = actor.model.generate(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            synced_gpus=_is_partitioned(actor),  # ranks gather parameters together, until the last one has ended
            eos_token_id=end_ids,
            pad_token_id=end_ids[0],
        )
    mask = response_mask(input_ids[:, prompt_ids.shape[1] :], end_ids)
    prompt_mask = prompt_mask.repeat_interleave(sampling.group_size, 0)
    return Sequences(input_ids, torch.cat([prompt_mask, mask.to(prompt_mask.dtype)], 1), mask)


def response_mask(responses: Tensor, end_ids: Sequence[int]) -> Tensor:
    """[B, R] bool: true up to and including the first ending token of each row."""
    ends = torch.isin(responses, torch.tensor(end_ids, device=responses.device))
    return ends.cumsum(1) - ends.long() == 0


def decode(tokenizer: Any, sequences: Sequences) -> list[str]:
    """The responses as text, without special tokens and without what follows the end."""
    width = sequences.response_mask.shape[1]
    rows = zip(sequences.input_ids[:, -width:], sequences.response_mask)
    return [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in rows]


def to_microbatches(actor: Actor, rollout: Rollout, rows: int, with_reference: bool) -> list[Microbatch]:
    """Cuts a rollout into microbatches of `rows` rows, with the log-probabilities of the policy that sampled it."""
    microbatches = []
    for start in range(0, len(rollout.responses), rows):
        span = slice(start, start + rows)
        sequences = rollout.sequences.rows(span)
        with actor.observed():
            old_logps = actor(*sequences)
            ref_logps = None
            if with_reference:
                with actor.reference():
                    ref_logps = actor(*sequences)
        microbatches.append(Microbatch(sequences, rollout.advantages[span], old_logps, ref_logps))
    return microbatches


def _end_ids(actor: Actor) -> list[int]:
    end = actor.model.generation_config.eos_token_id
    return [end] if isinstance(end, int) else list(end)


def _is_partitioned(actor: Actor) -> bool:
    """Whether ZeRO-3 holds the parameters."""
    return hasattr(next(actor.parameters()), "ds_id")
