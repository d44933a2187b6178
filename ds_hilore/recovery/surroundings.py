"""The surroundings of a replay: random number and autocast state as they were in the forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AutocastState:
    """Autocast of one device type as it was when the unit ran."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def restore(self) -> torch.autocast:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


class RngTracker(Protocol):
    """What Megatron's and DeepSpeed's model-parallel random state trackers have in common."""

    def get_states(self) -> Any: ...

    def set_states(self, states: Any) -> None: ...


class Surroundings:
    """RNG streams and autocast state at the start of a unit's forward; entered again around its replay.

    RNG: the CPU generator, the generator of the unit's device, and Megatron's model-parallel tracker where
    `deepspeed.checkpointing` holds one (handed in as `tracker`, see integration/checkpoint.py).
    """

    __slots__ = ("autocast", "cpu_rng", "device", "device_rng", "tracker", "tracker_states")

    def __init__(self, device: torch.device, tracker: RngTracker | None = None) -> None:
        self.device = device
        self.cpu_rng = torch.get_rng_state()
        module = _device_module(device)
        self.device_rng: Tensor | None = None if module is None else module.get_rng_state(device)
        self.tracker = tracker
        self.tracker_states = None if tracker is None else tracker.get_states()
        self.autocast = [AutocastState.current("cpu")]
        if module is not None:
            self.autocast.append(AutocastState.current(device.type))

    def undisturbed(self) -> bool:
        """Whether nobody has drawn random numbers since."""
        module = _device_module(self.device)
        if not torch.equal(self.cpu_rng, torch.get_rng_state()):
            return False
        return self.device_rng is None or torch.equal(self.device_rng, module.get_rng_state(self.device))

    def rewind(self) -> None:
        """Puts the random streams back to where they were."""
        torch.set_rng_state(self.cpu_rng)
        module = _device_module(self.device)
        if module is not None:
            module.set_rng_state(self.device_rng, self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As they were in forward; afterwards the streams go on as if no replay had been."""
        module = _device_module(self.device)
        cpu_now = torch.get_rng_state()
        device_now = None if module is None else module.get_rng_state(self.device)
        tracker_now = None if self.tracker is None else self.tracker.get_states()
        try:
            torch.set_rng_state(self.cpu_rng)
            if module is not None:
                module.set_rng_state(self.device_rng, self.device)
            if self.tracker is not None:
                self.tracker.set_states(copy.copy(self.tracker_states))  # it goes on in what it is given
            with ExitStack() as stack:
                for state in self.autocast:
                    stack.enter_context(state.restore())
                yield
        finally:
            torch.set_rng_state(cpu_now)
            if module is not None:
                module.set_rng_state(device_now, self.device)
            if self.tracker is not None:
                self.tracker.set_states(tracker_now)


def _device_module(device: torch.device):  # type: ignore[no-untyped-def]  # torch.cuda, torch.xpu, ...
    """The torch module that owns the device's generator; None for the CPU, whose generator is global."""
    return None if device.type == "cpu" else torch.get_device_module(device)
