"""The log of real runs: what it says is what was done, on every rank; and it never ends a run."""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_hilore
from ds_hilore.core.types import UnitId
from ds_hilore.integration.audits import Audit
from ds_hilore.integration.run_log import RunLog
from ds_hilore.report.reading import RankLog, Run, read_run
from ds_hilore.report.records import file_of
from ds_hilore.report.writing import LogFile
from ds_hilore.runtime.guard import Defence, GuardEvent
from tests.engines import config
from tests.integration import pipelines, updates
from tests.integration.test_compress import grpo
from tests.ranks import RankPool

HERE = "tests.integration.test_run_log"


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the log of the process says inside, of the run's log and its end."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_hilore.integration.run_log")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def engine_of(folder: str, stage: int = 2, accumulation: int = 2, **block: Any) -> Any:
    block = {"report": {"path": folder}, "memory_budget": "1000x"} | block
    return updates.hilore_engine(updates.build(), config(stage, accumulation), **block)


def followed(folder: str, stage: int, count: int) -> dict[str, Any]:
    """Runs updates; what was done in each, by the controller's own word."""
    with messages() as said:
        engine = engine_of(folder, stage)
        done = []
        for number in range(count):
            updates.run_update(engine, number)
            hilore = engine.hilore
            letters = "".join(treatment.action.letter for treatment in hilore.microbatch.treated.values())
            done.append((letters, hilore.stage.value, hilore.budget_bytes, hilore.metrics()["saved_seconds"]))
        units = [str(unit) for unit in engine.hilore.microbatch.treated]
        ds_hilore.detach(engine)
    return {"done": done, "said": said, "units": units}


def log_of(folder: Path, rank: int) -> RankLog:
    return read_run(folder).ranks[rank]


@pytest.mark.parametrize("stage", [3])
def test_what_was_done_is_logged(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    seen = ranks.run(f"{HERE}:followed", folder=str(tmp_path / "new" / "folder"), stage=stage, count=6)
    run = read_run(tmp_path / "new" / "folder")
    assert [log.rank for log in run.ranks] == [0, 1] and (run.damaged, run.earlier) == (0, 0)
    for facts, log in zip(seen, run.ranks):
        assert log.numbers().tolist() == list(range(6)) and log.units == facts["units"]
        for update, (letters, stage_then, budget, saved) in enumerate(facts["done"]):
            assert dict(log.actions[update]).get(letters, 0) >= 1
            assert sum(count for _, count in log.actions[update]) == 2, "two microbatches"
            before = facts["done"][update - 1][1] if update else "measure_r"
            assert log.stages[update] in (before, stage_then), "a stage may end with an update"
            assert log.column("budget_bytes")[update] == budget or budget == 0
            # the newest microbatch's share of both
            promised = log.column("saved_seconds")[update]
            assert promised >= saved >= 0 if log.stages[update] == "planned" else promised == 0
        assert facts["done"][0][0] == "RRR" and facts["done"][-1][0] == "HHH", "it measures, then stores"
        assert (log.column("seconds")[1:] > 0).all() and log.column("level_bytes").min() > 0
        assert log.prospect is not None and log.prospect.replayed_peak_bytes > 0
        assert log.run.settings["report"] == {"path": str(tmp_path / "new" / "folder")}
        assert log.run.zero_stage == stage and log.run.microbatches == 2 and log.run.world == 2
    first, second = seen
    assert len(first["said"]) == 1 and second["said"] == [], "rank 0 has the last word"
    assert first["said"][0].startswith("hilore: the run ends after 6 updates. Plans promised to save ")
    assert first["said"][0].endswith("gradients exact")


def exposed(folder: str) -> dict[str, Any]:
    """Two updates of a loss that tells omega, where an error is allowed; an audit and a shortage that never were."""
    engine = engine_of(folder, max_gradient_error=0.01)
    hilore, found, norms = engine.hilore, [], []
    for number in range(2):
        for k in range(2):
            engine.backward(grpo(engine, 10 * number + k + 100 * dist.get_rank()))
            found.append(hilore.learning.exposed.exposure)
            if k == 1:
                engine._hilore_host.checks.audits.append(Audit(number, 0.004, 0.005 + number))
                norms.append(hilore.learning.risk.norm)
            engine.step()
        hilore.guard._note(GuardEvent(Defence.BACKWARD, number, dist.get_rank(), UnitId("a.unit"), 7, (UnitId("b"),)))
    ds_hilore.detach(engine)
    return {"exposures": found, "norms": norms}


def test_exposures_audits_and_shortages_are_logged(ranks: RankPool, tmp_path: Path) -> None:
    seen = ranks.run(f"{HERE}:exposed", folder=str(tmp_path))
    run = read_run(tmp_path)
    for facts, log in zip(seen, run.ranks):
        one, two, three, four = facts["exposures"]
        assert log.column("exposure").tolist() == pytest.approx([(one + two) / 2, (three + four) / 2])
        assert facts["norms"][0] == 0 and np.isnan(log.column("allowed_risk")[0]), "no gradient was seen yet"
        assert log.column("allowed_risk")[1] == pytest.approx(0.01 / 2**0.5), "its part of two ranks'"
        assert [(event.unit, event.short_bytes, event.replayed) for event in log.shortages] == [("a.unit", 7, 1)]
        assert log.totals.audits == 2 and log.totals.error_most == 1.005
    assert [(audit.update, audit.measured) for audit in run.audits] == [(0, 0.005), (1, 1.005)]


def two_runs(folder: str) -> dict[str, Any]:
    """The second run of one folder; the first was killed while it wrote."""
    engine = engine_of(folder)
    for number in range(3):
        updates.run_update(engine, number)
    path = file_of(Path(folder), dist.get_rank())
    path.write_bytes(path.read_bytes()[:-40])
    ds_hilore.detach(engine)
    engine = engine_of(folder)
    updates.run_update(engine, 0)
    open_file = engine._hilore_host.log._file is not None
    ds_hilore.detach(engine)
    return {"open": open_file}


def test_a_second_run_of_the_same_folder(ranks: RankPool, tmp_path: Path) -> None:
    assert all(seen["open"] for seen in ranks.run(f"{HERE}:two_runs", folder=str(tmp_path)))
    run = read_run(tmp_path)
    assert [len(log.updates) for log in run.ranks] == [1, 1] and run.earlier == 1 and run.damaged == 0


# ------------------------------------------------------------------------------------------------ what goes wrong


def faulty(folder: str) -> dict[str, Any]:
    """Four updates for each way in which the log fails on rank 1; whether gradients are those without a log."""
    plain = updates.hilore_engine(updates.build(), config(2, 2), memory_budget="1000x")
    expected = [updates.run_update(plain, number) for number in range(4)]
    ds_hilore.detach(plain)
    found = {}
    for fault in FAULTS:
        here = f"{folder}/{fault}"
        if fault == "folder" and dist.get_rank() == 1:
            file_of(Path(here), 1).mkdir(parents=True)
        with messages() as said:
            engine = engine_of(here)
            same = []
            for number in range(4):
                with failing(fault if dist.get_rank() == 1 and number >= 2 else ""):
                    same.append(not updates.unequal_bits(updates.run_update(engine, number), expected[number]))
            ds_hilore.detach(engine)
        found[fault] = {"same": same, "said": [line for line in said if "the run ends" not in line]}
    return found


def failing(fault: str) -> AbstractContextManager[object]:
    full = OSError(errno.ENOSPC, "No space left on device")
    if fault == "disk":
        return mock.patch.object(LogFile, "append", side_effect=full)
    return mock.patch.object(RunLog, "_update", side_effect=KeyError("ours")) if fault == "bug" else nullcontext()


#: How many updates rank 1 leaves, and what it says.
FAULTS = {
    "disk": (2, "no more of this run is logged"),
    "folder": (0, "Is a directory"),
    "bug": (2, "by a fault of ours; please report it: KeyError"),
}


def test_a_log_that_fails_is_said_once_and_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(f"{HERE}:faulty", folder=str(tmp_path))
    for fault, (left, words) in FAULTS.items():
        assert first[fault]["same"] == second[fault]["same"] == [True] * 4
        assert first[fault]["said"] == [] and len(second[fault]["said"]) == 1, fault
        assert words in second[fault]["said"][0] and "rank 1" in second[fault]["said"][0]
        logged = {log.rank: len(log.updates) for log in read_run(tmp_path / fault).ranks}
        assert logged == {0: 4, **({1: left} if left else {})}, fault


def restarted(folder: str) -> None:
    """The second microbatch of an update fails on all ranks, and the update runs again."""
    engine = engine_of(folder)
    updates.run_one_microbatch(engine, 0)
    with mock.patch.object(engine.hilore, "begin_backward", side_effect=KeyError("planned")), pytest.raises(KeyError):
        updates.run_one_microbatch(engine, 1)
    updates.run_update(engine, 0)
    ds_hilore.detach(engine)


def test_an_update_that_starts_again_counts_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(f"{HERE}:restarted", folder=str(tmp_path))
    for log in read_run(tmp_path).ranks:
        assert log.actions == [(("RRR", 2),)]


# ------------------------------------------------------------------------------------------------ its end


def forgotten(folder: str) -> dict[str, Any]:
    """An engine that nobody detaches, and that goes."""
    with messages() as said:
        engine = engine_of(folder)
        updates.run_update(engine, 0)
        log = engine._hilore_host.log
        holders = [type(each).__name__ for each in gc.get_referents(log.__dict__) if isinstance(each, torch.nn.Module)]
        engine.hilore.close()
        del engine
        gc.collect()
        log.close()
        log.close()
    return {"said": said, "holders": holders}


def test_the_last_line_comes_once(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(f"{HERE}:forgotten", folder=str(tmp_path))
    assert first["said"] == [
        "hilore: the run ends after 1 update, before plans are followed: the first updates measure and try"
    ]
    assert second["said"] == [] and first["holders"] == []


# ------------------------------------------------------------------------------------------------ pipelines


def staged(folder: str) -> list[str]:
    block = {"hilore": {"memory_budget": "1000x", "planner": {"trial_microbatches": 0}, "report": {"path": folder}}}
    engine = pipelines.start(pipelines.build(2, interval=1), pipelines.settings(4) | block)
    for number in range(5):
        pipelines.update(engine, number)
    ran = "".join(action.letter for action in engine.hilore.microbatch.ran.values())
    units = [str(unit) for unit in engine.hilore.microbatch.treated]
    ds_hilore.detach(engine)
    return [ran, *units]


def test_stages_of_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    seen = ranks.run(f"{HERE}:staged", folder=str(tmp_path))
    run: Run = read_run(tmp_path)
    for (ran, *units), log in zip(seen, run.ranks):
        assert log.units == units and log.numbers().tolist() == list(range(5))
        assert all(sum(count for _, count in actions) == 4 for actions in log.actions), "four microbatches"
        assert dict(log.actions[-1]).get(ran, 0) >= 1
    assert run.ranks[0].units != run.ranks[1].units
