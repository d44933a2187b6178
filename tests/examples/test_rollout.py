"""Masks, sampling, microbatches, and the way of advantages into the policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from arithmetic.rollout import Rollout, Sampling, decode, generate, response_mask, to_microbatches
from arithmetic.task import Task
from torch import Tensor

from ds_hilore.objective.grpo import GRPOLossConfig, grpo_loss
from ds_hilore.objective.update import count_update_tokens, group_advantages
from tests.examples import tiny
from tests.ranks import RankPool

E = tiny.END


@pytest.mark.parametrize(
    ("responses", "ends", "expected"),
    [
        ([5, 6, E, E], [E], [1, 1, 1, 0]),  # the ending token is learnt, padding is not
        ([5, 6, 7, 8], [E], [1, 1, 1, 1]),  # cut off
        ([E, 6, 7, 8], [E], [1, 0, 0, 0]),  # empty
        ([5, E, 7, E], [E], [1, 1, 0, 0]),
        ([5, 9, 7, E], [E, 9], [1, 1, 0, 0]),  # either token ends
    ],
)
def test_response_mask(responses: list[int], ends: list[int], expected: list[int]) -> None:
    assert response_mask(torch.tensor([responses]), ends).int().tolist() == [expected]


def test_generate_puts_responses_beside_their_prompts() -> None:
    policy, sampling = tiny.actor(), Sampling(group_size=3, max_new_tokens=7)
    prompt_ids, prompt_mask = tiny.prompts()
    sequences = generate(policy, prompt_ids, prompt_mask, sampling)
    width = sequences.response_mask.shape[1]
    assert 1 <= width <= 7
    assert sequences.input_ids.shape == sequences.attention_mask.shape == (6, 5 + width)
    assert torch.equal(sequences.input_ids[:, :5], prompt_ids.repeat_interleave(3, 0))
    assert torch.equal(sequences.attention_mask[:, :5], prompt_mask.repeat_interleave(3, 0))
    assert torch.equal(sequences.attention_mask[:, 5:].bool(), sequences.response_mask)
    assert torch.equal(sequences.response_mask, response_mask(sequences.input_ids[:, 5:], [E]))


def test_sampling_is_from_the_policy() -> None:
    """Eight classes of tokens, from likely to unlikely, are met as often as the policy with its adapters says."""
    policy, rows = tiny.actor(), 4000
    prompt_ids, prompt_mask = tiny.prompts((4,))
    with torch.no_grad():
        policy.model.get_base_model().lm_head.weight.mul_(10)  # a policy with something to prefer
        expected = policy.model(input_ids=prompt_ids, attention_mask=prompt_mask).logits[0, -1].softmax(-1)
    order = expected.argsort(descending=True)
    classes = torch.empty_like(order).scatter_(0, order, (expected[order].cumsum(0) * 8).long().clamp(max=7))
    share = torch.zeros(8).index_add_(0, classes, expected)
    sampled = generate(policy, prompt_ids, prompt_mask, Sampling(rows, 1)).input_ids[:, -1]
    found = classes[sampled].bincount(minlength=8) / rows
    deviation = (share * (1 - share) / rows).sqrt()
    assert ((found - share).abs() < 4 * deviation).all()


def test_ranks_may_end_at_different_lengths_under_zero3(ranks: RankPool) -> None:
    results = ranks.run("tests.examples.test_rollout:generate_on_rank")
    lengths = [result["lengths"] for result in results]
    assert lengths[0] != lengths[1]
    assert results[0]["gradient_norm"] == pytest.approx(results[1]["gradient_norm"])  # still in step


def generate_on_rank() -> dict[str, Any]:
    import deepspeed
    from deepspeed import comm as dist

    policy = tiny.actor()
    policy.model.generation_config.eos_token_id = list(range(1, 150))  # about every third token ends a response
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=trainable, config=config)
    torch.manual_seed(dist.get_rank())
    sequences = [generate(policy, *tiny.prompts((4,)), Sampling(1, 30)) for _ in range(4)]
    engine.backward(engine(*tiny.sequences()).sum())
    engine.step()
    return {
        "lengths": [made.response_mask.sum().item() for made in sequences],
        "gradient_norm": float(engine.get_global_grad_norm()),
    }


def test_decode_stops_at_the_end() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids.tolist())))
    sequences = tiny.sequences(rows=2, width=3)
    texts = decode(tokenizer, sequences)
    assert texts == [" ".join(map(str, sequences.input_ids[row, 5 : 8 - row].tolist())) for row in range(2)]


def test_microbatches_hold_every_row_once_with_its_old_log_probabilities() -> None:
    policy, rollout = tiny.actor(), made_rollout([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    parts = to_microbatches(policy, rollout, rows=2, with_reference=True)
    assert [len(part.advantages) for part in parts] == [2, 2, 2]
    for whole, pieces in zip(rollout.sequences, zip(*(part.sequences for part in parts))):
        assert torch.equal(whole, torch.cat(pieces))
    assert torch.equal(rollout.advantages, torch.cat([part.advantages for part in parts]))
    for part in parts:
        torch.testing.assert_close(part.old_logps, policy(*part.sequences).detach())
        assert part.ref_logps is not None and not torch.allclose(part.ref_logps, part.old_logps)
        assert not part.old_logps.requires_grad and not part.ref_logps.requires_grad


def test_no_reference_pass_without_a_kl_term() -> None:
    (part,) = to_microbatches(tiny.actor(), made_rollout([1.0, 0.0]), rows=2, with_reference=False)
    assert part.ref_logps is None


def test_an_update_makes_rewarded_responses_likelier() -> None:
    policy, rollout = tiny.actor(), made_rollout([1.0, 0.0, 1.0, 0.0])
    parts = to_microbatches(policy, rollout, rows=2, with_reference=False)
    num_tokens = count_update_tokens([part.mask for part in parts])
    assert num_tokens == rollout.lengths.sum()
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    for part in parts:
        logps = policy(*part.sequences)
        grpo_loss(logps, part.old_logps, part.advantages, part.mask, num_tokens, config=GRPOLossConfig()).backward()
    optimizer.step()
    with policy.observed():
        gains = [(policy(*part.sequences) - part.old_logps).sum(1) for part in parts]
    agreement = (torch.cat(gains) * rollout.advantages).sum()
    assert agreement > 0.01


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    policy, rollout = tiny.actor(), made_rollout([1.0, 1.0])
    (part,) = to_microbatches(policy, rollout, rows=2, with_reference=False)
    loss = grpo_loss(policy(*part.sequences), part.old_logps, part.advantages, part.mask, 9, config=GRPOLossConfig())
    loss.backward()
    gradients = [p.grad for p in policy.parameters() if p.requires_grad]
    assert all(g is not None and not g.any() for g in gradients)
    assert not rollout.teaches and made_rollout([1.0, 0.0]).teaches


def test_sample_scores_each_response_with_its_own_task() -> None:
    from arithmetic import rollout as subject

    tasks = SimpleNamespace(reward=lambda task, text: float(task.question == "good"))
    drawn = [Task("good", {}), Task("bad", {})]
    rollout = subject.sample(tiny.actor(), WordTokenizer(), tasks, drawn, Sampling(2, 3))  # type: ignore[arg-type]
    assert rollout.rewards.tolist() == [1, 1, 0, 0]
    assert rollout.advantages.tolist() == [0, 0, 0, 0]
    assert rollout.prompt_width == 8 and len(rollout.responses) == 4


class Encoded(dict[str, Tensor]):
    def to(self, device: Any) -> Encoded:
        return self


class WordTokenizer:
    """Every prompt is 8 tokens."""

    chat_template = None

    def __call__(self, texts: list[str], **_: Any) -> Encoded:
        ids = torch.randint(2, 500, (len(texts), 8))
        return Encoded(input_ids=ids, attention_mask=torch.ones_like(ids))

    def decode(self, ids: Tensor, skip_special_tokens: bool) -> str:
        return str(len(ids))


def made_rollout(rewards: list[float]) -> Rollout:
    sequences, scores = tiny.sequences(rows=len(rewards)), torch.tensor(rewards)
    return Rollout(sequences, ["" for _ in rewards], scores, group_advantages(scores, 2))
