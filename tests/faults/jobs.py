"""Jobs of two fresh ranks, for faults that end a process."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.faults.forks import become_rank, server
from tests.ranks import _free_port

WORLD = 2
#: What the others get once a rank has ended: one that is stopped never would.
GRACE_S = 3.0


@dataclass(frozen=True)
class Ended:
    """How one rank of a job ended.

    Args:
        told: what it wrote: the class of the error that its update ended in, or RIGHT; "" where it wrote nothing.
        code: exit code; minus the signal that killed it; None: it had to be killed, since the job hung.
        seconds: from the start of the job.
    """

    told: str
    code: int | None
    seconds: float


def run_job(name: str, limit_s: float) -> list[Ended]:
    """Calls the body of an ending (endings.py) on every rank of a new job; how each ended, in rank order."""
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        folder, port, context = Path(made), _free_port(), server()
        ranks = [context.Process(target=_rank, args=(rank, port, folder, name), daemon=True) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        started = time.monotonic()
        ended = []
        for rank, process in enumerate(ranks):
            ended.append(_wait(process, started, limit_s, _told(folder, rank)))
            limit_s = min(limit_s, time.monotonic() - started + GRACE_S)
        for process in ranks:
            process.join()
        return ended


def _wait(process: BaseProcess, started: float, limit_s: float, told: Path) -> Ended:
    process.join(max(0.0, started + limit_s - time.monotonic()))
    code, seconds = process.exitcode, time.monotonic() - started
    if code is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
    return Ended(told.read_text(encoding="utf-8") if told.exists() else "", code, seconds)


def _told(folder: Path, rank: int) -> Path:
    return folder / f"told-{rank}"


def tell(folder: Path, what: str) -> None:
    """From a rank: what became of its update."""
    _told(folder, int(os.environ["RANK"])).write_text(what, encoding="utf-8")


def _rank(rank: int, port: int, folder: Path, name: str) -> None:
    become_rank(rank, WORLD, port, folder / f"log-{rank}.txt")
    import deepspeed
    import torch

    from tests.faults.endings import BY_NAME

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, distributed_port=port, verbose=False)
    BY_NAME[name].body(folder)
    os._exit(0)  # a group of which a rank is gone would be waited for
