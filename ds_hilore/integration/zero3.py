"""ZeRO-3: every recovery unit is gathered as a whole, so that the collective schedule cannot depend on the plan.

# NOTE [Schedule rules]
# Z1  A unit is a ZeRO-3 leaf module: gathered once before its forward and once before its backward. A replay calls the
#     unit's inner forward, which fires no hook, so ranks may replay different units (design fact 1).
# Z2  Gradients are collected by one hook per parameter, not by DeepSpeed's one hook per leaf module: that one fires
#     before the unit's backward where no input of the unit needs a gradient, and twice for two forwards before one
#     backward (design fact 2).
# Z3  The gradients of a unit are handed to DeepSpeed's reduction together, in the order of ds_id, and with zeros for
#     parameters that this rank did not use. So all ranks fill their buckets alike, whatever a rank's routing or plan.
# Z4  That moment is the same on all ranks: the start of the next unit's backward, which all ranks reach in the same
#     order because it gathers, or the end of the backward pass. A unit that ran several forwards is handed over after
#     the backward of the last one has begun. Only backward passes of the engine count: `torch.autograd.grad` beside it
#     accumulates nothing.
# Z5  A unit without any backward in a pass is left alone, as DeepSpeed leaves any module that took no part in it.

Of DeepSpeed, `stage3.z3_leaf_parameter` and `DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks` are
replaced while `leaf_units` is active, and three methods of the one optimizer (and its parameter offload) it was active
for until `LeafUnits.undo`. Not covered: a parameter that is used inside a unit and, through
`register_external_parameter`, also outside of it (a late gradient raises `UnsupportedError`).
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ds_hilore.core.errors import UnsupportedError, UsageError

#: Name of the optimizer's attribute that holds its UnitReducer; read by integration/reset.py.
REDUCER_ATTRIBUTE = "_hilore_unit_reducer"
_MARKER = "_hilore_leaf_units"
_FLAG = "_z3_leaf"


class LeafUnits:
    """What `leaf_units` changed, to be undone once the engine is gone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []
        self._reducers: list[UnitReducer] = []
        self._flags: list[tuple[nn.Module, Any]] = []

    def add(self, unit_modules: Iterable[nn.Module]) -> None:
        """Flags further modules of the model; those inside another unit are left out (the outermost gathers)."""
        from deepspeed.utils import set_z3_leaf_module

        known = {id(module) for module in self.model.modules()}
        wanted = [*self.modules, *unit_modules]
        for module in wanted:
            if id(module) not in known:
                raise UsageError(f"unit {type(module).__name__} is no module of {type(self.model).__name__}")
        self.modules = _outermost(wanted)
        flagged = {id(module) for module, _ in self._flags}
        for module in self.modules:
            if id(module) not in flagged:
                self._flags.append((module, module.__dict__.get(_FLAG)))
                set_z3_leaf_module(module, True)

    def undo(self) -> None:
        """Gives flags and methods back. Only when the engine is no longer used: its hooks rely on them."""
        for reducer in self._reducers:
            reducer.detach()
        self._reducers = []
        for module, flag in self._flags:
            if flag is None:
                module.__dict__.pop(_FLAG, None)
            else:
                module.__dict__[_FLAG] = flag
        self._flags = []
        self.modules = []

    def _owns(self, parameter: nn.Parameter) -> bool:
        leaf = getattr(parameter, "ds_z3_leaf_module", None)
        return leaf is not None and any(leaf is module for module in self.modules)


@contextmanager
def leaf_units(model: nn.Module, unit_modules: Iterable[nn.Module]) -> Iterator[LeafUnits]:
    """Makes the units leaf modules of the ZeRO-3 engine that is initialised inside, with rules Z1 to Z5.

        with leaf_units(model, layers) as leaves:
            engine, *_ = deepspeed.initialize(model=model, ...)

    Without effect on engines of other stages. Leaf modules that the user set keep DeepSpeed's own treatment, unless
    they lie inside a unit: of nested leaf modules the outermost counts, for DeepSpeed as for us (a unit inside a leaf
    module of the user's is gathered and reduced with that one). Entering again for the same model inside an active
    context adds units to it.

    Args:
        model: what is given to `deepspeed.initialize`; may have been made under `deepspeed.zero.Init`.
        unit_modules: modules of the model, in any order.

    Raises:
        UsageError: a unit is no module of the model, or a context for another model is active.
        UnsupportedError: this DeepSpeed is not built as we know it.
    """
    from deepspeed.runtime.zero import stage3

    optimizer_class = stage3.DeepSpeedZeroOptimizer_Stage3
    original = optimizer_class.create_reduce_and_remove_grad_hooks
    active: LeafUnits | None = getattr(original, _MARKER, None)
    if active is not None:
        if active.model is not model:
            raise UsageError("leaf_units is active for another model; initialise one engine after the other")
        active.add(unit_modules)
        yield active
        return

    _check_signatures(stage3)
    leaves = LeafUnits(model)
    is_leaf = stage3.z3_leaf_parameter

    @functools.wraps(original)
    def create_hooks(self: Any) -> None:
        stage3.z3_leaf_parameter = lambda parameter: is_leaf(parameter) and not leaves._owns(parameter)
        try:
            original(self)
        finally:
            stage3.z3_leaf_parameter = is_leaf
        leaves._reducers.append(UnitReducer(self, leaves.model, leaves.modules))

    setattr(create_hooks, _MARKER, leaves)
    try:
        leaves.add(unit_modules)
        optimizer_class.create_reduce_and_remove_grad_hooks = create_hooks
        yield leaves
    except BaseException:
        leaves.undo()
        raise
    finally:
        optimizer_class.create_reduce_and_remove_grad_hooks = original


class _Forward:
    """One forward of a unit, from its end to the begin of its backward."""


class UnitReducer:
    """Hands the gradients of a ZeRO-3 optimizer to its reduction unit by unit (rules Z3 to Z5)."""

    def __init__(self, optimizer: Any, model: nn.Module, units: list[nn.Module]) -> None:
        self._unit_of: dict[int, nn.Module] = {}
        self._parameters: dict[nn.Module, list[nn.Parameter]] = {}
        self._open: dict[nn.Module, None] = {}  # an ordered set: units whose backward began and that are not reduced
        self._reduced: set[nn.Module] = set()
        self._optimizer = optimizer
        for unit in units:
            own = [p for p in unit.parameters() if p.requires_grad and getattr(p, "ds_z3_leaf_module", None) is unit]
            self._parameters[unit] = sorted(own, key=lambda p: p.ds_id)  # type: ignore[attr-defined]
        self._leave_out_shared(model)
        for unit, parameters in self._parameters.items():
            self._unit_of.update((id(parameter), unit) for parameter in parameters)
        # Forwards of a unit whose backward has not begun. Weak: what holds a call is its graph. DeepSpeed's own counter
        # (applied_pre_backward_ref_cnt) also counts forwards without grad and never forgets a dropped graph.
        self._forwards: dict[nn.Module, WeakSet[_Forward]] = {unit: WeakSet() for unit in self._parameters}
        self._handles = [unit.register_forward_hook(self._after_forward) for unit in self._parameters]
        self._reduce: Callable[[nn.Parameter], None] = optimizer.reduce_ready_partitions_and_remove_grads
        self._epilogue: Callable[[], None] = optimizer.independent_gradient_partition_epilogue
        self._before_backward: Callable[[nn.Module], None] = (
            optimizer.parameter_offload.pre_sub_module_backward_function
        )
        self._patched = [
            (optimizer, "reduce_ready_partitions_and_remove_grads", self._on_gradient),
            (optimizer, "independent_gradient_partition_epilogue", self._on_end),
            (optimizer.parameter_offload, "pre_sub_module_backward_function", self._on_backward_of),
            (optimizer, REDUCER_ATTRIBUTE, self),
        ]
        for owner, name, value in self._patched:
            setattr(owner, name, value)

    def detach(self) -> None:
        """Gives the methods of the optimizer back."""
        for owner, name, _ in self._patched:
            owner.__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        self._patched, self._handles = [], []

    def reset(self) -> None:
        """Forgets a backward pass that did not end."""
        self._open.clear()
        self._reduced.clear()
        for forwards in self._forwards.values():
            forwards.clear()

    def _leave_out_shared(self, model: nn.Module) -> None:
        """A parameter that two units, or a unit and another module, hold gets its gradient when the last is through:
        DeepSpeed's hook on it is right."""
        holders: dict[int, set[int]] = defaultdict(set)
        inside = {id(module) for unit in self._parameters for module in unit.modules()}
        for unit in self._parameters:
            for parameter in unit.parameters():
                holders[id(parameter)].add(id(unit))
        for module in model.modules():
            if id(module) not in inside:
                for parameter in module.parameters(recurse=False):
                    holders[id(parameter)].add(0)
        for unit, parameters in self._parameters.items():
            self._parameters[unit] = [p for p in parameters if holders[id(p)] == {id(unit)}]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        unit = self._unit_of.get(id(parameter))
        if unit is None:
            self._reduce(parameter)
            return
        if unit in self._reduced:
            raise UnsupportedError(
                f"a gradient of unit {type(unit).__name__} (parameter ds_id {parameter.ds_id}) "  # type: ignore[attr-defined]
                "arrived after the unit was reduced: the parameter is also used outside of the unit. "
                'Leave this module out of "units", or register the parameter in both modules.'
            )
        self._open[unit] = None

    def _after_forward(self, unit: nn.Module, _inputs: Any, output: Any) -> None:
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if outputs:
            forward, waiting = _Forward(), self._forwards[unit]
            waiting.add(forward)
            for tensor in outputs:  # the hook holds `forward`, and lives as long as the graph
                tensor.register_hook(lambda _gradient, forward=forward: waiting.discard(forward))

    def _on_backward_of(self, module: nn.Module) -> None:
        if module in self._parameters and self._optimizer._backward_active_depth > 0:
            for unit in list(self._open):
                if unit is not module and not self._forwards[unit]:
                    self._hand_over(unit)
            self._reduced.discard(module)
            self._open[module] = None
        self._before_backward(module)

    def _on_end(self) -> None:
        for unit in list(self._open):
            self._hand_over(unit)
        self._reduced.clear()
        self._epilogue()

    def _hand_over(self, unit: nn.Module) -> None:
        del self._open[unit]
        self._reduced.add(unit)
        for parameter in self._parameters[unit]:
            if parameter.grad is None:
                _give_zero_gradient(parameter)
            self._reduce(parameter)


def gathered_numel(engine: Any) -> int:
    """Elements of all parameters of a ZeRO-3 engine that are whole on this rank now (not DeepSpeed's own counter: it
    goes negative)."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return sum(p.ds_numel for p in engine.module.parameters() if p.ds_status == ZeroParamStatus.AVAILABLE)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _give_zero_gradient(parameter: nn.Parameter) -> None:
    """Sets `.grad` to zeros of the whole shape; autograd compares it with the data, which may be partitioned."""
    data = parameter.data
    shape = parameter.ds_shape  # type: ignore[attr-defined]
    try:
        if data.shape != shape:
            parameter.data = data.new_empty(()).expand(shape)
        parameter.grad = torch.zeros(shape, dtype=data.dtype, device=data.device)
    finally:
        parameter.data = data


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    unique = {id(module): module for module in modules}
    return [module for key, module in unique.items() if key not in inner]


def _takes(function: Callable[..., Any], count: int) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    # DeepSpeed's profiling decorator hides the parameters of some functions behind *args.
    return len(kinds) == count or inspect.Parameter.VAR_POSITIONAL in kinds


def _check_signatures(stage3: Any) -> None:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    optimizer_class = stage3.DeepSpeedZeroOptimizer_Stage3
    expected = [
        (stage3, "z3_leaf_parameter", 1),
        (optimizer_class, "create_reduce_and_remove_grad_hooks", 1),
        (optimizer_class, "reduce_ready_partitions_and_remove_grads", 2),
        (optimizer_class, "independent_gradient_partition_epilogue", 1),
        (DeepSpeedZeRoOffload, "pre_sub_module_backward_function", 2),
    ]
    for owner, name, count in expected:
        function = getattr(owner, name, None)
        if function is None or not _takes(function, count):
            import deepspeed

            raise UnsupportedError(
                f"deepspeed {deepspeed.__version__}: {getattr(owner, '__name__', owner)}.{name} is not the function of "
                f"{count} argument(s) that ds_hilore knows; use a version from 0.18.3 to 0.19.8"
            )
