"""Checkpoints carry what was measured; a resumed run is the uninterrupted one, bit for bit; another setting is named.

ZeRO-2 and ZeRO-3 on two ranks, with plans of their own; then calibration and audits, a changed ZeRO stage, a changed
world size, and transformers' Trainer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.runtime.parts import Stage
from tests.engines import config
from tests.integration import test_compress, trl_runs, updates
from tests.integration.lines import warnings_said
from tests.integration.test_trainer import make_trainer
from tests.models import llama, lora
from tests.ranks import RankPool, run_ranks
from tests.stateful.bench import state_of

HERE = "tests.integration.test_resume"
#: Updates before the checkpoint, after which plans are followed, and after it.
BEFORE, AFTER = 4, 4
EVERYTHING_FITS = {"memory_budget": "1000x"}


def _engine(stage: int, seed: int = 0, **block: Any) -> Any:
    """Weights differ by `seed`: those of a checkpoint must take their place."""
    model = lora(llama(layers=3), seed=1 + seed, lora_dropout=0.1)
    return updates.hilore_engine(model, config(stage, accumulation=2), **EVERYTHING_FITS, **block)


def _run(engine: Any, numbers: range) -> list[dict[str, Tensor]]:
    return [updates.run_update(engine, number) for number in numbers]


def resumed(folder: str, stage: int) -> dict[str, Any]:
    """An uninterrupted run beside one that ends and is resumed by another engine."""
    whole, first = _engine(stage), _engine(stage)
    expected = _run(whole, range(BEFORE + AFTER))
    _run(first, range(BEFORE))
    measured = sorted(first.hilore.measurements.classes)
    first.save_checkpoint(folder)
    ds_hilore.detach(first)
    second = _engine(stage, seed=7)
    second.load_checkpoint(folder)
    known = second.hilore.learning.known, sorted(second.hilore.measurements.classes) == measured
    stages, unequal = [], []
    for number in range(BEFORE, BEFORE + AFTER):
        found = updates.run_update(second, number)
        stages.append(second.hilore.stage.value)
        unequal += updates.unequal_bits(found, expected[number])
    return {
        "known": known,
        "stages": stages,
        "unequal": unequal + updates.unequal_bits(state_of(second), state_of(whole)),
        "plan": list(second.hilore.plan.actions.values()) == list(whole.hilore.plan.actions.values()),
        "files": sorted(path.name for path in Path(folder).rglob("hilore/*")),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:resumed", folder=str(tmp_path), stage=stage):
        assert not seen["unequal"]
        assert seen["known"] == (True, True) and seen["plan"]
        # the two all-R updates stay: their peak is "1.0x"; units are not measured again
        assert seen["stages"] == [Stage.MEASURE_R.value, *[Stage.PLANNED.value] * (AFTER - 1)]
        assert len(seen["files"]) == 1, "one profile for both ranks"


@patch.object(Cost, "PLANNED_UPDATES", 1e9)  # of updates this small: what they take on a busy machine is chance
def compressing(folder: str, stage: int) -> dict[str, Any]:
    """Calibrated and audited, saved, and taken up by another engine."""
    block: dict[str, Any] = {
        "max_gradient_error": 0.5,
        "profile": {"calibration_microbatches": 2, "audit_interval": 2},
    }
    first = _engine(stage, **block)
    checks, number = first._hilore_host.checks, 0
    while not (checks.calibrated and checks.audits) and number < 16:
        test_compress.update(first, number)
        number += 1
    first.save_checkpoint(folder, "one")
    before = checks.progress
    ds_hilore.detach(first)
    second = _engine(stage, seed=7, **block)
    second.load_checkpoint(folder, "one")
    after = second._hilore_host.checks.progress
    return {
        "audits": len(checks.audits),
        "point": (before.point, after.point),
        "observations": (len(before.calibration.observations), len(after.calibration.observations)),
        "coherence": (before.calibration.coherence, after.calibration.coherence),
        "correction": second.hilore.learning.risk.correction,
        "files": sorted(path.name for path in (Path(folder) / "one" / "hilore").iterdir()),
    }


def test_calibration_and_audits_go_with_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for seen in ranks.run(f"{HERE}:compressing", folder=str(tmp_path), stage=2, timeout=200.0):
        (_, fitted, accepted, *learnt), (_, fitted_now, accepted_now, *learnt_now) = seen["point"]
        assert seen["audits"] > 0 and (fitted, accepted) == (True, True)
        # what an earlier run has accepted is judged again before anything is compressed
        assert (fitted_now, accepted_now, learnt_now) == (True, False, learnt)
        assert seen["observations"][0] == seen["observations"][1] > 0
        assert seen["coherence"][0] == seen["coherence"][1] == pytest.approx(1 / seen["correction"])
        assert len([name for name in seen["files"] if "-calibration-rank" in name]) == 2


def saved(folder: str, stage: int) -> None:
    engine = _engine(stage)
    _run(engine, range(BEFORE))
    engine.save_checkpoint(folder, "one")


def taken_up(folder: str, stage: int, weights_only: bool) -> dict[str, Any]:
    """Loads, and makes updates until plans are followed again."""
    with warnings_said() as said:
        engine = _engine(stage, seed=7)
        engine.load_checkpoint(folder, "one", load_module_only=weights_only)
    known = engine.hilore.learning.known
    stages = []
    for number in range(BEFORE):
        updates.run_update(engine, number)
        stages.append(engine.hilore.stage.value)
    return {"known": known, "stages": stages, "said": said}


MEASURED = [stage.value for stage in (Stage.MEASURE_R, Stage.MEASURE_H, Stage.PLANNED, Stage.PLANNED)]


def test_another_zero_stage_is_named_and_measured_anew(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(f"{HERE}:saved", folder=str(tmp_path), stage=1)
    first, second = ranks.run(f"{HERE}:taken_up", folder=str(tmp_path), stage=2, weights_only=False)
    assert (first["known"], first["stages"]) == (second["known"], second["stages"]) == (False, MEASURED)
    assert any("zero_stage: 1 then, 2 now" in line and str(tmp_path) in line for line in first["said"])


def test_another_world_size_is_named_and_measured_anew(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(f"{HERE}:saved", folder=str(tmp_path), stage=2)
    (alone,) = run_ranks(f"{HERE}:taken_up", world=1, folder=str(tmp_path), stage=2, weights_only=True)
    assert (alone["known"], alone["stages"]) == (False, MEASURED)
    assert any("world_size: 2 then, 1 now" in line for line in alone["said"])


def damaged(folder: str, how: str) -> dict[str, Any]:
    saved(folder, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = (Path(folder) / "one" / "hilore").glob("*.json")
        if how == "cut short":
            file.write_text(file.read_text()[:100])
        else:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"__reduce__": "os.system"}))
    dist.barrier()
    return taken_up(folder, 2, weights_only=False)


@pytest.mark.parametrize("how", ["cut short", "another key"])
def test_a_damaged_file_costs_measuring_and_no_run(ranks: RankPool, tmp_path: Path, how: str) -> None:
    for seen in ranks.run(f"{HERE}:damaged", folder=str(tmp_path), how=how):
        assert (seen["known"], seen["stages"]) == (False, MEASURED)
        assert any("the stored profile is not used" in line for line in seen["said"])


def unwritable(folder: str) -> dict[str, Any]:
    """A file stands where the folder would be."""
    engine = _engine(2)
    _run(engine, range(BEFORE))
    (Path(folder) / "one").mkdir(exist_ok=True)
    (Path(folder) / "one" / "hilore").touch()
    dist.barrier()
    with warnings_said() as said:
        engine.save_checkpoint(folder, "one")
    return {"said": said, "files": sorted(os.listdir(Path(folder) / "one"))}


def test_a_checkpoint_stands_where_ours_cannot_be_written(ranks: RankPool, tmp_path: Path) -> None:
    first, _ = ranks.run(f"{HERE}:unwritable", folder=str(tmp_path))
    assert any("the profile is not stored" in line for line in first["said"])
    assert any(name.endswith("_model_states.pt") for name in first["files"])


# ------------------------------------------------------------------------------------------------------------ Trainer


def trainer_resumed(folder: str, stage: int) -> dict[str, Any]:
    """Six updates at once, and six of which the last two are another trainer's."""
    ds_hilore.install()
    block = {"memory_budget": "1000x", "prune_zero_exposure": False}
    arguments: dict[str, Any] = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 4,
        "lr_scheduler_type": "constant",
    }
    whole = make_trainer(f"{folder}/whole", trl_runs.ds_json(stage, block), **arguments)
    whole.train()
    logged, state = trl_runs.logged(whole), state_of(whole.model_wrapped)
    resumed = make_trainer(f"{folder}/whole", trl_runs.ds_json(stage, block), **arguments)
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-4"))
    return {
        "logged": (logged, trl_runs.logged(resumed)),
        "unequal": updates.unequal_bits(state, state_of(resumed.model_wrapped)),
        "known": resumed.model_wrapped.hilore.learning.known,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_that_is_resumed_ends_where_it_would_have_ended(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:trainer_resumed", folder=str(tmp_path), stage=stage):
        whole, resumed = seen["logged"]
        assert [step["step"] for step in resumed] == [step["step"] for step in whole] == [1, 2, 3, 4, 5, 6]
        assert whole == resumed and not seen["unequal"]
        assert seen["known"]
