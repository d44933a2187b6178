"""A second run of the same setting fits no slopes again, judges those it has found, and plans the same; half a
calibration goes on where it was; one that a rank cannot read is made anew by all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_hilore.integration import gradient_checks
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.held_out import SINGLES
from ds_hilore.runtime.parts import Stage
from tests.engines import config
from tests.integration import updates
from tests.integration.lines import warnings_said
from tests.integration.test_compress import update
from tests.models import llama, lora
from tests.ranks import RankPool

HERE = "tests.integration.test_calibration_stored"
MICROBATCHES = 3
ENOUGH = 20  # updates in which any calibration of these engines is over


class Passes:
    """Counts gradients that are computed beside the engine, audits left out."""

    def __init__(self) -> None:
        self.count = 0
        self._original = gradient_checks.gradients_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._original(*args, **kwargs)


def run(
    folder: str, stage: int, mode: str = "update_aware", until: int | None = None, scale: float = 1.0
) -> dict[str, Any]:
    """One run until its calibration is over, and one update more (or of `until` updates): what it found and plans.

    Args:
        scale: of advantages, so of exposures.
    """
    paper = {"mode": "paper", "paper": {"least_tensor_bytes": 0, "dtypes": ["float32"]}} if mode == "paper" else {}
    with (
        warnings_said() as said,
        mock.patch.object(gradient_checks, "gradients_of", passes := Passes()),
        mock.patch.object(
            Cost, "PLANNED_UPDATES", 1e9
        ),  # of updates this small: what they take on a busy machine is chance
    ):
        engine = updates.hilore_engine(
            lora(llama(layers=3)),
            config(stage, accumulation=2),
            memory_budget="1000x",
            max_gradient_error=0.5,
            profile={"path": folder, "calibration_microbatches": MICROBATCHES, "audit_interval": 0},
            **paper,
        )
        hilore, checks = engine.hilore, engine._hilore_host.checks
        begun = checks._microbatches
        number = 0
        while number < (until or ENOUGH) and not (
            until is None and checks.calibrated and hilore.stage is Stage.PLANNED
        ):
            update(engine, number, scale)
            number += 1
        if until is None:
            update(engine, number, scale)
    planner, shape = hilore.parts.planner, hilore.microbatch.shape
    for name in hilore.measurements.classes:
        hilore.measurements.strike(name, "H", "with memory for everything nothing else would be planned")
    # what compressing saves on layers this small, on a busy machine, is chance
    hilore.measurements._gained = lambda unit_class, shape, variant: 1.0
    hilore.measurements.outdate()
    planner.replan()
    profiles = hilore.measurements.profiles(shape)
    enough = sum(max(variant.risk for variant in unit.variants) for unit in profiles)
    reaches = (0.0, enough / 2, math.inf) if mode == "paper" else (0.0, math.inf)  # one variant: seconds decide nothing
    return {
        "begun": begun,
        "microbatches": checks._microbatches,
        "calibrated": checks.calibrated,
        "passes": passes.count,
        "risks": [{variant.name: variant.risk for variant in unit.variants} for unit in profiles],
        "plan": [planner.prepare(shape, profiles, reach).plan.actions for reach in reaches],
        "observations": len(checks.calibration.observations),
        "judged": len(checks.calibration.judgements),
        "raised": checks.calibration.raised,
        "frozen": hilore.learning.risk.frozen,
        "trusted": hilore.learning.risk.trusted,
        "said": said,
    }


def calibration_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*-calibration-rank*.json"))


def two_runs(
    folder: str,
    stage: int,
    mode: str = "update_aware",
    damage: bool = False,
    until: int | None = None,
    weaken: float = 1.0,
    scale: float = 1.0,
) -> Any:
    """What two runs that share a folder have done.

    Args:
        damage: to the file of rank 1, between them.
        weaken: the second run's weights make errors that many times as large as the stored ones.
        scale: of advantages in the second run.
    """
    first = run(folder, stage, mode, until)
    dist.barrier()
    files = calibration_files(folder)
    if damage and dist.get_rank() == 0:
        files[1].write_text(files[1].read_text().replace('"observations"', '"0bservations"', 1))
    if dist.get_rank() == 0 and weaken != 1:
        for file in files:
            stored = json.loads(file.read_text())
            for seen in stored["calibration"]["observations"]:
                seen["gradient_error"] /= weaken
            file.write_text(json.dumps(stored))
    dist.barrier()
    second = run(folder, stage, mode, scale=scale)
    return {"first": first, "second": second, "files": [path.name for path in files]}


@pytest.mark.parametrize(("stage", "mode"), [(2, "update_aware"), (3, "paper")])
def test_a_second_run_judges_what_it_has_found(ranks: RankPool, tmp_path: Path, stage: int, mode: str) -> None:
    """And does not fit it again. Mode paper, which judges nothing, makes no pass at all."""
    scale = 8.0  # slopes are the same whatever the loss is multiplied by; exposures are not
    found = ranks.run(f"{HERE}:two_runs", folder=str(tmp_path), stage=stage, mode=mode, scale=scale, timeout=200.0)
    for rank, seen in enumerate(found):
        first, second = seen["first"], seen["second"]
        assert len(seen["files"]) == 2, "one of each rank"
        assert first["passes"] > MICROBATCHES and first["calibrated"] and first["begun"] == 0
        assert any(risk > 0 for unit in first["risks"] for risk in unit.values()), "nothing can be compressed"
        assert second["calibrated"] and second["trusted"]
        if mode == "paper":
            assert second["passes"] == second["judged"] == 0
        else:
            rounds = 1 + (second["raised"] > first["raised"])
            assert second["judged"] > 0 and second["passes"] <= rounds * MICROBATCHES * (SINGLES + 2)
            assert second["frozen"] > scale / 2 * first["frozen"], "exposures of another run"
        raised = second["raised"] / first["raised"]
        for before, after in zip(first["risks"], second["risks"], strict=True):
            # slopes are each rank's own, errors of codecs those that rank 0 has stored for all
            expected = {name: raised * risk for name, risk in before.items()}
            assert after == pytest.approx(expected, rel=1e-9 if rank == 0 else 0.1)
        assert second["observations"] == first["observations"]
        assert second["plan"] == first["plan"]


def test_slopes_of_other_weights_are_not_taken_for_true(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing is compressed by slopes that an earlier run has accepted but that do not hold in this one."""
    weaken = 30.0
    for seen in ranks.run(f"{HERE}:two_runs", folder=str(tmp_path), stage=2, weaken=weaken, timeout=200.0):
        first, second = seen["first"], seen["second"]
        assert first["trusted"] and second["judged"] > 0 and second["microbatches"] == first["microbatches"]
        assert not second["trusted"] or second["raised"] > weaken / 5 * first["raised"]


def test_half_a_calibration_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    until = gradient_checks.FIRST_UPDATE + 1  # of which the last calibrates, with two microbatches
    for seen in ranks.run(f"{HERE}:two_runs", folder=str(tmp_path), stage=2, until=until, timeout=200.0):
        first, second = seen["first"], seen["second"]
        assert 0 < first["microbatches"] < MICROBATCHES and not first["calibrated"]
        assert second["begun"] == first["microbatches"]
        assert second["microbatches"] == MICROBATCHES and second["calibrated"]
        assert second["observations"] > first["observations"]


def test_a_damaged_file_is_named_and_rebuilt(ranks: RankPool, tmp_path: Path) -> None:
    """By all ranks: each pass is a step that they make together."""
    found = ranks.run(f"{HERE}:two_runs", folder=str(tmp_path), stage=2, damage=True, timeout=200.0)
    for rank, seen in enumerate(found):
        second = seen["second"]
        assert second["begun"] == 0 and second["passes"] > MICROBATCHES and second["calibrated"]
        (named,) = [line for line in second["said"] if "stored calibration is not used" in line]
        assert (seen["files"][1] in named) == ("calibration.observations" in named) == (rank == 1)
    (again,) = {each["second"]["begun"] for each in ranks.run(f"{HERE}:again", folder=str(tmp_path), timeout=200.0)}
    assert again == MICROBATCHES, "what was rebuilt is read"


def again(folder: str) -> Any:
    return {"second": run(folder, 2)}
