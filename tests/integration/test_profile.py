"""A second run of the same setting need not measure its units again; another setting, or a damaged file, does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_hilore.runtime.parts import Stage
from tests.engines import config
from tests.integration import updates
from tests.ranks import RankPool

HERE = "tests.integration.test_profile"


def two_runs(folder: str, change: str = "") -> dict[str, Any]:
    """Stages after each update of two engines that share a folder; `change` happens to the file between them."""
    stages: list[list[str]] = []
    gradients = []
    for run in range(2):
        adapters = not (run == 1 and change == "another model is trained")
        engine = updates.hilore_engine(
            updates.build("llama", adapters), config(2), memory_budget="1000x", profile={"path": folder}
        )
        seen = []
        for number in range(4):
            gradients.append(updates.run_update(engine, number))
            seen.append(engine.hilore.stage.value)
        stages.append(seen)
        dist.barrier()
        files = sorted(Path(folder).glob("*.json"))
        if change == "damaged" and dist.get_rank() == 0:
            files[0].write_text(files[0].read_text()[:100])
        dist.barrier()
    return {
        "stages": stages,
        "files": [path.name for path in files],
        "unequal": updates.unequal_bits(gradients[3], gradients[7]) if not change else [],
        "plan": list(engine.hilore.plan.actions.values()),
    }


@pytest.mark.parametrize("change", ["", "damaged", "another model is trained"])
def test_a_stored_profile(ranks: RankPool, tmp_path: Path, change: str) -> None:
    measured = [stage.value for stage in (Stage.MEASURE_R, Stage.MEASURE_H, Stage.PLANNED, Stage.PLANNED)]
    for seen in ranks.run(f"{HERE}:two_runs", folder=str(tmp_path), change=change):
        first, second = seen["stages"]
        assert first == measured
        # the two all-R updates stay: their peak is "1.0x" on this machine today
        assert second == (measured if change else [Stage.MEASURE_R.value, *[Stage.PLANNED.value] * 3])
        assert not seen["unequal"]
        assert len(seen["files"]) == (2 if change == "another model is trained" else 1)  # of both ranks
    if change != "damaged":
        json.loads(next(tmp_path.glob("*.json")).read_text())


def unwritable(folder: str) -> list[str]:
    engine = updates.hilore_engine(updates.build(), config(0), memory_budget="1000x", profile={"path": folder})
    for number in range(4):
        updates.run_update(engine, number)
    return [engine.hilore.stage.value]


def test_a_folder_that_cannot_be_written_ends_nothing(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for seen in ranks.run(f"{HERE}:unwritable", folder=os.fspath(tmp_path / "file")):
        assert seen == [Stage.PLANNED.value]
