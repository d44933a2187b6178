"""Devices by the names that people and drivers use."""

from __future__ import annotations

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.profiling.devices import DEVICES, USUAL, device_like, device_named


@pytest.mark.parametrize("name", list(DEVICES))
def test_names_in_any_spelling(name: str) -> None:
    assert device_named(name.lower().replace("-", " ")) is DEVICES[name]
    speed = DEVICES[name].speed
    assert 0 < speed.flops_per_s < DEVICES[name].peak_flops_per_s
    assert 0 < speed.bytes_per_s < DEVICES[name].peak_bytes_per_s


def test_an_unknown_name_lists_the_known() -> None:
    assert USUAL in DEVICES
    with pytest.raises(UsageError, match=r"H200.*--flops"):
        device_named("K80")


@pytest.mark.parametrize(
    ("reported", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 79, "H100"),
        ("NVIDIA H100 PCIe", 79, "H100-PCIe"),
        ("NVIDIA H200", 140, "H200"),
        ("NVIDIA L40S", 45, "L40S"),
        ("NVIDIA L4", 22, "L4"),
        ("NVIDIA A10", 22, "A10"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX-4090"),
        ("Tesla V100-SXM2-32GB", 32, "V100-32GB"),
        ("AMD Instinct MI300X", 192, "MI300X"),
        ("Tesla K80", 12, None),
    ],
)
def test_names_that_drivers_report(reported: str, gib: int, expected: str | None) -> None:
    found = device_like(reported, gib * 2**30)
    assert (found and found.name) == expected
