"""Pipelines: gradients are those of the pipeline without checkpointing, whatever the plan of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ds_hilore.core.types import Action, UnitId
from ds_hilore.runtime.budget import all_units
from tests.engines import difference
from tests.integration import pipelines
from tests.ranks import RankPool

HERE = "tests.integration.test_pipeline"
H, R = Action.STORE, Action.RECOMPUTE


def compared(
    stages: int, updates: int, interval: int = 1, streams: int = 1, microbatches: int = 4, blocks: int = 4
) -> dict[str, Any]:
    """Updates of both pipelines; ours with plans that differ by stage and change every update."""
    ds = pipelines.settings(microbatches)
    plain = pipelines.start(pipelines.build(stages, blocks, streams), ds)
    block = {"hilore": {"memory_budget": "1.0x"}}
    ours = pipelines.start(pipelines.build(stages, blocks, streams, interval), ds | block)
    errors, losses, ran = [], [], []
    for number in range(updates):
        ours.hilore.force([H, R, _mixed(ours)][(number + ours.stage_id) % 3])
        expected, loss = pipelines.update(plain, number)
        found, our_loss = pipelines.update(ours, number)
        errors.append(difference(found, expected))
        losses.append((loss, our_loss))
        ran.append("".join(action.letter for action in ours.hilore.microbatch.ran.values()))
    return pipelines.facts(ours) | {
        "errors": errors,
        "losses": losses,
        "ran": ran,
        "gradients": len(expected),
        "norm": min(float(g.norm()) for g in expected.values()),
        "in_flight": ours.hilore.in_flight,
        "units": [path for path, _ in ours.hilore.parts.unit_names.values()],
    }


def _mixed(engine: Any) -> Any:
    units = [UnitId(path) for path, _ in engine.hilore.parts.unit_names.values()]
    first, second = all_units(units[::2], H), all_units(units[1::2], R)
    return type(first)(choice={**first.choice, **second.choice}, actions={**first.actions, **second.actions})


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(world=4) as pool:
        yield pool


def check(seen: dict[str, Any], updates: int) -> None:
    assert len(seen["errors"]) == updates and max(seen["errors"]) < 1e-6
    assert seen["gradients"] > 0 and seen["norm"] > 0
    assert all(loss == our_loss for loss, our_loss in seen["losses"])


def test_two_stages_ten_updates(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:compared", stages=2, updates=10):
        check(seen, 10)
        assert seen["in_flight"] == (2 if seen["stage"] == 0 else 1)
        count = len(seen["units"])
        patterns = {"H" * count, "R" * count, "".join("HR"[k % 2] for k in range(count))}
        assert set(seen["ran"]) == patterns
