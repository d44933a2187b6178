"""The loss hook (design section 5): omega, whatever stands between the loss and it; when the plan is settled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action
from ds_hilore.objective import grpo
from ds_hilore.runtime.controller import Phase
from ds_hilore.runtime.update import Source
from tests.engines import config, difference, gradients
from tests.models import batch, llama
from tests.ranks import RankPool

HERE = "tests.integration.test_loss_hook"

#: Of the whole update, and the same for every number of ranks and microbatches, so that omega is the same too.
NUM_TOKENS = 64
LOSS = grpo.GRPOLossConfig(beta=0.05)


class Actor(nn.Module):
    """Gives log-probabilities [B, T - 1] of the next tokens, or logits; or observes the former and gives their loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.model = llama(layers=layers)

    def forward(self, ids: Tensor, gives: str = "logps", micro: int = 0) -> Any:
        logits = self.model(input_ids=ids, use_cache=False).logits
        if gives == "logits":
            return {"logits": logits}
        logps = log_probs(logits, ids)
        if gives == "logps":
            return logps
        observed = ds_hilore.observe_logps(logps, facts(ids, micro)["mask"])
        # a wrapped loss, or one beside log-probabilities that are an output as well
        loss = grpo.grpo_loss(observed, **facts(ids, micro), config=LOSS)
        return (observed, loss) if gives == "both" else loss


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def facts(ids: Tensor, micro: int) -> dict[str, Any]:
    """What the loss needs beside log-probabilities: some tokens are clipped, some masked."""
    generator = torch.Generator().manual_seed(50 + micro)
    shape = (ids.shape[0], ids.shape[1] - 1)
    old = -6.3 + 0.4 * torch.randn(shape, generator=generator)
    return {
        "old_logps": old,
        "ref_logps": old + 0.1,
        "advantages": torch.randn(shape[0], generator=generator),
        "mask": torch.rand(shape, generator=generator) < 0.8,
        "num_tokens": NUM_TOKENS,
    }


def ids_of(rank: int, micro: int) -> Tensor:
    return batch(seed=10 * rank + micro)[0]


def expected_omega(rank: int, micro: int) -> Tensor:
    """From the plain model, without any engine."""
    ids = ids_of(rank, micro)
    logps = Actor()(ids).detach()
    return grpo.token_coefficients(logps, **facts(ids, micro), config=LOSS)


def hilore_engine(stage: int, accumulation: int = 1, model: nn.Module | None = None, **settings: Any) -> Any:
    model = Actor() if model is None else model
    ds = config(stage, accumulation, lr=0.0) | {"hilore": {"memory_budget": "1.0x"}} | settings
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=model.parameters(), config=ds)
    return engine


# ------------------------------------------------------------------------------------------------ omega


def ways(stage: int) -> Iterator[tuple[str, str, str]]:
    """(entry into backward, how omega is told, what the engine's forward gives)"""
    entries = ["backward", "backward without accumulation", *(["direct"] if stage > 0 else [])]
    for entry in entries:
        for gives in ("logps", "logits"):
            yield entry, "formula", gives
            yield entry, "gradient", gives
        yield entry, "gradient", "loss"
        # In a direct backward DeepSpeed divides once more at every output that the gradient passes: at this loss and at
        # these log-probabilities, so its own gradient is too small.
        if entry != "direct":
            yield entry, "gradient", "both"


def loss_of(engine: Any, rank: int, micro: int, told: str, gives: str) -> Tensor:
    ids = ids_of(rank, micro)
    result = engine(ids, gives=gives, micro=micro)
    if gives in ("loss", "both"):
        return result[1] if gives == "both" else result
    logps = result if gives == "logps" else log_probs(result["logits"], ids)
    if told == "formula":
        return ds_hilore.grpo_loss(logps, **facts(ids, micro), config=LOSS)
    ds_hilore.observe_logps(logps, facts(ids, micro)["mask"])
    return grpo.grpo_loss(logps, **facts(ids, micro), config=LOSS)


def run_backward(engine: Any, loss: Tensor, entry: str) -> None:
    """By the convention: the caller multiplies by data-parallel ranks x accumulation, or by the ranks alone."""
    ranks, steps = engine.dp_world_size, engine.gradient_accumulation_steps()
    if entry == "backward":
        engine.backward(loss * (ranks * steps))
    elif entry == "direct":
        (loss * (ranks * steps)).backward()
    else:
        engine.backward(loss * ranks, scale_wrt_gas=False)


def omegas(stage: int, accumulation: int) -> dict[tuple[str, str, str], tuple[list[Tensor], list[Source], float]]:
    """Per way: omega and source of each microbatch, and how far the update's gradient is from the first way's."""
    engine = hilore_engine(stage, accumulation)
    rank = torch.distributed.get_rank()
    engine.hilore.force(Action.RECOMPUTE)
    seen: dict[Any, Any] = {}
    reference: dict[str, Tensor] = {}
    for way in ways(stage):
        entry, told, gives = way
        found: list[Any] = []
        for micro in range(accumulation):
            loss = loss_of(engine, rank, micro, told, gives)
            run_backward(engine, loss, entry)
            (coefficients,) = engine.hilore.coefficients
            found.append(coefficients)
            if micro == accumulation - 1:
                reduced = gradients(engine)
                reference = reference or reduced
            engine.step()
        seen[way] = [c.omega for c in found], [c.source for c in found], difference(reduced, reference)
    ds_hilore.detach(engine)
    return seen


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(world=1) as pool:
        yield pool


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_omega_is_one_number(ranks: RankPool, one_rank: RankPool, world: int, stage: int, accumulation: int) -> None:
    pool = ranks if world == 2 else one_rank
    for rank, seen in enumerate(pool.run(f"{HERE}:omegas", stage=stage, accumulation=accumulation)):
        assert set(seen) == set(ways(stage))
        for (entry, told, gives), (found, sources, error) in seen.items():
            where = f"rank {rank} {entry}, {told}, {gives}"
            assert sources == [Source.FORMULA if told == "formula" else Source.GRADIENT] * accumulation, where
            assert error < 1e-5, where  # the convention itself is right: every way gives one gradient
            for micro, omega in enumerate(found):
                expected = expected_omega(rank, micro)
                distance = float((omega - expected).norm() / expected.norm())
                assert distance < 1e-6, f"{where}: {distance:.1e}"
