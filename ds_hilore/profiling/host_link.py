"""What the link to host memory carries, and how often state can be sent over it so that nobody waits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from ds_hilore.recovery.link import Link

#: Bytes of a measured copy: large enough that the rate is that of large copies.
MEASURED_BYTES = 32 << 20
#: Copies of which the fastest counts.
PASSES = 3
#: Share of a stretch of work that a copy may take. The device's own traffic slows copies down, and no two units take
#: exactly as long.
USED = 0.8


@dataclass(frozen=True)
class LinkSpeed:
    """A measured link.

    Args:
        bytes_per_s: the slower of the two ways.
        overlaps: copies run beside the device's work.
        rounding: host bytes that a copy takes at most, for each of its own.
    """

    bytes_per_s: float
    overlaps: bool
    rounding: float = 1.0

    def seconds(self, size: int) -> float:
        """Of one copy, one way."""
        return size / self.bytes_per_s

    def host_bytes(self, size: int) -> int:
        """Host memory for `size` bytes, in however many copies."""
        return math.ceil(size * self.rounding)

    def stride(self, size: int, unit_s: float) -> int:
        """Every how many units one may send `size` bytes, so that each copy is over before the next begins.

        Args:
            unit_s: seconds that the device works on one unit, in the shorter of its two passes.
        """
        if not self.overlaps or size == 0:
            return 1
        if unit_s <= 0:
            return 1 << 30
        return max(1, math.ceil(self.seconds(size) / (unit_s * USED)))

    def exposed_seconds(self, size: int) -> float:
        """What sending and fetching `size` bytes holds the device up, at that stride."""
        return 0.0 if self.overlaps else 2 * self.seconds(size)


def measured(link: Link, device: torch.device, size: int = MEASURED_BYTES) -> LinkSpeed:
    """Copies `size` bytes there and back a few times. Waits for the device; once in a run."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = [math.inf, math.inf]
    for _ in range(PASSES):
        _synchronise(device)
        started = time.perf_counter()
        sent = link.to_host(source)
        sent.wait()
        _synchronise(device)
        there = time.perf_counter()
        link.to_device(sent).wait()
        _synchronise(device)
        seconds = [min(seconds[0], there - started), min(seconds[1], time.perf_counter() - there)]
    # a size just above a power of two is what rounding to powers of two is worst for
    return LinkSpeed(size / max(*seconds, 1e-9), link.overlaps, link.host_bytes(size + 1) / size)


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
