"""Gradients of an update equal DeepSpeed's without any checkpointing, whatever each rank's plan (two ranks).

Bitwise at ZeRO 0 to 2, and at ZeRO 3 against leaf units. Against ZeRO-3 as it is, float32 differs by less than 1e-6,
and bfloat16 in its own precision: its hooks put an identity node on every input of every submodule
(`PostBackwardFunctionModule`, deepspeed/runtime/zero/parameter_offload.py), so the parts of a gradient that arise
inside a submodule (a norm uses its input twice, a LoRA layer too) are summed before the others are added. Leaf units
have no such nodes inside. With the same nodes, ours are bitwise those of ZeRO-3 as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engines import config, difference
from tests.integration import updates
from tests.models import decoder_layers
from tests.ranks import RankPool

HERE = "tests.integration.test_update"

ADAPTERS = pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
ACCUMULATION = pytest.mark.parametrize("accumulation", [1, 3])


def compared(
    stage: int, accumulation: int = 1, adapters: bool = True, dtype: str = "float32", family: str = "llama"
) -> dict[str, Any]:
    """Three updates, each with other plans on the two ranks."""
    settings = {"bf16": {"enabled": dtype == "bfloat16"}}
    reference, ours = updates.pair(
        lambda: updates.build(family, adapters, dtype), config(stage, accumulation) | settings
    )
    unequal, followed, norms = [], [], []
    for number, plan in enumerate(updates.different_plans(ours)):
        ours.hilore.force(plan)
        expected, found = updates.run_update(reference, number), updates.run_update(ours, number)
        unequal += updates.unequal_bits(found, expected)
        followed.append(updates.actions(ours) == list(plan.actions.values()))
        norms += [float(gradient.norm()) for gradient in expected.values()]
    return {"unequal": unequal, "followed": followed, "norm": min(norms), "gradients": len(norms)}


class Identity(torch.autograd.Function):
    """A node that only stands in the graph."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def with_identity_nodes(model: nn.Module) -> nn.Module:
    """On the inputs of every submodule of every unit, as ZeRO-3 puts them there."""

    def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(Identity.apply(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs)

    for layer in decoder_layers(model):
        for module in layer.modules():
            if module is not layer:
                module.register_forward_pre_hook(hook)
    return model


def plain_zero3(accumulation: int, adapters: bool, dtype: str) -> dict[str, Any]:
    """Two updates of four engines: ZeRO-3 as it is, leaf units, ours, and ours with identity nodes."""

    def build() -> nn.Module:
        return updates.build("llama", adapters, dtype)

    settings = config(3, accumulation, lr=0.0) | {"bf16": {"enabled": dtype == "bfloat16"}}
    plain = updates.reference_engine(build(), settings, leaves=False)
    leaves = updates.reference_engine(build(), settings)
    ours = updates.hilore_engine(build(), settings)
    twin = updates.hilore_engine(with_identity_nodes(build()), settings)
    errors, unequal_leaves, unequal_twin = [], [], []
    for number, plan in enumerate(updates.different_plans(ours)[1:]):
        ours.hilore.force(plan)
        twin.hilore.force(plan)
        expected, found = updates.run_update(plain, number), updates.run_update(ours, number)
        errors.append(difference(found, expected))
        unequal_leaves += updates.unequal_bits(found, updates.run_update(leaves, number))
        unequal_twin += updates.unequal_bits(expected, updates.run_update(twin, number))
    return {"error": max(errors), "leaves": unequal_leaves, "twin": unequal_twin}


@ADAPTERS
@ACCUMULATION
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32_bitwise(ranks: RankPool, stage: int, accumulation: int, adapters: bool) -> None:
    for seen in ranks.run(f"{HERE}:compared", stage=stage, accumulation=accumulation, adapters=adapters):
        assert all(seen["followed"])
        assert seen["gradients"] == 3 * (42 if adapters else 30) and seen["norm"] > 0
        assert not seen["unequal"]


@ADAPTERS
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_bitwise(ranks: RankPool, stage: int, adapters: bool) -> None:
    accumulation = 3 if adapters else 1
    case = {"stage": stage, "accumulation": accumulation, "adapters": adapters, "dtype": "bfloat16"}
    for seen in ranks.run(f"{HERE}:compared", **case):
        assert all(seen["followed"])
        assert seen["gradients"] == 3 * (42 if adapters else 30) and seen["norm"] > 0
        assert not seen["unequal"]


@ADAPTERS
@ACCUMULATION
def test_zero3_without_leaf_units(ranks: RankPool, accumulation: int, adapters: bool) -> None:
    """Within 1e-6, and the difference is the order of sums inside submodules, nothing else."""
    for seen in ranks.run(f"{HERE}:plain_zero3", accumulation=accumulation, adapters=adapters, dtype="float32"):
        assert seen["error"] < 1e-6
        assert not seen["leaves"] and not seen["twin"]


@ADAPTERS
def test_zero3_without_leaf_units_in_bfloat16(ranks: RankPool, adapters: bool) -> None:
    for seen in ranks.run(f"{HERE}:plain_zero3", accumulation=1, adapters=adapters, dtype="bfloat16"):
        assert not seen["leaves"] and not seen["twin"]
