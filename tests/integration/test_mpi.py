"""Real jobs under mpirun: training with a budget of its own on each rank, and jobs that MPI would let hang."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hilore.core import deps
from ds_hilore.core.errors import RankMismatch
from ds_hilore.integration import mpi_plane
from ds_hilore.integration.control_plane import control_plane
from ds_hilore.integration.mpi_plane import MARKERS, MpiUse, mpi_use
from tests.engines import config, difference
from tests.launch.jobs import TRAIN, answers, outcome, run, written
from tests.mpi import mpi_environment, why_no_mpi

needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=why_no_mpi() or "")

UPDATES = 10
#: Without trials: on a busy machine they may find that a plan does not pay, and replay everything.
BLOCK = {"hilore": {"memory_budget": ["1.0x", "1000x"], "planner": {"trial_microbatches": 0}}}


# ------------------------------------------------------------------------------------------ training


@needs_mpi
@pytest.mark.parametrize("stage", [2, 3])
def test_updates_under_mpirun_equal_deepspeed_without_checkpointing(stage: int, tmp_path: Path) -> None:
    """ZeRO-2 bit for bit. ZeRO-3 as it is sums in another order than its leaf units do (test_update.py)."""
    settings = config(stage, lr=1e-4) | {"train_micro_batch_size_per_gpu": 8}
    command = ["mpirun", "-np", "2", sys.executable, TRAIN, "--out", str(tmp_path), "--updates", str(UPDATES)]
    command += ["--deepspeed_config", written(tmp_path, "ours.json", settings | BLOCK)]
    command += ["--beside", written(tmp_path, "plain.json", settings)]
    run(command, mpi_environment())
    small, large = answers(tmp_path)
    for seen in (small, large):
        assert seen["plane"] == "MpiControlPlane" and seen["node"] == (0, 1)
        assert seen["stage"] == "planned"
        assert len(seen["gradients"]) == len(seen["expected"]) == UPDATES
        errors = [difference(found, expected) for found, expected in zip(seen["gradients"], seen["expected"])]
        assert max(errors) < 1e-6
        assert stage == 3 or max(errors) == 0
    assert set(large["actions"]) == {"store"} and "recompute" in small["actions"]


# ------------------------------------------------------------------------------------------ jobs that must end


def joined(mpi4py: bool = True) -> Any:
    """This rank's control plane, in a job whose ranks DeepSpeed asked MPI for, or a launch script told."""
    import deepspeed

    if not mpi4py:
        deps.has.cache_clear()
        sys.modules["mpi4py"] = None  # type: ignore[assignment]  # as where it is not installed
        rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    deepspeed.init_distributed("gloo", distributed_port=int(os.environ["MASTER_PORT"]), verbose=False)
    return control_plane(time_limit_s=2.0)


def job_never_comes() -> None:
    """Rank 1 is busy with something else for ever; rank 0 gives it up, and does not wait for it in MPI_Finalize."""
    plane = joined()
    plane.exchange("warm", 0)
    if plane.rank == 1:
        time.sleep(3600)
    plane.exchange("update", 0)


def job_dies() -> None:
    plane = joined()
    plane.exchange("warm", 0)
    if plane.rank == 1:
        os._exit(3)
    plane.exchange("update", 0)


def job_goes_on_after_a_refusal() -> None:
    """Ranks that part and find out end as any program does: nothing is left open."""
    plane = joined()
    try:
        plane.exchange(("update", "start")[plane.rank], 0)
    except RankMismatch:
        print(f"rank {plane.rank} was told", flush=True)


def job_without_mpi4py() -> None:
    logging.basicConfig(level=logging.WARNING)
    planes = [joined(mpi4py=False) for _ in range(2)]
    planes[1].agree("start", {"units": 30})
    print(f"rank {planes[1].rank}: {type(planes[1]).__name__}", flush=True)


def start(job: str) -> tuple[int, str]:
    code = f"from tests.integration import test_mpi; test_mpi.{job}()"
    return outcome(["mpirun", "-np", "2", sys.executable, "-c", code], mpi_environment())


@needs_mpi
def test_a_rank_that_never_comes_ends_the_job() -> None:
    code, output = start("job_never_comes")
    assert code != 0
    assert "RankMismatch: rank 0 of 2: not every rank answered 'update' (exchange 2)" in output
    assert "time limit 2 s): no sign of rank 1;" in output
    assert "hilore: rank 0 ends the MPI job" in output and "MPI would wait for ever for rank 1" in output


@needs_mpi
def test_a_rank_that_dies_ends_the_job() -> None:
    code, _ = start("job_dies")
    assert code == 3


@needs_mpi
def test_a_refusal_that_all_ranks_heard_lets_the_job_end_well() -> None:
    code, output = start("job_goes_on_after_a_refusal")
    assert code == 0, output
    assert "rank 0 was told" in output and "rank 1 was told" in output
    assert "ends the MPI job" not in output


@needs_mpi
def test_without_mpi4py_the_plane_is_gloo_and_says_so_once() -> None:
    code, output = start("job_without_mpi4py")
    assert code == 0, output
    assert "rank 0: GlooControlPlane" in output and "rank 1: GlooControlPlane" in output
    assert output.count("the control plane runs on gloo all the same") == 1
    assert "ranks 0, 1: mpi4py is not installed (pip install 'ds_hilore[mpi]')" in output


# ------------------------------------------------------------------------------------------ whether MPI can be used


class FakeMpi(SimpleNamespace):
    """As much of mpi4py.MPI as `mpi_use` looks at."""

    def __init__(self, rank: int, size: int, initialised: bool = True) -> None:
        world = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)
        super().__init__(COMM_WORLD=world, Is_initialized=lambda: initialised, Is_finalized=lambda: False)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No sign of MPI."""
    for marker in MARKERS:
        monkeypatch.delenv(marker, raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(mpi_plane.deps, "has", lambda module: True)
    return monkeypatch


def pretend(monkeypatch: pytest.MonkeyPatch, mpi: Any) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)


def test_a_process_that_mpi_did_not_start_never_imports_mpi4py(bare: pytest.MonkeyPatch) -> None:
    bare.setitem(sys.modules, "mpi4py", None)  # importing it would raise
    assert mpi_use(0, 2) is MpiUse.NOT_STARTED
    bare.setenv(MARKERS[0], "2")
    assert mpi_use(0, 2) is MpiUse.NO_LIBRARY  # and now it tried


@pytest.mark.parametrize("marker", MARKERS)
def test_ranks_of_mpi_must_be_those_of_the_job(bare: pytest.MonkeyPatch, marker: str) -> None:
    bare.setenv(marker, "2")
    pretend(bare, FakeMpi(rank=1, size=2))
    assert mpi_use(1, 2) is MpiUse.POSSIBLE
    assert mpi_use(0, 2) is MpiUse.OTHER_RANKS  # renumbered
    assert mpi_use(1, 4) is MpiUse.OTHER_RANKS  # every process of MPI starts two of the job
    pretend(bare, FakeMpi(rank=1, size=2, initialised=False))
    assert mpi_use(1, 2) is MpiUse.OTHER_RANKS


def test_a_job_that_was_joined_counts_without_a_marker(bare: pytest.MonkeyPatch) -> None:
    pretend(bare, FakeMpi(rank=1, size=2))
    assert mpi_use(1, 2) is MpiUse.POSSIBLE
    pretend(bare, FakeMpi(rank=0, size=1))  # a script that imports mpi4py by itself, under another launcher
    assert mpi_use(1, 2) is MpiUse.NOT_STARTED


def test_a_missing_mpi4py_is_told_apart(bare: pytest.MonkeyPatch) -> None:
    bare.setenv(MARKERS[0], "2")
    bare.setattr(mpi_plane.deps, "has", lambda module: False)
    assert mpi_use(0, 2) is MpiUse.NO_MPI4PY
