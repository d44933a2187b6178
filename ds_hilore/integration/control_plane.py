"""Control planes: which one a job gets, the one on a gloo group, and the one of a single rank. On MPI: mpi_plane.py.

The rules that all of them keep are NOTE [Control plane] in messages.py.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_hilore.core.fabric import SAME_START, ControlPlane
from ds_hilore.integration.messages import BLAME_WAIT_S, MessagePlane, ranks_text, to_json
from ds_hilore.integration.mpi_plane import MpiControlPlane, MpiUse, mpi_use

_log = logging.getLogger(__name__)

TIME_LIMIT_S = 60.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def control_plane(time_limit_s: float = TIME_LIMIT_S) -> ControlPlane:
    """Makes the control plane of this job: on MPI where every rank can use it, else on gloo. All ranks call together.

    Args:
        time_limit_s: seconds after which a rank that does not answer is given up.

    Raises:
        RankMismatch: a rank did not take part in time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleRankPlane()
    gloo = GlooControlPlane(time_limit_s)
    try:
        uses = [MpiUse(use) for use in gloo.exchange("channel", mpi_use(gloo.rank, gloo.world_size).value)]
        if any(use is not MpiUse.POSSIBLE for use in uses):
            _say_why_gloo(gloo.rank, tuple(uses))
            return gloo
        mpi = MpiControlPlane(time_limit_s)
    except BaseException:
        gloo.close()
        raise
    gloo.close()
    return mpi


@functools.cache  # said once, however many engines a process makes
def _say_why_gloo(rank: int, uses: tuple[MpiUse, ...]) -> None:
    if rank != 0 or all(use is MpiUse.NOT_STARTED for use in uses):
        return
    reasons = {use: [rank for rank, other in enumerate(uses) if other is use] for use in MpiUse}
    listed = "; ".join(
        f"{ranks_text(ranks)}: {use.value}" for use, ranks in reasons.items() if ranks and use is not MpiUse.POSSIBLE
    )
    _log.warning("hilore: started under MPI, and the control plane runs on gloo all the same. %s", listed)


class SingleRankPlane:
    """Control plane of a job of one rank: agrees with itself."""

    rank = 0
    world_size = 1

    def exchange(self, what: str, payload: Any) -> list[Any]:
        return [json.loads(to_json(what, payload))]

    def agree(self, what: str, payload: Any, remedy: str = SAME_START) -> None:
        to_json(what, payload)  # a payload that only one rank could send is a bug on one rank too

    def node_ranks(self) -> tuple[int, ...]:
        return (0,)

    def update_restarts(self) -> None:
        return None

    def close(self) -> None:
        return None


class GlooControlPlane(MessagePlane):
    """Control plane of all ranks of an initialised torch.distributed job. All ranks make it, and ask, in step.

    Args:
        time_limit_s: seconds after which a rank that does not answer is given up.

    Raises:
        RankMismatch: not all ranks made the plane within the time limit.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), time_limit_s)
        self._group: dist.ProcessGroup | None = None
        with self._giving_up("making the control plane"):
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=time_limit_s))

    def _gather(self, content: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        everyones = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(everyones, mine, group=self._group)
        return [tensor.numpy().tobytes() for tensor in everyones]

    def _find_node(self) -> tuple[int, ...]:
        # Names repeat ("localhost"): the kernel's boot id tells such nodes apart.
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        nodes = self.exchange("node", [socket.gethostname(), boot_id])
        return tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.rank])

    def _shut(self, failed: bool) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _silent_ranks(self) -> list[int]:
        # The job's store outlives the group. It is gone where its host, usually rank 0, is.
        group = self._group.group_name if self._group is not None else "new"  # equal on all ranks
        silent = [other for other in range(self.world_size) if other != self.rank]
        try:
            c10d = dist.distributed_c10d
            exchange = f"ds_hilore/control_plane/{group}/{self._sequence}"
            store = c10d.PrefixStore(exchange, c10d._get_default_store())
            store.set(str(self.rank), "gave up")
            end_s = time.monotonic() + BLAME_WAIT_S
            while silent and time.monotonic() < end_s:
                silent = [other for other in silent if not store.check([str(other)])]
                time.sleep(BLAME_WAIT_S / 20)
        except (RuntimeError, ValueError):
            return []
        return silent
