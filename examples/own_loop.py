"""A GRPO loop of one's own on DeepSpeed, in the shape that OpenRLHF has: sample, remember, pass over it several times.

    deepspeed --num_gpus 2 examples/own_loop.py --model FOLDER --deepspeed_config configs/zero2_exact.json

Two calls are for HiLoRe: `begin_microbatch` before a forward, `observe_logps` between log-probabilities and loss. The
loss is the loop's own. Outside of an engine with a block both calls do nothing or are left out (`told`), so the loop
runs with plain DeepSpeed too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor

import ds_hilore
from ds_hilore.objective.update import count_update_tokens, group_advantages


@dataclass(frozen=True)
class Experience:
    """Sampled sequences of one microbatch. B rows, T positions, R response positions at their end.

    Attributes:
        inputs: of the model's forward: input_ids [B, T] and what goes with them.
        mask: [B, R], true at response tokens.
        old_logps: [B, R].
        advantages: [B, 1] or [B, R].
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    old_logps: Tensor
    advantages: Tensor


def token_logps(model: Any, inputs: dict[str, Tensor], count: int) -> Tensor:
    """Log-probabilities [B, count] of the last `count` tokens."""
    ids = inputs["input_ids"]
    logits = model(**inputs, use_cache=False).logits[:, -count - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, -count:, None])[..., 0]


def policy_loss(logps: Tensor, experience: Experience, num_tokens: Tensor, clip: float = 0.2) -> Tensor:
    """PPO's clipped loss, summed over this microbatch and divided by the tokens of the whole update."""
    ratio = (logps - experience.old_logps).exp()
    gain = torch.min(ratio * experience.advantages, ratio.clamp(1 - clip, 1 + clip) * experience.advantages)
    return -(gain * experience.mask).sum() / num_tokens


def microbatch(engine: Any, experience: Experience, num_tokens: Tensor) -> Tensor:
    """Forward and backward of one microbatch, with the two calls."""
    if told(engine):
        ds_hilore.begin_microbatch(experience.advantages, experience.mask, num_tokens, engine=engine)
    logps = token_logps(engine, experience.inputs, experience.mask.shape[1])
    ds_hilore.observe_logps(logps, experience.mask, engine=engine)
    loss = policy_loss(logps, experience, num_tokens)
    # Ranks average their gradients and DeepSpeed divides by the accumulation steps; num_tokens has counted both.
    engine.backward(loss * (engine.dp_world_size * engine.gradient_accumulation_steps()))
    return loss.detach()


def train_on(engine: Any, remembered: Sequence[Experience], passes: int) -> list[float]:
    """Passes over what was sampled, one optimizer step per gradient_accumulation_steps() microbatches.

    Returns:
        This rank's share of each update's loss.
    """
    engine.train()  # in eval mode, as from_pretrained leaves a model, transformers checkpoints nothing
    steps = engine.gradient_accumulation_steps()
    losses = []
    for _ in range(passes):
        for first in range(0, len(remembered), steps):
            update = remembered[first : first + steps]
            num_tokens = count_update_tokens([each.mask for each in update], reduce=summed).clamp(min=1)
            total = torch.zeros((), device=engine.device)
            for experience in update:
                total += microbatch(engine, experience, num_tokens)
                engine.step()
            losses.append(float(total))
    return losses


def told(engine: Any) -> bool:
    return getattr(engine, "hilore", None) is not None


def summed(count: Tensor) -> Tensor:
    dist.all_reduce(count)
    return count


# ------------------------------------------------------------------------------------------------ sampling


@torch.no_grad()
def sample(engine: Any, prompts: Tensor, group_size: int, new_tokens: int) -> Experience:
    """One microbatch of responses by the engine's own weights (ZeRO-0 to 2), scored by how varied they are."""
    model = engine.module.eval()
    width = prompts.shape[1]
    rows = prompts.repeat_interleave(group_size, 0)
    ids = model.generate(rows, do_sample=True, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0)
    responses = ids[:, width:]
    rewards = torch.tensor([len(set(row.tolist())) / new_tokens for row in responses], device=ids.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Experience(
        inputs=inputs,
        mask=torch.ones_like(responses),
        old_logps=token_logps(model, inputs, new_tokens),
        advantages=group_advantages(rewards, group_size)[:, None],
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a transformers model")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--rounds", type=int, default=3, help="of sampling")
    parser.add_argument("--passes", type=int, default=2, help="over what a round has sampled")
    parser.add_argument("--group_size", type=int, default=4)
    parser.add_argument("--new_tokens", type=int, default=16)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)

    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(args.model), LoraConfig(r=8, target_modules="all-linear")
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ds_hilore.install()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=args.deepspeed_config)
    torch.manual_seed(1 + dist.get_rank())
    losses: list[float] = []
    for number in range(args.rounds):
        prompts = torch.randint(2, model.config.vocab_size, (1, 8), device=engine.device)
        remembered = [
            sample(engine, prompts, args.group_size, args.new_tokens)
            for _ in range(engine.gradient_accumulation_steps())
        ]
        losses += train_on(engine, remembered, args.passes)
        if dist.get_rank() == 0:
            print(f"round {number}: losses of its updates {[round(loss, 4) for loss in losses[-args.passes :]]}")
    return losses


if __name__ == "__main__":
    main()
