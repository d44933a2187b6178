"""Allocation failures where a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.recovery.unit import inside_unit


def failure(asked: int) -> RuntimeError:
    """What torch raises on CPU."""
    return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {asked} bytes.")


@dataclass
class Shortage:
    """Lets the next `times` calls fail that come in a backward; `asked` bytes each. `failed` counts them."""

    times: int = 1
    asked: int = 1
    failed: int = 0
    error: Callable[[int], BaseException] = failure

    def strike(self) -> None:
        if self.times > 0:
            self.times -= 1
            self.failed += 1
            raise self.error(self.asked)

    @contextmanager
    def in_replays_of(self, module: nn.Module) -> Iterator[Shortage]:
        """Inside, replays fail when they get to `module`, which has worked by then."""

        def after(_module: nn.Module, _args: Any, _output: Tensor) -> None:
            if inside_unit() and torch._C._current_graph_task_id() >= 0:
                self.strike()

        handle = module.register_forward_hook(after)
        try:
            yield self
        finally:
            handle.remove()
