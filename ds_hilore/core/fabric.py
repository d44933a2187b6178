"""What the ranks of one job tell each other beside training: the interface of the control plane.

The implementations live in integration/control_plane.py and mpi_plane.py. Never the training communicator: a rank that
is late on it would stall the collectives of ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from ds_hilore.core.errors import RankMismatch, UsageError

#: What to do where ranks differ from the start.
SAME_START = "start every rank with the same configuration, model and package versions"


class ControlPlane(Protocol):
    """A small, slow, dependable channel between all ranks of a job."""

    rank: int
    world_size: int

    def exchange(self, what: str, payload: Any) -> list[Any]:
        """Gives every rank's `payload` (JSON-able) in rank order. `what` names the question in errors.

        Raises:
            RankMismatch: a rank did not answer within the time limit, or is at another question.
        """
        ...

    def agree(self, what: str, payload: Any, remedy: str = SAME_START) -> None:
        """Checks that `payload` (a dict of JSON-able values) is the same on every rank.

        Raises:
            RankMismatch: on every rank, naming the key, the values and the ranks that hold them, and `remedy`.
        """
        ...

    def update_restarts(self) -> None:
        """This rank's update was given up and starts again. Ranks that wait for it elsewhere are told at its next
        question: each raises RankMismatch there, whatever it asked, and counts as restarted too. Not a collective."""
        ...

    def node_ranks(self) -> tuple[int, ...]:
        """Ranks on this rank's node, itself included, in order: those that share its host memory.

        An exchange of all ranks at the first call.
        """
        ...

    def close(self) -> None: ...


def sum_over_ranks(plane: ControlPlane, what: str, values: Sequence[float]) -> list[float]:
    """Element by element, the sum of every rank's `values`. The same bits on every rank. An exchange of all ranks.

    Raises:
        RankMismatch: see `ControlPlane.exchange`; or ranks gave lists of different lengths.
    """
    given = plane.exchange(what, [float(value) for value in values])
    lengths = [len(each) for each in given]
    if len(set(lengths)) > 1:
        raise RankMismatch(f"{what!r}: ranks gave {lengths} values to add up; give the same number on every rank")
    return [math.fsum(column) for column in zip(*given, strict=True)]


def share_of_node(node_bytes: int, node_ranks: Sequence[int], rank: int) -> int:
    """This rank's part of a budget that its node's ranks share evenly. All parts add up to `node_bytes`.

    Args:
        node_bytes: host memory that all ranks of the node may use together.
        node_ranks: `ControlPlane.node_ranks` of this rank.
        rank: this rank.

    Raises:
        UsageError: a budget below 0, or `rank` is not on the node.
    """
    if node_bytes < 0 or rank not in node_ranks:
        raise UsageError(f"no share of {node_bytes} bytes for rank {rank} on a node with ranks {list(node_ranks)}")
    even, rest = divmod(node_bytes, len(node_ranks))
    return even + (1 if sorted(node_ranks).index(rank) < rest else 0)
