"""A microbatch run again beside the engine: its gradient under any treatment of its units (design fact 5).

What the engine's module was called with, its surroundings, and the gradient that came to its outputs from outside are
taken down while a microbatch runs. From these alone, and whatever the loss was, the microbatch's own gradient can be
computed again: exactly, with units compressed, or by the plain model with nothing of ours in it. Calibration, audits
and self-checks stand on that. The engine, its gradients and its next backward are not touched; all ranks do it in step,
since under ZeRO-3 parameters are gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint as torch_checkpoint

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
from ds_hilore.runtime.parts import Checkpoint


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
        positions = iter(range(len(outputs_of(result))))

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
    chosen = trainable(engine.module)
    units = _Units(controller, treatments)

    def look(outputs: list[Tensor]) -> None:
        for call in units.calls:
            looked_at(call)
        units.calls.clear()

    found = differentiated(engine, controller, recorded, list(chosen.values()), units.run, look)
    gradients = by_name(chosen, found)
    del found
    for name in gradients:  # one after another: a second whole gradient would be held for a moment
        gradients[name] = _unscaled(gradients[name], recorded.loss_scale)
    return gradients


def differentiated(
    engine: Any,
    controller: Controller,
    recorded: Recorded,
    parameters: list[nn.Parameter],
    units: Checkpoint,
    looked_at: Callable[[list[Tensor]], None] = lambda outputs: None,
) -> tuple[Tensor | None, ...]:
    """The recorded microbatch's gradient on this rank, as it reaches `parameters`; its units run through `units`.

    Args:
        looked_at: shown the outputs that need a gradient, between forward and backward.

    Returns:
        For each parameter what it would accumulate in the engine's own backward, loss scale and all; None: nothing.

    Raises:
        UsageError: the microbatch has had no backward.
    """
    if not recorded.complete:
        raise UsageError("this microbatch has had no backward: nothing is known of the gradient at its outputs")
    try:
        with ExitStack() as stack:
            stack.enter_context(recorded.surroundings.restored())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(beside(controller))
            stack.enter_context(controller.host_checkpointing(units))
            outputs = outputs_of(engine.module(*_detached(recorded.args), **_detached(recorded.kwargs)))
        _divide_at(outputs, recorded.divisor)
        looked_at(outputs)
        reached = [(outputs[position], gradient) for position, gradient in recorded.gradients.items()]
        return torch.autograd.grad(
            [output for output, _ in reached], parameters, [gradient for _, gradient in reached], allow_unused=True
        )
    finally:
        release_gathered(engine)


def plain_units(controller: Controller) -> Checkpoint:
    """Units under torch's own checkpoint function: none of our hooks, recipes, replays and lean MLPs is in them.

    But for two kinds, which are replayed by ours: units that route, since torch's replay would choose experts anew, and
    functions that are no leaf module under ZeRO-3, whose replays gather.
    """
    ours = _Units(controller, {})

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = UnitInputs.capture(function, args, kwargs).module
        if controller.context.facts(module).has_router or controller.parts.replay_only(module):
            result = ours.run(function, *args, **kwargs)
            ours.calls.clear()  # they go with the graph
            return result
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            determinism_check="none",
            context_fn=lambda: (nullcontext(), _tracked(controller.context.rng_tracker)),
            **kwargs,
        )

    return run


def _tracked(tracker: RngTracker | None) -> AbstractContextManager[None]:
    """Around a replay of torch's, which knows nothing of model-parallel random states: those of now, and put back."""
    return nullcontext() if tracker is None else Surroundings(torch.device("cpu"), tracker).restored()


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


def outputs_of(result: Any) -> list[Tensor]:
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
