"""Whole gradients by parameter name, compared."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def is_finite(gradients: Mapping[str, Tensor]) -> bool:
    """Whether a gradient's norm is a finite number."""
    return math.isfinite(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two gradients."""
    return math.sqrt(sum(float((gradient - other[name]).double().square().sum()) for name, gradient in one.items()))
