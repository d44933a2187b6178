"""The norm of an update's reduced gradient, before clipping: what relative errors refer to."""

from __future__ import annotations

import math
from typing import Any

import torch

from ds_hilore.integration.gradient_scale import loss_scale


def local_gradient_norm(engine: Any) -> float | None:
    """Before the optimizer's step, where every rank holds the whole reduced gradient as `.grad` (ZeRO-0); else None."""
    if engine.zero_optimization_stage() > 0 or engine.bfloat16_enabled() or engine.fp16_enabled():
        return None
    norms = [p.grad.detach().norm() for p in engine.module.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm() / loss_scale(engine)) if norms else None


def engine_gradient_norm(engine: Any) -> float | None:
    """After the step: what DeepSpeed's optimizer has found (`engine.get_global_grad_norm`); None where it has not."""
    found = engine.get_global_grad_norm()
    if found is None:
        return None
    norm = float(found)
    return norm if math.isfinite(norm) and norm >= 0 else None
