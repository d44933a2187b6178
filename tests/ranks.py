"""Real processes for tests that need several ranks.

    def body(stage: int) -> float: ...             # a plain function of a test module, runs on every rank

    def test_body(ranks: RankPool) -> None:        # two processes, kept for the test module (conftest.py)
        first, second = ranks.run("tests.integration.test_x:body", stage=3)

Starting a rank costs several seconds of imports, so a pool keeps its processes and runs one case after another in them
on the same gloo group. After a case that raised or hung the processes are replaced: a group in which one rank stopped
half way is of no more use. `run_ranks` is the pool for a single case; `run_cases` runs a list and reports each.

A case raises `RankFailure` when any rank raised (its traceback is the message) or when `timeout` seconds have passed
(the Python stacks of every rank are the message). Results and arguments are plain data and tensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TIMEOUT_S = 120.0
#: Imports, and at the very first start DeepSpeed's build of its shared-memory operator. Not part of a case's time.
START_TIMEOUT_S = 300.0
#: Time the other ranks get to end by themselves once one has failed, and stacks to be written after SIGUSR1.
GRACE_S = 1.0

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time. The message holds tracebacks or stacks of all ranks."""


@dataclass(frozen=True)
class CaseOutcome:
    """Results of one case in rank order, or why there are none."""

    results: list[Any] = field(default_factory=list)
    failure: RankFailure | None = None

    def unwrap(self) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        return self.results


class RankPool:
    """`world` processes with a common gloo group, started at first use and replaced after a failure.

    Args:
        world: number of ranks.
        env: further environment variables of the ranks.
    """

    def __init__(self, world: int = 2, env: dict[str, str] | None = None) -> None:
        self.world = world
        self._env = dict(env or {})
        self._processes: list[subprocess.Popen[str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._case = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, target: str, /, *, timeout: float = DEFAULT_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Calls `target` ("module:function") with `kwargs` on every rank and gives the results in rank order.

        Raises:
            RankFailure: see the module's docstring.
        """
        if not self._processes:
            self._start()
        self._case += 1
        case = self._path(f"case-{self._case}.pickle")
        case.write_bytes(pickle.dumps((target, kwargs)))
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by _wait
                process.stdin.write(f"{self._case}\n")
                process.stdin.flush()
        try:
            return self._wait(target, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the ranks. The pool can be used again afterwards."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / name

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        port = _free_port()
        for rank in range(self.world):
            env = {
                **os.environ,
                **ENVIRONMENT,
                **self._env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
                "MASTER_PORT": str(port),
            }
            with self._path(f"log-{rank}.txt").open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.ranks", self._folder.name],
                        cwd=ROOT,
                        env=env,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )

    def _wait(self, target: str, timeout: float) -> list[Any]:
        started = time.monotonic()
        deadline = started + START_TIMEOUT_S
        ready = False
        while True:
            if not ready and all(self._path(f"ready-{rank}").exists() for rank in range(self.world)):
                ready, deadline = True, time.monotonic() + timeout
            answers = [self._answer(rank) for rank in range(self.world)]
            if any(a is not None and "traceback" in a for a in answers):
                time.sleep(GRACE_S)
                raise RankFailure(self._describe(f"{target} raised"))
            if all(a is not None for a in answers):
                return [a["result"] for a in answers if a is not None]
            for rank, process in enumerate(self._processes):
                if answers[rank] is None and process.poll() is not None and self._answer(rank) is None:
                    raise RankFailure(self._describe(f"{target}: rank {rank} ended with code {process.returncode}"))
            if time.monotonic() > deadline:
                self._dump_stacks()
                raise RankFailure(self._describe(f"{target} did not end within {deadline - started:.0f} s"))
            time.sleep(0.02)

    def _answer(self, rank: int) -> dict[str, Any] | None:
        import torch

        path = self._path(f"case-{self._case}.rank-{rank}.pt")
        return torch.load(path, weights_only=False) if path.exists() else None

    def _dump_stacks(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(GRACE_S)

    def _describe(self, headline: str) -> str:
        parts = [headline]
        for rank in range(self.world):
            answer = self._answer(rank)
            if answer is None:
                parts.append(f"--- rank {rank}: no answer; end of its log:\n{_tail(self._path(f'log-{rank}.txt'))}")
            elif "traceback" in answer:
                parts.append(f"--- rank {rank} raised:\n{answer['traceback']}")
            else:
                parts.append(f"--- rank {rank} ended well")
        return "\n".join(parts)


def run_ranks(target: str, world: int = 2, timeout: float = DEFAULT_TIMEOUT_S, **kwargs: Any) -> list[Any]:
    """Calls `target` ("module:function") with `kwargs` on `world` fresh processes; results in rank order."""
    with RankPool(world) as pool:
        return pool.run(target, timeout=timeout, **kwargs)


def run_cases(
    cases: Sequence[tuple[str, dict[str, Any]]], world: int = 2, timeout: float = DEFAULT_TIMEOUT_S
) -> list[CaseOutcome]:
    """Runs (target, kwargs) cases one after another in the same processes, `timeout` seconds each."""
    outcomes = []
    with RankPool(world) as pool:
        for target, kwargs in cases:
            try:
                outcomes.append(CaseOutcome(pool.run(target, timeout=timeout, **kwargs)))
            except RankFailure as failure:
                outcomes.append(CaseOutcome(failure=failure))
    return outcomes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(path: Path, characters: int = 12_000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else "(no log)"


# ---------------------------------------------------------------------------------------------- inside a rank


def _serve(folder: Path) -> None:
    """Runs the cases whose numbers arrive on stdin, until it is closed or a case raises."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(
        dist_backend=os.environ.get("RANKS_BACKEND", "gloo"),
        auto_mpi_discovery="RANK" not in os.environ,  # tests/mpi.py
        distributed_port=int(os.environ["MASTER_PORT"]),
        verbose=False,
    )
    rank = torch.distributed.get_rank()
    (folder / f"ready-{rank}").touch()
    for line in sys.stdin:
        name = f"case-{int(line)}"
        target, kwargs = pickle.loads((folder / f"{name}.pickle").read_bytes())
        with _clean_process():
            answer = _call(target, kwargs)
        unfinished = folder / f"{name}.rank-{rank}.tmp"
        torch.save(answer, unfinished)
        unfinished.rename(folder / f"{name}.rank-{rank}.pt")
        if "traceback" in answer:
            break


def _call(target: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    try:
        module, function = target.split(":")
        return {"result": getattr(importlib.import_module(module), function)(**kwargs)}
    except BaseException:  # whatever it was, the parent shows it
        return {"traceback": traceback.format_exc()}


@contextlib.contextmanager
def _clean_process() -> Iterator[None]:
    """Puts back what an engine leaves in the process: ZeRO-3 replaces `torch.nn.functional.linear` for good."""
    import torch

    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        gc.collect()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
