"""What DeepSpeed and its caller put on a gradient on top of omega (design section 5, "Scale").

The caller multiplies the loss by data-parallel ranks and accumulation steps (by the ranks alone where it passes
`scale_wrt_gas=False`). DeepSpeed takes the accumulation steps out again, where depends on entry point and version:

    engine.backward, 0.19   at the loss: nothing of it is left anywhere behind
    engine.backward, 0.18   at the engine's outputs, whatever `scale_wrt_gas` says
    loss.backward           at the engine's outputs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_hilore.runtime.update import GradientScale


class EngineScale:
    """Tells the scale of gradients in the backward that is running. One per engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._by_accumulation = True

    @contextmanager
    def backward(self, scale_wrt_gas: bool) -> Iterator[None]:
        """`engine.backward` runs inside."""
        before, self._by_accumulation = self._by_accumulation, scale_wrt_gas
        try:
            yield
        finally:
            self._by_accumulation = before

    def __call__(self, passed_outputs: bool) -> GradientScale:
        """To be asked within a backward. `passed_outputs`: the gradient has been through the engine's outputs."""
        steps = self._engine.gradient_accumulation_steps()
        multiplied = steps if self._by_accumulation else 1
        at_outputs = divisor_at_outputs(self._engine) > 1
        divided = (steps if passed_outputs else 1) if at_outputs else multiplied
        return GradientScale(
            data_parallel=self._engine.dp_world_size,
            loss_scale=loss_scale(self._engine),
            accumulation=multiplied / divided,
        )


def divisor_at_outputs(engine: Any) -> int:
    """What DeepSpeed divides gradients by at each output of the engine in the backward that is running: it says itself
    whether it does."""
    divides = float(engine._backward_prologue_per_tensor(torch.ones(()))) != 1.0
    return int(engine.gradient_accumulation_steps()) if divides else 1


def loss_scale(engine: Any) -> float | Tensor:
    """What `engine.backward` multiplies the loss by, and the optimizer divides by in its step: reduced gradients that
    are read before the step carry it.

    Source: `DeepSpeedEngine.backward` and `ZeROOptimizer.scale_if_loss`.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    optimizer = engine.optimizer
    if not isinstance(optimizer, ZeROOptimizer):
        return _of_scaler(engine, getattr(engine, "torch_autocast_z0_gradscaler", None))
    if getattr(optimizer, "custom_loss_scaler", False):
        return float(optimizer.external_loss_scale)
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        return _of_scaler(engine, optimizer.torch_autocast_gradscaler)
    scaler = getattr(optimizer, "loss_scaler", None)  # BF16_Optimizer has none
    return 1.0 if scaler is None else float(scaler.cur_scale)


def _of_scaler(engine: Any, scaler: Any) -> float | Tensor:
    """A GradScaler keeps its scale on the device: taken from a product, so that nothing waits for it."""
    return 1.0 if scaler is None else scaler.scale(torch.ones((), device=engine.device))
