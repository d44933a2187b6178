"""Seconds of work on the device that runs the units."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Measures spans of work without waiting for the device; results are collected later."""

    def start(self) -> Any: ...

    def stop(self, started: Any, receive: Callable[[float], None]) -> None:
        """Ends a span; `receive` gets its seconds, at once or at a later `collect`."""
        ...

    def collect(self) -> None:
        """Delivers the spans that are over by now."""
        ...


def clock_for(device: torch.device) -> Clock:
    """Wall clock on CPU, events on a device with streams."""
    return WallClock() if device.type == "cpu" else EventClock(device)


class WallClock:
    """On CPU the issuing thread does the work."""

    def start(self) -> float:
        return time.perf_counter()

    def stop(self, started: float, receive: Callable[[float], None]) -> None:
        receive(time.perf_counter() - started)

    def collect(self) -> None:
        return None


class EventClock:
    """Pairs of events on the current stream. Nothing waits: a pair is read once the device has passed it."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._pending: list[tuple[Any, Any, Callable[[float], None]]] = []

    def start(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, started: Any, receive: Callable[[float], None]) -> None:
        self._pending.append((started, self.start(), receive))

    def collect(self) -> None:
        waiting = []
        for started, ended, receive in self._pending:
            if ended.query():
                receive(started.elapsed_time(ended) / 1000.0)
            else:
                waiting.append((started, ended, receive))
        self._pending = waiting
