"""Freed means freed, in engines: physical memory of what is stored, dropped, encoded and used.

Levels are those of the process, under the malloc variables of design fact 20, of a model whose state is tens of
megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ds_hilore.core.treatment import Treatment, UniformPlan
from ds_hilore.core.types import Action
from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT
from ds_hilore.memory.meter import WANDER_BYTES, CpuMeter
from tests.engines import config
from tests.integration import updates
from tests.models import batch, llama, lora, plain_loss
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
