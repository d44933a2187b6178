"""Ranks that are started by mpirun, for tests of what runs on MPI. Open MPI and mpi4py; skipped where there is none."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from tests.ranks import ENVIRONMENT, ROOT, RankPool, _free_port

#: Open MPI on one machine: root may start it, ranks may be more than cores and are not bound to any.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl": "self,vader,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


@functools.cache
def why_no_mpi() -> str | None:
    """What is missing for tests that start ranks by mpirun; None where nothing is."""
    if shutil.which("mpirun") is None:
        return "needs Open MPI's mpirun (Debian: apt-get install openmpi-bin)"
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "Open MPI" not in said:
        return "needs Open MPI's mpirun; the one here is another"
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py (pip install mpi4py)"
    return None


def mpi_environment() -> dict[str, str]:
    """Of mpirun: no torch.distributed variables, so that DeepSpeed asks MPI who is who."""
    known = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    env = {**os.environ, **ENVIRONMENT, **MPI_ENVIRONMENT, "MASTER_PORT": str(_free_port())}
    return {key: value for key, value in env.items() if key not in known}


class _Rank:
    """One rank of an mpirun, as `RankPool` looks at a process of its own."""

    def __init__(self, mpirun: subprocess.Popen[str], pid_file: Path, stdin: IO[str]) -> None:
        self._mpirun = mpirun
        self._pid_file = pid_file
        self.stdin = stdin

    @property
    def returncode(self) -> int | None:
        return self._mpirun.returncode

    def poll(self) -> int | None:
        return self._mpirun.poll()  # mpirun ends when any rank dies

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(self._pid_file.read_text()), number)

    def kill(self) -> None:
        self._mpirun.terminate()  # ends the ranks too
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        try:
            return self._mpirun.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
            return self._mpirun.wait()


class MpiRankPool(RankPool):
    """`RankPool` under one mpirun. Ranks read their cases from a named pipe: mpirun has one standard input only."""

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        pipes = []
        for rank in range(self.world):
            os.mkfifo(self._path(f"stdin-{rank}"))
            # Opened for reading too: otherwise this would wait for the rank to open its end.
            pipes.append(os.fdopen(os.open(self._path(f"stdin-{rank}"), os.O_RDWR), "w"))
        folder = self._folder.name
        rank_command = (
            'r=$OMPI_COMM_WORLD_RANK; echo $$ >"$0/pid-$r"; '
            'exec "$1" -m tests.ranks "$0" <"$0/stdin-$r" >"$0/log-$r.txt" 2>&1'
        )
        command = ["mpirun", "-np", str(self.world), "sh", "-c", rank_command, folder, sys.executable]
        with self._path("mpirun.txt").open("w") as log:
            mpirun = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**mpi_environment(), **self._env},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes = [
            _Rank(mpirun, self._path(f"pid-{rank}"), pipe)  # type: ignore[misc]
            for rank, pipe in enumerate(pipes)
        ]
