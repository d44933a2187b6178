"""Devices by name: memory, and the speed that their makers state, for plans without a run.

Datasheet values: dense matrix products in bfloat16 (float16 where the device has no bfloat16), and memory bandwidth.
What is reached in practice is a share of both; plans depend on the ratio of the two more than on either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ds_hilore.core.errors import UsageError
from ds_hilore.profiling.cost_model import DeviceSpeed

#: Shares of the datasheet's numbers that training kernels are taken to reach.
ATTAINED_FLOPS = 0.5
ATTAINED_BANDWIDTH = 0.8


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak_flops_per_s`, `peak_bytes_per_s`: as its maker states them."""

    name: str
    memory_bytes: int
    peak_flops_per_s: float
    peak_bytes_per_s: float

    @property
    def speed(self) -> DeviceSpeed:
        """What it is taken to reach."""
        return DeviceSpeed(self.peak_flops_per_s * ATTAINED_FLOPS, self.peak_bytes_per_s * ATTAINED_BANDWIDTH)


def _device(name: str, memory_gb: int, tflops: float, gbytes_per_s: float) -> Device:
    return Device(name, memory_gb * 2**30, tflops * 1e12, gbytes_per_s * 1e9)


#: By the name that the command line takes.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _device("V100-32GB", 32, 125, 900),
            _device("A10", 24, 125, 600),
            _device("A100-40GB", 40, 312, 1555),
            _device("A100-80GB", 80, 312, 2039),
            _device("L4", 24, 121, 300),
            _device("L40S", 48, 362, 864),
            _device("RTX-3090", 24, 71, 936),
            _device("RTX-4090", 24, 165, 1008),
            _device("H100-PCIe", 80, 756, 2000),
            _device("H100", 80, 989, 3350),
            _device("H200", 141, 989, 4800),
            _device("B200", 180, 2250, 7700),
            _device("MI300X", 192, 1307, 5300),
        )
    }
)
#: Taken where none is named and none is here.
USUAL = "A100-80GB"


def device_named(name: str) -> Device:
    """The device of a name, whatever its case and punctuation.

    Raises:
        UsageError: it is not known; names those that are, and the options that describe any other.
    """
    wanted = _plain(name)
    for device in DEVICES.values():
        if _plain(device.name) == wanted:
            return device
    raise UsageError(
        f"device {name!r} is not known; known: {', '.join(DEVICES)}. Describe another with its memory and the speed "
        "it reaches (--device-gb, --flops, --bandwidth)"
    )


def device_like(reported: str, memory_bytes: int) -> Device | None:
    """The device that a driver reports under a name such as "NVIDIA A100-SXM4-80GB"; the longest name that fits, and
    of equally long ones that with the nearest memory. None if no name fits."""
    words = _plain(reported)
    fitting = [d for d in DEVICES.values() if all(_plain(word) in words for word in _model_words(d.name))]
    if not fitting:
        return None
    longest = max(len(_model_words(d.name)) * 100 + len(_model_words(d.name)[0]) for d in fitting)
    best = [d for d in fitting if len(_model_words(d.name)) * 100 + len(_model_words(d.name)[0]) == longest]
    return min(best, key=lambda d: abs(d.memory_bytes - memory_bytes))


def _model_words(name: str) -> list[str]:
    """Words of a name, its memory aside: drivers write that in their own ways."""
    return [word for word in name.split("-") if not re.fullmatch(r"\d+GB", word)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
