"""Physical memory of one rank: the level now and the peak since the last reset. Integers, in bytes.

On CPU these are the kernel's figures for the process (VmRSS, and VmHWM reset by /proc/self/clear_refs), floor of the
interpreter and its libraries included; they mean something only inside `glibc.tight_malloc()` (design fact 20). On CUDA
they are the figures of torch's caching allocator. Nothing here waits for the device.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.memory.glibc import started_tight, trim
from ds_hilore.memory.host import PROC, HostMemory

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Pages of a CPU process that come and go between equal updates: the interpreter's, and those of small allocations.
WANDER_BYTES = 3 << 20
_RESET_PEAK = "5"  # what clear_refs wants in order to set VmHWM back to VmRSS (Linux, proc(5))


class PeakMeter(ABC):
    """Level and peak of what this process holds on one device. `peak_meter` makes the right one.

    `exact`: peaks count what is in use, not what the allocator keeps, in the ordinary course of a run.
    `wander_bytes`: by how much peaks of one and the same work differ.
    """

    exact: bool = True
    wander_bytes: int = 0

    @abstractmethod
    def reset(self) -> None:
        """Starts a new peak at the present level."""

    def settle(self) -> None:  # noqa: B027  (most allocators' figures need nothing)
        """Takes out of the level what is free but still resident, where the level counts that."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Highest level since the last reset."""

    @abstractmethod
    def level_bytes(self) -> int:
        """What is held now."""

    def quick_level_bytes(self) -> int:
        """What is held now, read fast enough for the hot path; may be off by `wander_bytes`."""
        return self.level_bytes()

    def free_bytes(self) -> int | None:
        """How much this process can still take: what the device has free, and what its allocator keeps. None: nobody
        knows."""
        return None

    def ceiling_bytes(self, peak_bytes: int) -> int:
        """How high peaks of this process may come, as things are: others keep what they hold.

        Args:
            peak_bytes: the highest so far.
        """
        return self.device_bytes()

    @abstractmethod
    def reserved_bytes(self) -> int:
        """What is held now plus what the allocator keeps for later: what others on the device cannot have."""

    @abstractmethod
    def device_bytes(self) -> int:
        """Memory of the whole device. Ranks of one machine share it on CPU."""


def peak_meter(device: torch.device | str, sharers: int = 1) -> PeakMeter:
    """Makes the meter of a device.

    Args:
        sharers: processes of the job on this machine, among which its free main memory is divided.

    Raises:
        UnsupportedError: the device, or this system, has no figures to read.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return CpuMeter(sharers=sharers)
    raise UnsupportedError(f"no memory figures are known for a {device.type} device; supported: cpu, cuda")


class CpuMeter(PeakMeter):
    """Resident memory of this process, by the kernel.

    Args:
        proc: where the proc file system is mounted.
        sharers: processes that free memory is divided among.

    Raises:
        UnsupportedError: there is no proc file system, or it does not let the peak be reset.
    """

    def __init__(self, proc: Path = PROC, sharers: int = 1) -> None:
        self._proc = proc
        self._host = HostMemory(proc)
        self._sharers = sharers
        self.wander_bytes = WANDER_BYTES
        self.exact = started_tight()
        self.peak_bytes()
        self.reset()

    def reset(self) -> None:
        try:
            (self._proc / "self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        except OSError as error:
            raise self._refusal("self/clear_refs", error) from None

    def settle(self) -> None:
        """Free pages between small allocations stay resident; the next microbatch takes the same ones again."""
        if self.exact:
            trim()

    def peak_bytes(self) -> int:
        return self._status_bytes("VmHWM")

    def level_bytes(self) -> int:
        return self._status_bytes("VmRSS")

    def quick_level_bytes(self) -> int:
        # a fifth of the time that the text of `status` takes
        with (self._proc / "self/statm").open("rb", buffering=0) as statm:
            return int(statm.read(256).split()[1]) * _PAGE_BYTES

    def free_bytes(self) -> int:
        """This process's share of what the machine, or its control group, has left."""
        return self._host.available_bytes() // self._sharers

    def ceiling_bytes(self, peak_bytes: int) -> int:
        return self.level_bytes() + self.free_bytes()

    def reserved_bytes(self) -> int:
        return self.level_bytes()

    def device_bytes(self) -> int:
        """Memory of the machine, or of the control group where that is less."""
        return self._host.total_bytes()

    def _status_bytes(self, field: str) -> int:
        path = self._proc / "self/status"
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise self._refusal(str(path.relative_to(self._proc)), error) from None
        for line in text.splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise UnsupportedError(
            f"{path} has no {field}, so memory on CPU cannot be measured; use a Linux kernel's /proc"
        )

    def _refusal(self, name: str, error: OSError) -> UnsupportedError:
        return UnsupportedError(
            f"memory on CPU cannot be measured: {self._proc / name}: {error.strerror}; "
            "it needs Linux with /proc mounted and writable for the process itself"
        )


class CudaMeter(PeakMeter):
    """torch's caching allocator on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(f"{device} has no memory figures: this torch sees no CUDA device")
        self._device = device
        self.reset()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def level_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_reserved_bytes(self) -> int:
        """Highest reserved level since the last reset: what the device itself had to give."""
        return torch.cuda.max_memory_reserved(self._device)

    def others_bytes(self) -> int:
        """What other processes, and the CUDA context itself, hold on the device now."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - self.reserved_bytes()

    def quick_level_bytes(self) -> int:
        # a counter of the host's; `memory_allocated` would sort and flatten all others as well
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def free_bytes(self) -> int:
        """What the device has free, and what the allocator keeps of what was freed. Asks the driver: once a microbatch,
        not once a unit."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + self.reserved_bytes() - self.level_bytes()

    def ceiling_bytes(self, peak_bytes: int) -> int:
        """The device without what others hold, and without what the allocator keeps beyond all that was ever used."""
        unused = max(0, self.reserved_bytes() - peak_bytes)
        return self.device_bytes() - self.others_bytes() - unused

    def device_bytes(self) -> int:
        total: int = torch.cuda.get_device_properties(self._device).total_memory
        return total
