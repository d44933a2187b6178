"""The ledger where engines are less usual: several parameter groups, reference models, stage 0 offload, buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hilore.core.types import Place
from ds_hilore.integration.ledger import account_of
from ds_hilore.integration.zero_facts import facts_of, facts_of_config
from ds_hilore.memory.arithmetic import zero_account
from ds_hilore.memory.ledger import Item
from tests.engines import config, engine
from tests.integration import updates
from tests.integration.test_ledger import BF16, LASTING, OFFLOADS, WIDE, Sizes, sizes
from tests.models import llama
from tests.ranks import RankPool

HERE = "tests.integration.test_ledger_situations"

#: Arithmetic and live engine.
Pair = tuple[Sizes, Sizes]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """As trainers make them: no decay for vectors. The groups have different sizes, so different padding."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def of_groups(stage: int, zero: dict[str, Any], half: dict[str, Any]) -> Pair:
    """After one update of an engine with two parameter groups."""
    import deepspeed

    settings = config(stage, reduce_bucket_size=20_000, **zero) | half | {"zero_allow_untested_optimizer": True}
    del settings["optimizer"]
    model = llama(layers=1)
    made, *_ = deepspeed.initialize(model=model, optimizer=two_groups(model), config=settings)
    updates.run_update(made, 0)
    return sizes(zero_account(replace(facts_of(made), lazy_pages=False)), LASTING), sizes(account_of(made), LASTING)


@pytest.mark.parametrize(
    ("stage", "zero", "half"),
    [
        (0, {}, {}),
        (1, {}, WIDE),
        (2, OFFLOADS["optimizer"], {}),
        (3, OFFLOADS["both"], {}),
    ],
)
def test_several_parameter_groups(ranks: RankPool, stage: int, zero: dict[str, Any], half: dict[str, Any]) -> None:
    for expected, held in ranks.run(f"{HERE}:of_groups", stage=stage, zero=zero, half=half):
        assert held == expected


def of_reference(zero: dict[str, Any]) -> dict[str, Any]:
    """A model that is only run, under ZeRO-3, before and after its first forward."""
    import deepspeed

    model = llama(layers=1).requires_grad_(False)
    settings = config(3, **zero)
    del settings["optimizer"]
    made, *_ = deepspeed.initialize(model=model, config=settings)
    before = account_of(made)
    assert made.optimizer is not None and not before.unknown, before.unknown
    items = (Item.FROZEN, Item.GATHERED, Item.PERSISTENT, Item.BUFFERS)
    return {"lasting": (sizes(zero_account(facts_of(made)), items), sizes(before, items))}


@pytest.mark.parametrize("zero", [{}, {"offload_param": {"device": "cpu"}}])
def test_a_reference_model_holds_its_shards(ranks: RankPool, zero: dict[str, Any]) -> None:
    place = Place.HOST if zero else Place.DEVICE
    for found in ranks.run(f"{HERE}:of_reference", zero=zero):
        expected, held = found["lasting"]
        assert held == expected
        assert held[f"{Item.FROZEN.value} @ {place.value}"] > 0


def of_stage_0() -> Pair:
    settings = config(0, **OFFLOADS["optimizer"])
    made = engine(llama(layers=1), settings)
    updates.run_update(made, 0)
    return sizes(zero_account(facts_of(made)), LASTING), sizes(account_of(made), LASTING)


def test_without_zero_nothing_is_offloaded(ranks: RankPool) -> None:
    for expected, held in ranks.run(f"{HERE}:of_stage_0"):
        assert held == expected and f"{Item.STATE.value} @ {Place.DEVICE.value}" in held


class WithBuffers(nn.Module):
    """A model with a mask of truth values, a table of numbers, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(32), persistent=False)
        self.register_buffer("count", torch.zeros(()))


def of_buffers(half: dict[str, Any]) -> tuple[int, int, int]:
    settings = config(2) | half
    planned = zero_account(facts_of_config(settings, WithBuffers(), world_size=2, device="cpu"))
    made = engine(WithBuffers(), settings)
    return tuple(a.of(Item.BUFFERS) for a in (planned, zero_account(facts_of(made)), account_of(made)))  # type: ignore[return-value]


HALF_BUFFERS = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}


@pytest.mark.parametrize(("half", "element"), [({}, 4), (BF16, 4), (HALF_BUFFERS, 2)])
def test_buffers_are_whole_and_converted_where_asked(ranks: RankPool, half: dict[str, Any], element: int) -> None:
    for counts in ranks.run(f"{HERE}:of_buffers", half=half):
        assert counts == (16 * 16 + 32 * element,) * 3
