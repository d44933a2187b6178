"""Spans on a device are measured by events, and nothing waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hilore.profiling.clock import EventClock, WallClock, clock_for


class FakeEvent:
    """An event that the device passes when `now` reaches it. Waiting for it is an error."""

    now = 0.0
    issued = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = float("inf")

    def record(self) -> None:
        self.at = FakeEvent.issued

    def query(self) -> bool:
        return FakeEvent.now >= self.at

    def elapsed_time(self, ended: FakeEvent) -> float:
        assert self.query() and ended.query(), "the span is not over"
        return ended.at - self.at

    def synchronize(self) -> None:
        raise AssertionError("the clock must not wait")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> EventClock:
    def synchronize(*_: Any) -> None:
        raise AssertionError("the clock must not wait")

    module = SimpleNamespace(Event=FakeEvent, synchronize=synchronize)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    FakeEvent.now = FakeEvent.issued = 0.0
    return EventClock(torch.device("cuda"))


def test_a_span_is_told_once_the_device_has_passed_it(fake: EventClock) -> None:
    told: list[tuple[str, float]] = []
    for name, length in (("first", 1000.0), ("second", 500.0)):
        started = fake.start()
        FakeEvent.issued += length
        fake.stop(started, lambda seconds, name=name: told.append((name, seconds)))  # type: ignore[misc]
    fake.collect()
    assert told == []
    FakeEvent.now = 1200.0
    fake.collect()
    assert told == [("first", 1.0)]
    FakeEvent.now = 2000.0
    fake.collect()
    fake.collect()
    assert told == [("first", 1.0), ("second", 0.5)]


def test_each_device_has_its_clock(device: torch.device) -> None:
    assert isinstance(clock_for(device), EventClock if device.type == "cuda" else WallClock)


def test_real_work_takes_time_and_is_told(device: torch.device) -> None:
    clock = clock_for(device)
    told: list[float] = []
    x = torch.randn(256, 256, device=device)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        started = clock.start()
        for _ in range(20):
            x = x @ x / 16
        clock.stop(started, told.append)
        clock.collect()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    if device.type == "cuda":
        torch.cuda.synchronize()
        clock.collect()
    assert len(told) == 1 and told[0] > 0
