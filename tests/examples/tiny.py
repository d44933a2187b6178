"""A tiny policy and made-up rollouts, for the tests of the demo."""

from __future__ import annotations

import torch
from arithmetic.model import Actor, Sequences
from arithmetic.rollout import Microbatch
from torch import Tensor

from tests import models

END = 1


def actor(layers: int = 2, seed: int = 0) -> Actor:
    """A random Llama under LoRA whose adapters do something; token 1 ends a response."""
    base = models.llama(layers, seed=seed, eos_token_id=END, pad_token_id=END)
    return Actor(models.lora(base, seed=seed + 1))


def prompts(lengths: tuple[int, ...] = (5, 3), seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded random prompts and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, models.VOCAB, (len(lengths), width), generator=generator)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return ids * mask + END * (1 - mask), mask


def sequences(rows: int = 4, width: int = 6, seed: int = 0) -> Sequences:
    """Prompts of 5 and 3 tokens by turns, responses of `width`, `width - 1`, ... tokens."""
    prompt_ids, prompt_mask = prompts(tuple(5 - 2 * (row % 2) for row in range(rows)), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    responses = torch.randint(2, models.VOCAB, (rows, width), generator=generator)
    lengths = torch.tensor([max(width - row, 1) for row in range(rows)])
    mask = torch.arange(width) < lengths[:, None]
    attention = torch.cat([prompt_mask, mask.long()], 1)
    return Sequences(torch.cat([prompt_ids, responses], 1), attention, mask)


def microbatch(policy: Actor, rows: int = 4, seed: int = 0) -> Microbatch:
    """A microbatch with advantages +1 and -1 by turns."""
    made = sequences(rows, seed=seed)
    with policy.observed():
        old_logps = policy(*made)
    return Microbatch(made, torch.tensor([1.0, -1.0]).repeat(rows)[:rows], old_logps)
