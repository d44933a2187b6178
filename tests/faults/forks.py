"""Ranks that are forked by a server which has done their imports: a new pair of them is there in a second.

Starting a rank takes ten seconds of imports and more; faults that end ranks, or hang them, would cost that each time.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.ranks import ENVIRONMENT, RankPool, _free_port, _serve

#: What the server imports, once for all ranks of this process.
PRELOADED = ["deepspeed", "transformers.models.llama.modeling_llama", "peft", "tests.faults.preloaded"]


def server() -> ForkServerContext:
    """The context whose processes come from the server; it starts with the first of them."""
    os.environ.update(ENVIRONMENT)  # the server has this process's variables as they are when it starts
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def become_rank(rank: int, world: int, port: int, log: Path) -> None:
    """What a started process has from its environment and its shell."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)


class ForkedPool(RankPool):
    """`RankPool` whose ranks are forked."""

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder, port, context = Path(self._folder.name), _free_port(), server()
        for rank in range(self.world):
            commands, ours = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, self.world, port, folder, commands), daemon=True)
            process.start()
            commands.close()
            self._processes.append(_Forked(process, ours))  # type: ignore[arg-type]


class _Forked:
    """What a pool asks of a `subprocess.Popen`."""

    def __init__(self, process: BaseProcess, commands: Connection) -> None:
        self._process = process
        self._commands = commands
        self.stdin = self

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None:
            os.kill(self._process.pid, number)

    def write(self, text: str) -> None:
        self._commands.send(text)

    def flush(self) -> None:
        return None

    def close(self) -> None:
        self._commands.close()


class _Commands:
    """The lines that a pool sends, in the place of `sys.stdin`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __iter__(self) -> _Commands:
        return self

    def __next__(self) -> str:
        try:
            line: str = self._pipe.recv()
        except EOFError:
            raise StopIteration from None
        return line


def _rank(rank: int, world: int, port: int, folder: Path, commands: Connection) -> None:
    become_rank(rank, world, port, folder / f"log-{rank}.txt")
    sys.stdin = _Commands(commands)  # type: ignore[assignment]
    _serve(folder)
    os._exit(0)
