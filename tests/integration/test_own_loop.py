"""The two calls in a loop of OpenRLHF's shape: gradients of the plain model, omega of autograd, in three layouts.

The loop is the one of examples/own_loop.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hilore.core.types import Action
from tests.engines import config, difference, gradients
from tests.integration.updates import hilore_engine
from tests.models import VOCAB, llama, lora
from tests.ranks import RankPool

HERE = "tests.integration.test_own_loop"
PROMPT, ROWS = 5, 4
LENGTHS = (9, 4, 7, 2)
ADVANTAGES = (1.0, 0.0, -0.6, 0.4)
LAYOUTS = ("padded", "packed", "shared prompt")


def experience(layout: str, seed: int) -> Any:
    """Four responses to one prompt. The first pass's old log-probabilities are made up."""
    from examples.own_loop import Experience

    made = torch.Generator().manual_seed(seed)
    prompt = torch.randint(2, VOCAB, (PROMPT,), generator=made)
    responses = [torch.randint(2, VOCAB, (length,), generator=made) for length in LENGTHS]
    build = {"padded": padded, "packed": packed, "shared prompt": shared}[layout]
    inputs, mask, advantages = build(prompt, responses)
    old = -6.2 + 0.3 * torch.randn(mask.shape, generator=made)
    return Experience(inputs, mask, old, advantages)


Built = tuple[dict[str, Tensor], Tensor, Tensor]


def padded(prompt: Tensor, responses: list[Tensor]) -> Built:
    """A row per response, padded on the right."""
    longest = max(LENGTHS)
    ids = torch.stack([torch.cat([prompt, r, r.new_zeros(longest - len(r))]) for r in responses])
    mask = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    attended = torch.cat([mask.new_ones(ROWS, PROMPT), mask], 1)
    return {"input_ids": ids, "attention_mask": attended.long()}, mask, torch.tensor(ADVANTAGES)[:, None]


def packed(prompt: Tensor, responses: list[Tensor]) -> Built:
    """One row of all sequences one after another, told apart by their positions alone."""
    sequences = [torch.cat([prompt, r]) for r in responses]
    ids = torch.cat(sequences)[None]
    positions = torch.cat([torch.arange(len(s)) for s in sequences])[None]
    mask = positions >= PROMPT
    advantages = torch.cat([torch.full((len(s),), a) for s, a in zip(sequences, ADVANTAGES)])[None]
    # log-probabilities are those of all tokens but the first
    return {"input_ids": ids, "position_ids": positions}, mask[:, 1:], advantages[:, 1:]


def shared(prompt: Tensor, responses: list[Tensor]) -> Built:
    """The prompt once, then all responses, each of which sees the prompt and itself."""
    ids = torch.cat([prompt, *responses])[None]
    owner = torch.cat([torch.full((PROMPT,), -1), *(torch.full((len(r),), k) for k, r in enumerate(responses))])
    positions = torch.cat([torch.arange(PROMPT), *(torch.arange(len(r)) + PROMPT for r in responses)])[None]
    causal = torch.ones(len(owner), len(owner)).tril().bool()
    seen = causal & ((owner[None] == owner[:, None]) | (owner[None] == -1))
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    advantages = torch.tensor([0.0, *ADVANTAGES])[owner + 1][None]
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": additive}
    return inputs, (owner >= 0)[None, 1:], advantages[:, 1:]


def compared(layout: str, stage: int) -> dict[str, Any]:
    """Gradients of an update of two microbatches, replayed (and pruned) or stored, against the plain model's."""
    from examples import own_loop

    engine = hilore_engine(lora(llama()), config(stage, accumulation=2))
    controller, rank = engine.hilore, dist.get_rank()
    batches = [experience(layout, 10 * rank + k) for k in range(2)]
    count = torch.tensor(2.0 * 2 * sum(LENGTHS))
    omegas: list[float] = []

    def update(action: Action) -> dict[str, Tensor]:
        controller.force(action)
        for batch in batches:
            own_loop.microbatch(engine, batch, count)
            (found,) = controller.coefficients
            expected = by_autograd(engine, batch, count)
            omegas.append(float((found.omega - expected).abs().max() / expected.abs().max()))
            if batch is batches[-1]:
                result = gradients(engine)
            engine.step()
        return result

    stopped = engine.optimizer.param_groups
    for group in stopped:  # the same weights for all three
        group["lr"] = 0.0
    with controller.paused():
        plain = update(Action.STORE)
    errors = {action.value: difference(update(action), plain) for action in (Action.STORE, Action.RECOMPUTE)}
    return {"errors": errors, "omega": max(omegas), "pruned": controller.microbatch.prunes}


def by_autograd(engine: Any, batch: Any, count: Tensor) -> Tensor:
    from examples import own_loop

    with torch.no_grad():
        logps = own_loop.token_logps(engine.module, batch.inputs, batch.mask.shape[1])
    logps.requires_grad_()
    (gradient,) = torch.autograd.grad(own_loop.policy_loss(logps, batch, count), logps)
    return gradient


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_coefficients_of_an_own_loop(ranks: RankPool, layout: str) -> None:
    for seen in ranks.run(f"{HERE}:compared", layout=layout, stage=2):
        assert seen["errors"]["store"] == 0.0
        assert seen["errors"]["recompute"] < 1e-6
        assert seen["pruned"] == (layout == "padded")  # of one row, nine tenths and more can change the model
        assert seen["omega"] < 1e-5
