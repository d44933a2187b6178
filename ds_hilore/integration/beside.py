"""A microbatch run again beside the engine: its gradient under any treatment of its units (design fact 5).

What the engine's module was called with, its surroundings, and the gradient that came to its outputs are taken down
while a microbatch runs. From these alone, and whatever the loss was, the microbatch's own gradient can be computed
again: exactly, or with units compressed. Calibration and audits stand on that. The engine, its gradients and its next
backward are not touched; all ranks do it in step, since under ZeRO-3 parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ds_hilore.core.errors import UsageError
from ds_hilore.core.treatment import REPLAYED, Treatment
from ds_hilore.core.types import UnitId
from ds_hilore.integration.exact_gradient import by_name, release_gathered, trainable
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.surroundings import Surroundings
from ds_hilore.recovery.unit import UnitCall, inside_unit
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import beside


@dataclass
class Recorded:
    """One forward of the engine's module: enough to run and differentiate it again.

    `gradients`: what came to each output tensor that needs a gradient, once backward has run; scaled as the engine's
    own gradients are.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    surroundings: Surroundings
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.gradients)


@contextmanager
def recording(engine: Any) -> Iterator[list[Recorded]]:
    """Inside, every forward of the engine's module is taken down. Arguments are held, not copied: whoever writes into
    them in place before `gradients_of` is called changes what is computed."""
    taken: list[Recorded] = []
    device = torch.device(engine.device)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append(Recorded(args, dict(kwargs), Surroundings(device)))

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for position, tensor in enumerate(_outputs(output)):
            tensor.register_hook(_noted(taken[-1].gradients, position))

    first = engine.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    last = engine.module.register_forward_hook(after, with_kwargs=True)
    try:
        yield taken
    finally:
        first.remove()
        last.remove()


def _noted(gradients: dict[int, Tensor], position: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        known = gradients.get(position)
        gradients[position] = gradient.detach().clone() if known is None else known + gradient.detach()

    return note


def gradients_of(
    engine: Any,
    controller: Controller,
    recorded: Recorded,
    treatments: Mapping[UnitId, Treatment],
    looked_at: Callable[[UnitCall], None] = lambda call: None,
) -> dict[str, Tensor]:
    """The recorded microbatch's gradient on this rank, by parameter name, under `treatments` (a missing unit is R).

    Args:
        looked_at: shown every unit call between forward and backward.

    Returns:
        Whole gradients in the scale of the engine's own before they are averaged over ranks; zeros where a parameter
        got none.

    Raises:
        UsageError: the microbatch has had no backward.
    """
    if not recorded.complete:
        raise UsageError("this microbatch has had no backward: nothing is known of the gradient at its outputs")
    chosen = trainable(engine.module)
    units = _Units(controller, treatments)
    try:
        with ExitStack() as stack:
            stack.enter_context(recorded.surroundings.restored())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(beside(controller))
            stack.enter_context(controller.host_checkpointing(units.run))
            outputs = _outputs(engine.module(*_detached(recorded.args), **_detached(recorded.kwargs)))
        for call in units.calls:
            looked_at(call)
        units.calls.clear()
        reached = [(outputs[position], gradient) for position, gradient in recorded.gradients.items()]
        found = torch.autograd.grad(
            [output for output, _ in reached],
            list(chosen.values()),
            [gradient for _, gradient in reached],
            allow_unused=True,
        )
    finally:
        release_gathered(engine)
    return by_name(chosen, found)


class _Units:
    """Units as calls of their own, outside the microbatches of the controller."""

    def __init__(self, controller: Controller, treatments: Mapping[UnitId, Treatment]) -> None:
        self.calls: list[UnitCall] = []
        self._controller = controller
        self._treatments = treatments
        self._counts: dict[str, int] = {}

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside_unit():
            return function(*args, **kwargs)
        inputs = UnitInputs.capture(function, args, kwargs)
        name, unit_class = self._controller.unit_name(inputs.module, function)
        unit = UnitId(name, self._counts.get(name, 0))
        self._counts[name] = unit.call + 1
        treatment = self._treatments.get(unit, REPLAYED)
        if self._controller.parts.replay_only(inputs.module):
            treatment = REPLAYED
        call = UnitCall(self._controller.context, unit, unit_class, treatment, inputs)
        self.calls.append(call)
        return call.run(function, args, kwargs)


def _outputs(result: Any) -> list[Tensor]:
    """Tensors of a module's result that need a gradient, in order; a model's output object is a mapping."""
    leaves = result.values() if isinstance(result, Mapping) else [result]
    return [leaf for part in leaves for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _detached(arguments: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, arguments)
