"""What the ranks of one job tell each other beside training: the interface of the control plane.

The implementations live in integration/control_plane.py. Never the training communicator: a rank that is late on it
would stall the collectives of ZeRO.
"""

from __future__ import annotations

from typing import Any, Protocol


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

    def agree(self, what: str, payload: Any) -> None:
        """Checks that `payload` (a dict of JSON-able values) is the same on every rank.

        Raises:
            RankMismatch: on every rank, naming the key, the values and the ranks that hold them.
        """
        ...

    def close(self) -> None: ...
