"""State that lies in host memory between forward and backward, in whole updates of two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ds_hilore.core.errors import OffloadError, RankMismatch
from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, REPLAYED, STORED, Treatment
from ds_hilore.core.types import Plan, UnitId
from ds_hilore.recovery.offload import Offload
from tests.engines import config
from tests.integration import updates
from tests.ranks import RankPool
from tests.recovery.links import LateLink, WatchedLink, failing

HERE = "tests.integration.test_offload"


def _plan(made: Any, *treatments: Treatment) -> Plan:
    """These treatments in turns over the units, beginning with another one on each rank."""
    first = dist.get_rank()
    chosen = {UnitId(path): treatments[(first + i) % len(treatments)] for i, path in enumerate(updates.units_of(made))}
    return Plan(
        choice={unit: treatment.name for unit, treatment in chosen.items()},
        actions={unit: treatment.action for unit, treatment in chosen.items()},
    )


def compared(stage: int, late: bool, dtype: str = "float32") -> dict[str, Any]:
    """Updates of two microbatches whose units are offloaded in several ways, other units on each rank."""
    settings = config(stage, 2) | {"bf16": {"enabled": dtype == "bfloat16"}}
    reference, ours = updates.pair(lambda: updates.build("llama", True, dtype), settings)
    context = ours.hilore.context
    watched = WatchedLink()
    context.offload = Offload(lambda device: LateLink(seed=dist.get_rank()) if late else watched)
    unequal: list[str] = []
    for number, ways in enumerate(
        [(OFFLOADED,), (INPUT_OFFLOADED,), (OFFLOADED, INPUT_OFFLOADED, STORED, REPLAYED), (OFFLOADED, REPLAYED)]
    ):
        ours.hilore.force(_plan(ours, *ways))
        expected, found = updates.run_update(reference, number), updates.run_update(ours, number)
        unequal += updates.unequal_bits(found, expected)
    return {"unequal": unequal, "sent": len(watched.sent), "fetched": len(watched.fetched)}


def failing_copies(stage: int, way: str) -> dict[str, Any]:
    """A copy fails on rank 0 alone, before any rank waits for another; every rank runs the update again."""
    reference, ours = updates.pair(lambda: updates.build("llama"), config(stage))
    broken = WatchedLink(before=failing(way, RuntimeError("the driver has gone")) if dist.get_rank() == 0 else _nothing)
    ours.hilore.force(OFFLOADED)
    expected = updates.run_update(reference, 0)
    ours.hilore.context.offload = Offload(lambda device: broken)
    raised: list[str] = []
    while True:
        try:
            found = updates.run_update(ours, 0)
            return {"raised": raised, "unequal": updates.unequal_bits(found, expected)}
        except (OffloadError, RankMismatch) as error:
            raised.append(type(error).__name__)


def on_cpu() -> tuple[int, bool]:
    made = updates.hilore_engine(updates.build("llama"), config(0), host_budget="64MB")
    return made.hilore.parts.planner.host_bytes, made.hilore.measurements.link is None


def _nothing(way: str) -> None:
    return None


@pytest.mark.parametrize(("stage", "late"), [(0, True), (2, False), (2, True), (3, True)])
def test_gradients_bitwise(ranks: RankPool, stage: int, late: bool) -> None:
    for seen in ranks.run(f"{HERE}:compared", stage=stage, late=late):
        assert not seen["unequal"]
        assert late or seen["sent"] == seen["fetched"] > 0


def test_bfloat16_bitwise(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:compared", stage=3, late=True, dtype="bfloat16"):
        assert not seen["unequal"]


@pytest.mark.parametrize("way", ["to host", "to device"])
def test_a_copy_that_fails_on_one_rank(ranks: RankPool, way: str) -> None:
    first, second = ranks.run(f"{HERE}:failing_copies", stage=0, way=way)
    assert first["raised"] == ["OffloadError"] and set(second["raised"]) <= {"RankMismatch"}
    assert not first["unequal"] and not second["unequal"]


def test_nothing_is_offered_where_the_device_is_the_host(ranks: RankPool) -> None:
    assert ranks.run(f"{HERE}:on_cpu") == [(0, True)] * 2
