"""A microbatch run again beside the engine: its gradient under any treatment of its units (design fact 5).

What the engine's module was called with, its surroundings, and the gradient that came to its outputs from outside are
taken down while a microbatch runs. From these alone, and whatever the loss was, the microbatch's own gradient can be
computed again: exactly, or with units compressed. Calibration and audits stand on that. The engine, its gradients and
its next backward are not touched; all ranks do it in step, since under ZeRO-3 parameters are gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_hilore.core.errors import UsageError
from ds_hilore.core.treatment import REPLAYED, Treatment
from ds_hilore.core.types import UnitId
from ds_hilore.integration.exact_gradient import by_name, release_gathered, trainable, widened
from ds_hilore.integration.gradient_scale import divisor_at_outputs, loss_scale
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.surroundings import RngTracker, Surroundings
from ds_hilore.recovery.unit import UnitCall, inside_unit
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import beside


@dataclass
class Recorded:
    """One forward of the engine's module: enough to run and differentiate it again.

    Attributes:
        gradients: what came to each output tensor that needs a gradient from outside of the engine, once backward has
            run; as the caller and DeepSpeed's loss scale made it, and before DeepSpeed divides at outputs.
        loss_scale: of that backward.
        divisor: what DeepSpeed divided by at each output in that backward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    surroundings: Surroundings
    gradients: dict[int, Tensor] = field(default_factory=dict)
    loss_scale: float | Tensor = 1.0
    divisor: int = 1

    @property
    def complete(self) -> bool:
        return bool(self.gradients)


class Recording:
    """The forwards of one engine that were taken down. `taken`: those so far."""

    def __init__(self, engine: Any) -> None:
        self.taken: list[Recorded] = []
        self._engine = engine

    def leaving(self, result: Any) -> Any:
        """What the newest forward of the engine gives its caller, with other tensors of the same storage.

        One output may be computed from another (a loss from logits): the gradient at the latter holds what came through
        the former. What comes from outside is seen at these tensors only. DeepSpeed's hooks stay where they were.
        """
        recorded = self.taken[-1]
        positions = iter(range(len(_outputs(result))))

        def leave(tensor: Tensor) -> Tensor:
            left: Tensor = _Leaving.apply(tensor, _noted(self._engine, recorded, next(positions)))
            return left

        return _mapped(result, leave)


@contextmanager
def recording(engine: Any, tracker: RngTracker | None = None) -> Iterator[Recording]:
    """Inside, every forward of the engine's module is taken down; its result must be handed on by `leaving`.

    Arguments are held, not copied: whoever writes into them in place before `gradients_of` is called changes what is
    computed.

    Args:
        tracker: of model-parallel random states, as units use it.
    """
    made = Recording(engine)
    device = torch.device(engine.device)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made.taken.append(Recorded(args, dict(kwargs), Surroundings(device, tracker)))

    handle = engine.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    try:
        yield made
    finally:
        handle.remove()


class _Leaving(torch.autograd.Function):
    """The identity, no copy and no view: callers may write into the result in place, as into the tensor itself. A hook
    on a view would be bypassed then, since writing into a view gives it another node."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if gradients[0] is not None:
            ctx.note(gradients[0])
        return gradients[0], None


def _noted(engine: Any, recorded: Recorded, position: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        known = recorded.gradients.get(position)
        recorded.gradients[position] = gradient.detach().clone() if known is None else known + gradient.detach()
        recorded.loss_scale, recorded.divisor = loss_scale(engine), divisor_at_outputs(engine)

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
        Whole gradients in float32 (float64 where parameters are), in the scale of the engine's own before they are
        averaged over ranks, the loss scale taken out; zeros where a parameter got none.

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
        _divide_at(outputs, recorded.divisor)
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
    gradients = by_name(chosen, found)
    del found, outputs, reached
    for name in gradients:  # one after another: a second whole gradient would be held for a moment
        gradients[name] = _unscaled(gradients[name], recorded.loss_scale)
    return gradients


def _unscaled(gradient: Tensor, scale: float | Tensor) -> Tensor:
    """Widened, and a tensor of its own: what autograd gives may be the same for several parameters."""
    wide = widened(gradient)
    return wide / scale if wide is gradient else wide.div_(scale)


def _divide_at(outputs: list[Tensor], divisor: int) -> None:
    """As DeepSpeed's hooks, at outputs that are computed from others, too.

    Source: `OutputBackwardHookManager` in deepspeed/runtime/utils.py.
    """
    for output in outputs if divisor > 1 else ():
        if output.grad_fn is not None:
            output.register_hook(lambda gradient: gradient / divisor)


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
        name, unit_class = self._controller.parts.unit_name(inputs.module, function)
        unit = UnitId(name, self._counts.get(name, 0))
        self._counts[name] = unit.call + 1
        treatment = self._treatments.get(unit, REPLAYED)
        if self._controller.parts.replay_only(inputs.module):
            treatment = REPLAYED
        call = UnitCall(self._controller.context, unit, unit_class, treatment, inputs)
        self.calls.append(call)
        return call.run(function, args, kwargs)


def _outputs(result: Any) -> list[Tensor]:
    """Tensors of an engine's or a module's result that need a gradient, in order."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(result, find)
    return found


def _mapped(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`result` with `function` of each tensor that needs a gradient in its place, through tuples, lists and dicts as
    DeepSpeed walks them. What changes is a new object of the same type (a model's output is a dict).

    Source: `OutputBackwardHookManager._traverse_and_register_hooks`.
    """
    if isinstance(result, Tensor):
        return function(result) if result.requires_grad else result
    if isinstance(result, dict):
        items = {key: _mapped(value, function) for key, value in result.items()}
        if all(items[key] is value for key, value in result.items()):
            return result
        changed = copy.copy(result)
        for key, value in items.items():
            changed[key] = value
        return changed
    if isinstance(result, tuple | list):
        parts = [_mapped(part, function) for part in result]
        if all(new is old for new, old in zip(parts, result)):
            return result
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


def _detached(arguments: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, arguments)
