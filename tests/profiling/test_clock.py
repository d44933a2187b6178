"""Clocks: spans arrive once, in order, and nothing waits for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hilore.profiling import clock as module
from ds_hilore.profiling.clock import EventClock, WallClock, clock_for


def test_wall_clock_tells_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))
    clock, seen = clock_for(torch.device("cpu")), []
    assert isinstance(clock, WallClock)
    clock.stop(clock.start(), seen.append)
    assert seen == [2.5]
    clock.collect()
    assert seen == [2.5]


class Device:
    """A device that runs behind: events are recorded in order, and over once `passed` has reached them."""

    def __init__(self) -> None:
        self.recorded = 0
        self.passed = 0
        self.waits = 0

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802  (torch's name)
        assert enable_timing
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = 0

    def record(self) -> None:
        self.device.recorded += 1
        self.place = self.device.recorded

    def query(self) -> bool:
        return self.device.passed >= self.place

    def elapsed_time(self, end: DeviceEvent) -> float:
        if not (self.query() and end.query()):
            self.device.waits += 1
        return 1000.0 * (end.place - self.place)

    def synchronize(self) -> None:
        self.device.waits += 1


def test_event_clock_reads_what_the_device_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, EventClock)
    seen: list[tuple[str, float]] = []
    outer = clock.start()  # event 1
    inner = clock.start()  # event 2
    clock.stop(inner, lambda seconds: seen.append(("inner", seconds)))  # event 3
    clock.stop(outer, lambda seconds: seen.append(("outer", seconds)))  # event 4
    clock.collect()
    assert seen == []
    device.passed = 3
    clock.collect()
    assert seen == [("inner", 1.0)]
    device.passed = 4
    clock.collect()
    clock.collect()
    assert seen == [("inner", 1.0), ("outer", 3.0)]
    assert device.waits == 0
