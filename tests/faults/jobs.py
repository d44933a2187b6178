"""Jobs of two fresh ranks, for faults that end a process."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.faults.forks import become_rank, server
from tests.ranks import _free_port

WORLD = 2


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


def run_job(body: Callable[[Path], None], limit_s: float) -> list[Ended]:
    """Calls `body` with a folder on every rank of a new job; how each ended, in rank order."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, port, context = Path(name), _free_port(), server()
        ranks = [context.Process(target=_rank, args=(rank, port, folder, body), daemon=True) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        started = time.monotonic()
        ended = [_wait(process, started, limit_s, _told(folder, rank)) for rank, process in enumerate(ranks)]
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


def _rank(rank: int, port: int, folder: Path, body: Callable[[Path], None]) -> None:
    become_rank(rank, WORLD, port, folder / f"log-{rank}.txt")
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, distributed_port=port, verbose=False)
    body(folder)
    os._exit(0)  # a group of which a rank is gone would be waited for
