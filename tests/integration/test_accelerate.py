"""A loop of one's own on accelerate alone: `prepare`, `accumulate`, `backward`; the engine steps once per update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_hilore
from tests.engines import before_each_step, config, difference
from tests.integration import trl_runs
from tests.models import batch, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_accelerate"
UPDATES, ACCUMULATION = 4, 2
BLOCK = {"memory_budget": ["1.0x", "1000x"], "planner": {"trial_microbatches": 0}}


@contextmanager
def meetings(engine: Any) -> Iterator[list[str]]:
    """What ranks agree on inside."""
    seen: list[str] = []
    host = getattr(engine, "_hilore_host", None)
    if host is None:
        yield seen
        return
    agree = host.plane.agree

    def noting(what: str, *args: Any) -> Any:
        seen.append(what)
        return agree(what, *args)

    host.plane.agree = noting
    try:
        yield seen
    finally:
        del host.plane.agree


def accelerated(stage: int, block: dict[str, Any] | None) -> dict[str, Any]:
    """Updates of two microbatches, as a script on accelerate makes them."""
    from accelerate import Accelerator, DeepSpeedPlugin

    trl_runs.forget_trainers()
    ds_hilore.install()
    settings = config(stage, ACCUMULATION)
    optimizer_settings = settings.pop("optimizer")["params"]
    settings["zero_allow_untested_optimizer"] = True
    if block is not None:
        settings["hilore"] = block
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), gradient_accumulation_steps=ACCUMULATION
    )
    model = lora(llama())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=optimizer_settings["lr"])
    engine, optimizer = accelerator.prepare(model, optimizer)
    engine.train()
    counts = []
    with before_each_step(engine) as found, meetings(engine) as met:
        for number in range(UPDATES):
            before = len(met)
            for k in range(ACCUMULATION):
                with accelerator.accumulate(engine):
                    ids, advantages = batch(seed=1000 * dist.get_rank() + 10 * number + k, tokens=96)
                    accelerator.backward(plain_loss(engine, ids, advantages))
                    optimizer.step()
                    optimizer.zero_grad()
            counts.append(len(met) - before)
            if block is not None:
                engine.hilore.parts.planner.wait(60)
    seen: dict[str, Any] = {"gradients": found}
    if block is not None:
        controller = engine.hilore
        seen |= {
            "updates": controller.update,
            "expected": controller.learning.risk.rules.microbatches,
            "stage": controller.stage.value,
            "actions": {action.letter for action in controller.microbatch.ran.values()},
            "met": counts,
        }
        ds_hilore.detach(engine)
    return seen


@pytest.mark.parametrize("stage", [1, 2])
def test_a_loop_on_accelerate_alone(ranks: RankPool, stage: int) -> None:
    """Accelerate counts microbatches itself; ranks meet before the first of an update, under ZeRO-2 before each."""
    plain = ranks.run(f"{HERE}:accelerated", stage=stage, block=None)
    ours = ranks.run(f"{HERE}:accelerated", stage=stage, block=BLOCK)
    for seen, alone in zip(ours, plain, strict=True):
        assert len(seen["gradients"]) == len(alone["gradients"]) == UPDATES
        assert all(
            difference(found, expected) < 1e-6
            for found, expected in zip(seen["gradients"], alone["gradients"], strict=True)
        )
        assert any(value.abs().sum() > 0 for value in alone["gradients"][-1].values())
        assert (seen["updates"], seen["expected"], seen["stage"]) == (UPDATES, ACCUMULATION, "planned")
        assert seen["met"] == [1 if stage == 1 else ACCUMULATION] * UPDATES
    assert "R" in ours[0]["actions"] and ours[1]["actions"] == {"H"}
