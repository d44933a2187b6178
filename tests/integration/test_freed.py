"""Freed means freed, in engines: physical memory of what is stored, dropped, encoded and used; parameters that ZeRO-3
gathered.

Levels are those of the process, under the malloc variables of design fact 20, of a model whose state is tens of
megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.core.treatment import Treatment, UniformPlan
from ds_hilore.core.types import Action
from ds_hilore.integration.zero3 import gathered_numel
from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT
from ds_hilore.memory.meter import WANDER_BYTES, CpuMeter
from tests.engines import config
from tests.integration import updates
from tests.models import batch, decoder_layers, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_freed"
ROWS, TOKENS = 8, 160
STORE, REPLAY = UniformPlan(treatment=Treatment(Action.STORE)), UniformPlan(treatment=Treatment(Action.RECOMPUTE))
ENCODE = UniformPlan(treatment=Treatment.parse("L:mlp=int8,residual=int8"))


@pytest.fixture(scope="module")
def tight() -> Iterator[RankPool]:
    with RankPool(world=1, env=dict(TIGHT_ENVIRONMENT)) as pool:
        yield pool


def levels(stage: int) -> dict[str, dict[str, int]]:
    """Bytes of the process above its level before the forward, by plan, of the second update under it: after forward
    and loss, after dropping what is stored, after backward and after the graph is gone. And bytes that units say they
    hold after forward."""
    engine = updates.hilore_engine(lora(llama(layers=6, hidden=192)), config(stage, lr=0.0))
    found = {}
    for name, plan, drop in (
        ("stored", STORE, False),
        ("replayed", REPLAY, False),
        ("encoded", ENCODE, False),
        ("dropped", STORE, True),
    ):
        engine.hilore.force(plan)
        for number in range(2):
            found[name] = _levels(engine, number, drop)
    return found


def _levels(engine: Any, number: int, drop: bool) -> dict[str, int]:
    meter = CpuMeter()
    meter.settle()
    floor = meter.level_bytes()
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        meter.settle()
        seen[name] = meter.level_bytes() - floor

    loss = plain_loss(engine, *batch(seed=number, rows=ROWS, tokens=TOKENS))
    calls = engine.hilore.microbatch.alive()
    held: dict[int, int] = {}
    for call in calls:
        held |= call.held_storages()
    seen["held"] = sum(held.values())
    del held
    look("forward")
    if drop:
        for call in calls:
            call.drop()
    del calls, call
    look("dropped")
    engine.backward(loss)
    look("backward")
    engine.step()
    del loss
    look("end")
    return seen


def test_physical_memory_is_what_is_held_and_goes_with_it(tight: RankPool) -> None:
    (seen,) = tight.run(f"{HERE}:levels", stage=0, timeout=250.0)
    room = WANDER_BYTES
    stored, replayed, encoded, dropped = (seen[name] for name in ("stored", "replayed", "encoded", "dropped"))
    assert stored["held"] > 4 * encoded["held"] / 3 and stored["held"] - replayed["held"] > 10 * room, (
        "else it says nothing"
    )
    # what units say they hold is what the process holds: the rest (logits, loss) is the same whatever the plan
    for other in (replayed, encoded):
        less = stored["held"] - other["held"]
        assert stored["forward"] - other["forward"] == pytest.approx(less, abs=room)
    # what is dropped leaves at once, down to what replaying everything holds
    assert dropped["forward"] == pytest.approx(stored["forward"], abs=room)
    assert dropped["dropped"] == pytest.approx(replayed["forward"], abs=room)
    # nothing of a microbatch is left when its backward is over and its loss is gone
    for levels_of_plan in seen.values():
        assert levels_of_plan["end"] < room, seen


# -- parameters that ZeRO-3 gathers --------------------------------------------------------------------------------


class Planted(Exception):
    """An exception of the user's own."""


def gathered(persistent: int) -> dict[str, Any]:
    """Whole parameters (elements) after each of many things that a host does with an engine of ours; ranks follow
    different plans."""
    settings = config(3, accumulation=2, lr=1e-3, stage3_param_persistence_threshold=persistent)
    plain = updates.reference_engine(lora(llama(layers=3)), settings)
    engine = updates.hilore_engine(
        lora(llama(layers=3)),
        settings,
        memory_budget="1000x",
        selfcheck={"updates": 1},
        planner={"trial_microbatches": 2},
    )
    kept = sum(p.ds_numel for p in engine.module.parameters() if getattr(p, "ds_persist", False))
    seen: dict[str, list[int]] = {}
    alone: list[int] = []

    def look(name: str) -> None:
        seen.setdefault(name, []).append(gathered_numel(engine))

    def backward(made: Any, ids: Tensor, advantages: Tensor) -> Tensor:
        look("before a forward")
        loss = plain_loss(made, ids, advantages)
        loss.register_hook(lambda _: look("when backward begins"))
        return loss

    def update(name: str, number: int) -> None:
        updates.run_update(plain, number)
        updates.run_update(engine, number, backward)
        look(name)

    for number in range(5):  # measuring, a trial, a self-check, plans
        update("after an update of its own plans", number)
    for number, plan in enumerate(updates.different_plans(engine)):
        engine.hilore.force(plan)
        update("after an update of another plan on each rank", 10 + number)
    for number in range(2):
        left = [_left_by_a_forward_without_grad(made, number) for made in (plain, engine)]
        alone.append(left[0])
        seen.setdefault("after a forward without grad", []).append(left[1])
        dropped = plain_loss(engine, *batch(number))
        del dropped
        ds_hilore.restart_update(engine)
        look("after a graph that was dropped")
        for place in ("forward", "backward"):
            _fails(engine, place)
            look(f"after an exception in {place}")
        update("after the next update", 20 + number)
    embedding = engine.module.get_base_model().get_input_embeddings().weight.ds_numel
    return {"kept": kept, "seen": seen, "alone": alone, "embedding": embedding}


def _left_by_a_forward_without_grad(made: Any, number: int) -> int:
    """Whole parameters (elements) after it: DeepSpeed keeps what its record of the last update uses again soon."""
    with torch.no_grad():
        plain_loss(made, *batch(number))
    return gathered_numel(made)


def _fails(engine: Any, place: str) -> None:
    def fail(*_: Any) -> None:
        raise Planted

    def fail_later(_module: Any, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    layer: Any = decoder_layers(engine.module)[1]
    handle = layer.mlp.register_forward_hook(fail if place == "forward" else fail_later)
    try:
        engine.backward(plain_loss(engine, *batch(dist.get_rank())))
    except Planted:
        return
    finally:
        handle.remove()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("persistent", [0, 1000], ids=["nothing persists", "small ones persist"])
def test_gathered_parameters_return_to_their_floor(ranks: RankPool, persistent: int) -> None:
    for found in ranks.run(f"{HERE}:gathered", persistent=persistent, timeout=250.0):
        assert (found["kept"] > 0) == (persistent > 0)
        seen = found["seen"]
        # what DeepSpeed alone keeps, and at most the embedding besides
        more = [ours - alone for ours, alone in zip(seen.pop("after a forward without grad"), found["alone"])]
        assert found["alone"][0] > 0 and set(more) <= {0, found["embedding"]}
        seen.pop("when backward begins")  # what is outside of units may still be whole
        # between the microbatches of the update with the self-check the embedding is whole; else nothing
        before = seen.pop("before a forward")
        assert max(before) <= found["kept"] + found["embedding"] and sum(n > found["kept"] for n in before) <= 1
        # less than what persists may be whole too: it is gathered by its first use, also after a reset
        assert not {name: max(counts) for name, counts in seen.items() if max(counts) > found["kept"]}
