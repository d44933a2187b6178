"""What an audit measures: the reduced gradient of a whole update against the sum of its exact ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ds_hilore.integration.exact_gradient import averaged
from ds_hilore.integration.gradient_scale import loss_scale


@dataclass(frozen=True)
class Audit:
    """One audited update: relative error of its reduced gradient, as predicted by all ranks and as measured."""

    update: int
    predicted: float
    measured: float


@dataclass
class AuditedUpdate:
    """An update that is audited, so far: the sum of its exact gradients on this rank, and how many backwards are in."""

    exact: dict[str, Tensor] = field(default_factory=dict)
    backwards: int = 0

    def add(self, gradients: dict[str, Tensor]) -> None:
        """`gradients` are the caller's no more: the sum is made in place."""
        if not self.exact:
            self.exact = gradients
            return
        for name, found in gradients.items():
            self.exact[name].add_(found)


def reduced_gradient(engine: Any, parameter: nn.Parameter) -> Tensor | None:
    """What the optimizer will use of a parameter, whole, times the loss scale; above ZeRO-0 a collective of all."""
    from deepspeed.utils import safe_get_full_grad

    found: Tensor | None = safe_get_full_grad(parameter) if engine.zero_optimization_stage() else parameter.grad
    return found


def reduced_error(engine: Any, exact: dict[str, Tensor]) -> tuple[float, float]:
    """How far the gradient that the optimizer is about to use, before clipping, is from the exact one. A collective.

    Args:
        exact: this rank's sum over the update, by parameter. Used up, or one more whole gradient would be held.

    Returns:
        The Euclidean norms of the difference and of the exact gradient, averaged over ranks.
    """
    scale, square, reference = loss_scale(engine), 0.0, 0.0
    for name, parameter in engine.module.named_parameters():
        if name in exact:
            truth = averaged(engine, {name: exact.pop(name)})[name].double()
            used = reduced_gradient(engine, parameter)
            reference += float(truth.square().sum())
            square += float(((0 if used is None else used.double() / scale) - truth).square().sum())
    return math.sqrt(square), math.sqrt(reference)
