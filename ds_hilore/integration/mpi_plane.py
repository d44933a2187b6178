"""The control plane on MPI, for jobs that were started by mpirun or an MPI-aware scheduler.

MPI's own collectives wait for ever, and MPI_Finalize waits for all ranks. So here every request is non-blocking and
polled against the time limit; a rank that gives up tells all others by a message, and ends the job when its process
ends while a request is still open.

# NOTE [MPI plane]
# M1: all messages travel on a communicator of our own, duplicated from COMM_WORLD; torch's training never uses MPI.
# M2: a collective that was given up cannot be taken back, and a late rank may complete it by itself. So a late rank
#     looks for word that others gave up before it believes an answer.
# M3: the buffers of an open request belong to MPI until it is complete: they are kept, for good if need be.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch.distributed as dist

from ds_hilore.core import deps
from ds_hilore.integration.messages import BLAME_WAIT_S, MessagePlane, ranks_text

#: What a launcher of MPI processes sets: Open MPI; MPICH, Intel MPI and `srun --mpi=pmi2`; MVAPICH; `srun --mpi=pmix`.
MARKERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMIX_RANK")

# Tag of the message "I have given up", and its size.
_GAVE_UP = 1
_WORD_BYTES = 128

# Waiting for a request: first without sleeping, since ranks in step answer within microseconds.
_EAGER_POLLS = 20
_POLL_S = 5e-5


class MpiUse(Enum):
    """Whether a rank can use MPI, as words for the log."""

    POSSIBLE = "MPI can be used"
    NOT_STARTED = "not started under MPI"
    NO_MPI4PY = "mpi4py is not installed (pip install 'ds_hilore[mpi]')"
    NO_LIBRARY = "mpi4py finds no MPI library"
    OTHER_RANKS = "MPI's ranks are not those of the job"


def mpi_use(rank: int, world_size: int) -> MpiUse:
    """Whether this process, rank `rank` of `world_size` in torch.distributed, can use MPI.

    Imports mpi4py, which initialises MPI, only in a process that an MPI launcher started: elsewhere that may abort it.
    """
    if not any(marker in os.environ for marker in MARKERS) and not _is_initialised():
        return MpiUse.NOT_STARTED
    if not deps.has("mpi4py"):
        return MpiUse.NO_MPI4PY
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # a RuntimeError where the wheel finds no library to load
        return MpiUse.NO_LIBRARY
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return MpiUse.OTHER_RANKS
    same = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()) == (rank, world_size)
    return MpiUse.POSSIBLE if same else MpiUse.OTHER_RANKS


def _is_initialised() -> bool:
    """Whether this process has joined an MPI job of several ranks already, by whatever launcher."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized()) and module.COMM_WORLD.Get_size() > 1


class MpiControlPlane(MessagePlane):
    """Control plane of all ranks of COMM_WORLD, which are those of torch.distributed (`mpi_use`).

    All ranks make it, and ask, in step.

    Args:
        time_limit_s: seconds after which a rank that does not answer is given up.

    Raises:
        RankMismatch: not all ranks made the plane within the time limit.
    """

    def __init__(self, time_limit_s: float) -> None:
        from mpi4py import MPI

        super().__init__(dist.get_rank(), dist.get_world_size(), time_limit_s)
        self._mpi = MPI
        self._comm: Any = None
        self._open: list[tuple[Any, ...]] = []  # requests that were given up, with their buffers (M3)
        self._words: dict[int, str] = {}  # rank -> what it gave up
        with self._giving_up("making the control plane"):
            comm, request = MPI.COMM_WORLD.Idup()
            self._wait(request, comm)
            self._comm = comm
            comm.Set_errhandler(MPI.ERRORS_RETURN)

    # -- the channel -----------------------------------------------------------------------------------------------

    def _gather(self, content: bytes, size: int) -> list[bytes]:
        mine = bytearray(content.ljust(size, b"\0"))
        everyones = bytearray(size * self.world_size)
        byte = self._mpi.BYTE
        self._wait(self._comm.Iallgather([mine, byte], [everyones, byte]), mine, everyones)
        return [bytes(everyones[size * rank : size * (rank + 1)]) for rank in range(self.world_size)]

    def _find_node(self) -> tuple[int, ...]:
        self.exchange("node", None)  # MPI can only split while it waits: all ranks must be here
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        group = node.Get_group()
        ranks = self._mpi.Group.Translate_ranks(group, list(range(group.Get_size())), self._comm.Get_group())
        node.Free()
        return tuple(sorted(int(rank) for rank in ranks))

    def _shut(self, failed: bool) -> None:
        comm, self._comm = self._comm, None
        if comm is not None and not failed and not self._mpi.Is_finalized():
            comm.Free()

    # -- waiting and giving up -------------------------------------------------------------------------------------

    def _wait(self, request: Any, *buffers: Any) -> None:
        """Polls until the request is complete on this rank and no rank has given up (M2).

        Raises:
            RuntimeError: the time limit is over, or another rank has given up.
        """
        if not self._poll(lambda: self._hear_words() or request.Test(), self.time_limit_s):
            self._keep_open(request, *buffers)
            raise RuntimeError("no answer")
        if self._words:
            self._keep_open(request, *buffers)
            gone = ", ".join(f"rank {rank} has given up {what}" for rank, what in sorted(self._words.items()))
            raise RuntimeError(f"{gone}; it waited for as long as it may")

    @staticmethod
    def _poll(done: Callable[[], bool], limit_s: float) -> bool:
        """Whether `done` came true within the limit."""
        end_s = time.monotonic() + limit_s
        polls = 0
        while not done():
            if time.monotonic() > end_s:
                return False
            polls += 1
            if polls > _EAGER_POLLS:
                time.sleep(_POLL_S)
        return True

    def _hear_words(self) -> bool:
        """Takes in messages of ranks that have given up. Whether there was any, now or before."""
        while self._comm is not None and self._comm.Iprobe(tag=_GAVE_UP, status=(status := self._mpi.Status())):
            word = bytearray(_WORD_BYTES)
            self._comm.Recv([word, self._mpi.BYTE], source=status.Get_source(), tag=_GAVE_UP)
            self._words[status.Get_source()] = word.rstrip(b"\0").decode(errors="replace")
        return bool(self._words)

    def _silent_ranks(self) -> list[int]:
        if self._comm is None:  # the plane was being made
            return []
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        word = f"exchange {self._sequence}".encode()[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")
        for rank in others:
            self._keep_open(self._comm.Isend([word, self._mpi.BYTE], dest=rank, tag=_GAVE_UP), word)

        def all_told() -> bool:
            self._hear_words()
            return self._words.keys() >= set(others)

        self._poll(all_told, BLAME_WAIT_S)
        return [rank for rank in others if rank not in self._words]

    def _keep_open(self, *request_and_buffers: Any) -> None:
        if not self._open:
            atexit.register(self._end_broken_job)
        self._open.append(request_and_buffers)

    def _end_broken_job(self) -> None:
        """At the end of the process: MPI_Finalize would wait for the rank that never came."""
        if self._mpi.Is_finalized():
            return
        if self._poll(lambda: all(request.Test() for request, *_ in self._open), BLAME_WAIT_S):
            return
        sys.stdout.flush()
        sys.stderr.write(
            f"hilore: rank {self.rank} ends the MPI job: {self._failure}. MPI would wait for ever for "
            f"{ranks_text([r for r in range(self.world_size) if r != self.rank and r not in self._words])}\n"
        )
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(1)
