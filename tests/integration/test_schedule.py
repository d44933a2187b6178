"""The sequence of collectives under ZeRO-3 does not depend on any rank's plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ds_hilore.core.types import Action
from tests.collectives import Record, recorded
from tests.engines import config
from tests.integration import updates
from tests.ranks import RankPool

HERE = "tests.integration.test_schedule"
UPDATES = 20
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "persistent and overlapped": {"stage3_param_persistence_threshold": 3000, "overlap_comm": True},
    "hpZ": {"zero_hpz_partition_size": 2},
}


def schedule(zero: dict[str, Any], first: str, second: str, number: int) -> list[Record]:
    """Collectives of `number` updates in which rank 0 does `first` to every unit and rank 1 `second`."""
    made = updates.hilore_engine(updates.build(), config(3, **zero))
    made.hilore.force(Action((first, second)[dist.get_rank()]))
    with recorded() as records:
        for update in range(number):
            updates.run_update(made, update)
    return list(records)


def test_opposite_plans_for_twenty_updates(ranks: RankPool) -> None:
    one, other = ranks.run(f"{HERE}:schedule", zero={}, first="store", second="recompute", number=UPDATES)
    assert one == other
    assert sum(record[0].startswith("all_gather") for record in one) > UPDATES
    assert any(record[0].startswith("reduce_scatter") for record in one)


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_every_pair_of_plans_has_one_schedule(ranks: RankPool, setting: str) -> None:
    found = []
    for first, second in (("store", "recompute"), ("recompute", "store"), ("recompute", "recompute")):
        found += ranks.run(f"{HERE}:schedule", zero=SETTINGS[setting], first=first, second=second, number=3)
    assert all(records == found[0] for records in found)
    assert found[0]
