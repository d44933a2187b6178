"""Forwards of the engine differentiated by the plain model beside it, as sketches: the reference of the self-check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_hilore.integration.beside import Recorded, differentiated, plain_units
from ds_hilore.integration.exact_gradient import trainable
from ds_hilore.integration.sketch import GradientTap, Sketcher, Sketches
from ds_hilore.memory.refused import refused_bytes
from ds_hilore.runtime.controller import Controller

#: The reason where a pass found no memory.
TOO_LARGE = "a pass beside the engine did not fit in memory"
#: What adds up in another order may differ by so many roundings (`finfo.eps`) of the dtype.
ROUNDINGS = 8.0


@dataclass(frozen=True)
class Taken:
    """A forward of the engine that is to be differentiated again.

    Args:
        versions: of the tensors that the module was called with: they rise with each edit in place.
        outputs: sketches of those that need a gradient.
    """

    recorded: Recorded
    versions: tuple[int, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, recorded: Recorded, outputs: Sequence[Tensor], sketcher: Sketcher) -> Taken:
        versions = tuple(tensor._version for tensor in _tensors(recorded))
        return cls(recorded, versions, tuple(sketcher.of(output) for output in outputs))

    @property
    def arguments(self) -> list[Tensor]:
        """The tensors that the module was called with."""
        return _tensors(self.recorded)

    @property
    def edited(self) -> bool:
        """Whether somebody has written into one of those since."""
        return tuple(tensor._version for tensor in self.arguments) != self.versions


def _tensors(recorded: Recorded) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((recorded.args, recorded.kwargs)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class PlainGradient:
    """What the plain model gives to every parameter.

    Args:
        reason: why it says nothing; "" where it does.
        repeats: whether outputs came out the same, to the last bit of their sketches.
    """

    found: Sketches
    reason: str = ""
    repeats: bool = False


def plain_gradient(engine: Any, controller: Controller, taken: Sequence[Taken], sketcher: Sketcher) -> PlainGradient:
    """One pass per forward; under ZeRO-3 all ranks make the same number of them. No whole gradient is held.

    Raises:
        Exception: of the model, under ZeRO-3 only, where parameters may be gathered half way. Elsewhere it is a reason.
    """
    found, off = Sketches(sketcher), 0.0
    chosen = trainable(engine.module)
    for each in taken:
        outputs: list[Tensor] = []
        tap = GradientTap(chosen, found.add)
        tap.open_for_grad()
        try:
            differentiated(
                engine,
                controller,
                each.recorded,
                list(chosen.values()),
                plain_units(controller),
                lambda made, outputs=outputs: outputs.extend(sketcher.of(output) for output in made),  # type: ignore[misc]
            )
        except Exception as error:
            if engine.zero_optimization_stage() == 3:
                raise
            said = f"the model beside the engine raised {type(error).__name__}: {error}"
            return PlainGradient(found, TOO_LARGE if refused_bytes(error) is not None else said)
        finally:
            tap.close()
        off = max(off, _relative(outputs, each.outputs))
    if off > roundings(engine.module, taken):
        return PlainGradient(found, f"outputs were {off:.1e} off when the model ran again on the same inputs")
    return PlainGradient(found, repeats=off == 0)


def roundings(module: nn.Module, taken: Sequence[Taken]) -> float:
    """By how much sums in another order may differ, relative: by the coarsest dtype that the module computes in."""
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point() and each.element_size() > 1}
    dtypes |= {cast.dtype for each in taken for cast in each.recorded.surroundings.autocast if cast.enabled}
    return ROUNDINGS * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far the farthest of an output's sketches is off, relative to it; infinite where there are others."""
    if len(found) != len(expected):
        return math.inf
    pairs = [(float((one - other).norm()), float(other.norm())) for one, other in zip(found, expected)]
    each = [0.0 if off == 0 else off / norm if norm else math.inf for off, norm in pairs]
    return max((off if math.isfinite(off) else math.inf for off in each), default=0.0)
