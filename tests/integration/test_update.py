"""Gradients of an update equal DeepSpeed's without any checkpointing, whatever each rank's plan (two ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines import difference
from tests.integration import updates
from tests.ranks import RankPool

HERE = "tests.integration.test_update"


def compared(
    stage: int,
    accumulation: int = 1,
    adapters: bool = True,
    family: str = "llama",
    leaves: bool = True,
    lr: float = 1e-3,
    dtype: str = "float32",
) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    settings: dict[str, Any] = {"bf16": {"enabled": True}} if kind is torch.bfloat16 else {}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}
    reference, ours = updates.pair(
        lambda: updates.build(family, adapters, kind), stage, accumulation, leaves, **settings
    )
    errors, unequal, followed, norms = [], [], [], []
    for number, plan in enumerate(updates.different_plans(ours)):
        ours.hilore.force(plan)
        expected, found = updates.run_update(reference, number), updates.run_update(ours, number)
        errors.append(difference(found, expected))
        unequal += updates.unequal_bits(found, expected)
        followed.append(updates.actions(ours) == list(plan.actions.values()))
        norms.append(min(float(g.norm()) for g in expected.values()))
    return {"error": max(errors), "unequal": unequal, "followed": all(followed), "norm": min(norms), "n": len(expected)}


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bitwise(ranks: RankPool, stage: int, accumulation: int, adapters: bool) -> None:
    for seen in ranks.run(f"{HERE}:compared", stage=stage, accumulation=accumulation, adapters=adapters):
        assert seen["followed"]
        assert seen["norm"] > 0
        assert not seen["unequal"]
