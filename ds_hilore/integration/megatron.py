"""Megatron-Core models: each group of layers that `recompute_granularity="full"` checkpoints is a recovery unit.

`megatron.core.tensor_parallel.checkpoint` is led through this file while an engine with a block is attached and
Megatron-Core is imported (`patches`), under both names by which Megatron reaches it. Only what
`TransformerBlock._checkpointed_forward` hands over becomes a unit, within an engine's forward. Megatron's own function
runs for all else: `recompute_granularity="selective"`, the layers of multi-token prediction, passes outside of the
engine. `CheckpointWithoutOutput` is not touched.

Ranks that share layers agree on replays (model_parallel.py). Refused (`megatron_faults`): what Transformer Engine
checkpoints (fp8, fp4), distributed saved activations, random state in CUDA graphs, groups of ranks other than the
tensor-parallel one, ZeRO-3, and units that users name around layers that recompute something themselves.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ds_hilore.core import deps
from ds_hilore.core.errors import UnsupportedError
from ds_hilore.integration.checkpoint import ModelParallelRng
from ds_hilore.integration.method_patch import MethodPatch
from ds_hilore.recovery.surroundings import RngTracker
from ds_hilore.recovery.unit import inside_unit
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import running

_PACKAGE = "megatron-core"
_BLOCK = "megatron.core.transformer.transformer_block"
_RANDOM = "megatron.core.tensor_parallel.random"
#: Where callers find the function: the package that re-exports it, and its home.
_HOMES = ("megatron.core.tensor_parallel", _RANDOM)
_GROUP_MAKER = "TransformerBlock._checkpointed_forward.<locals>"

#: Settings of a TransformerConfig by which ranks communicate inside a layer over another group than the tensor-parallel
#: one, or have a training loop of their own.
_OTHER_GROUPS = ("context_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")


def patches() -> list[MethodPatch]:
    """What is led through this file. Empty where Megatron-Core's transformer is not imported: nobody uses it."""
    if _BLOCK not in sys.modules:
        return []
    leads = ("function", "distribute_saved_activations")
    return [MethodPatch(sys.modules[home], "checkpoint", leads, _around_checkpoint, _PACKAGE) for home in _HOMES]


def _around_checkpoint(original: Callable[..., Any], function: Any, distribute: bool, *args: Any) -> Any:
    layers = _layers_of(function)
    controller = running()
    if layers is None or (controller is None and not inside_unit()):
        return original(function, distribute, *args)
    if distribute:
        raise UnsupportedError(_DISTRIBUTED)
    if inside_unit():
        return function(*args)
    assert controller is not None
    return controller.run_unit(_LayerGroup(function, _unit_of(controller, layers)), args, {})


class _LayerGroup:
    """A closure over layers of a block, called as if it were a method of the module that they make up."""

    length_first = True  # hidden states are [s, b, h]; under sequence parallelism s is this rank's part

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.__self__ = module
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _layers_of(function: Any) -> nn.ModuleList | None:
    """The layers that a function of `TransformerBlock._checkpointed_forward` runs; None for all other functions.

    Raises:
        UnsupportedError: it is made otherwise than we know, so its layers cannot be told.
    """
    if not getattr(function, "__qualname__", "").startswith(_GROUP_MAKER):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    try:
        block, start, end = (cells[name].cell_contents for name in ("self", "start", "end"))
    except KeyError as missing:
        raise UnsupportedError(
            f"{_GROUP_MAKER} of {_PACKAGE} {deps.installed_version(_PACKAGE)} makes its functions without {missing}: "
            "install a version that ds_hilore knows (setup.py), or remove the hilore block"
        ) from missing
    layers: nn.ModuleList = block.layers[start:end]
    return layers


def _unit_of(controller: Controller, layers: nn.ModuleList) -> nn.Module:
    """The module by which the controller knows a group of layers; the group itself where it knows none."""
    units, first = controller.parts.unit_names, layers[0]
    if len(layers) == 1 and first in units:
        return first
    groups = (unit for unit in units if isinstance(unit, nn.ModuleList) and list(unit) == list(layers))
    return next(groups, layers)


# ------------------------------------------------------------------------------------------------ units of a model


def layer_groups(model: nn.Module) -> dict[nn.Module, str]:
    """The groups of layers that Megatron checkpoints whole, and their paths: a layer, or a list of layers."""
    found: dict[nn.Module, str] = {}
    for path, block in _blocks(model):
        prefix = f"{path}." if path else ""
        for start, end in _spans(block.config, len(block.layers)):
            if end - start == 1:
                found[block.layers[start]] = f"{prefix}layers.{start}"
            else:
                found[block.layers[start:end]] = f"{prefix}layers.{start}-{end - 1}"
    return found


def _spans(config: Any, layers: int) -> Iterator[tuple[int, int]]:
    """First layer and the one after the last of each group, as `TransformerBlock._checkpointed_forward` makes them."""
    if config.recompute_granularity != "full":
        return
    if config.recompute_method == "uniform":
        step = config.recompute_num_layers
        yield from ((start, min(start + step, layers)) for start in range(0, layers, step))
    else:
        yield from ((start, start + 1) for start in range(min(config.recompute_num_layers, layers)))


def _blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    block_class = getattr(sys.modules.get(_BLOCK), "TransformerBlock", None)
    if block_class is not None:
        yield from ((path, module) for path, module in model.named_modules() if isinstance(module, block_class))


# ------------------------------------------------------------------------------------------------ refusals


_DISTRIBUTED = (
    "distribute_saved_activations splits unit inputs over the tensor-parallel ranks, which is not supported yet: set "
    "it to false (sequence_parallel shards them too)"
)
_TRACKER = (
    "the tracker of Megatron-Core's random states keeps generators, which a replay cannot set back: seed with "
    "model_parallel_cuda_manual_seed(seed, te_rng_tracker=False, use_cudagraphable_rng=False)"
)
_ZERO3 = "ZeRO-3 gathers parameters inside of Megatron-Core's checkpointed groups of layers: use ZeRO-0, 1 or 2"
_COMPRESSED = "hilore.max_gradient_error above 0 with Megatron-Core is not calibrated yet: set it to 0"
_SELECTIVE = (
    'units around layers that recompute something themselves (recompute_granularity="selective"): leave hilore.units '
    'out, or set recompute_granularity to None or "full"'
)


def megatron_faults(
    model: nn.Module,
    units: Iterable[nn.Module],
    zero_stage: int = 0,
    mpu_size: int | None = None,
    compresses: bool = False,
) -> list[str]:
    """What a Megatron-Core model uses that is refused, each with the way out. Empty for all other models.

    Args:
        mpu_size: ranks that share layers by what the `mpu` says, which DeepSpeed goes by; None: not known yet.
        compresses: plans may compress.
    """
    found: dict[str, None] = {}
    wanted = set(units)
    for _, block in _blocks(model):
        found |= dict.fromkeys(_config_faults(block.config))
        if zero_stage == 3 and block.config.recompute_granularity == "full":
            found[_ZERO3] = None
        if block.config.recompute_granularity == "selective" and not wanted.isdisjoint(_around(model, block)):
            found[_SELECTIVE] = None
        size = block.config.tensor_model_parallel_size
        if mpu_size not in (None, size):
            found[
                f"its layers are split over {size} ranks, and DeepSpeed's mpu says {mpu_size}: give "
                "deepspeed.initialize mpu=ds_hilore.integration.megatron.MegatronMpu()"
            ] = None
        if compresses:
            found[_COMPRESSED] = None
        if _keeps_generators():
            found[_TRACKER] = None
    return list(found)


def _config_faults(config: Any) -> Iterator[str]:
    if config.recompute_granularity == "full":
        if config.distribute_saved_activations:
            yield _DISTRIBUTED
        if getattr(config, "fp8", None) or getattr(config, "fp4", None):
            yield "fp8 and fp4 in a Megatron-Core model are checkpointed by Transformer Engine: leave them out"
    for name in _OTHER_GROUPS:
        if (size := getattr(config, name, 1)) > 1:
            yield f"{name} = {size}, whose ranks do not agree on replays: set it to 1"


def _around(model: nn.Module, block: nn.Module) -> set[nn.Module]:
    """The modules of a block, and those that it is part of."""
    outer = {module for module in model.modules() if any(child is block for child in module.modules())}
    return outer | set(block.modules())


def _keeps_generators() -> bool:
    tracker = _tracker()
    return tracker is not None and (getattr(tracker, "use_cudagraphable_rng", False) or not hasattr(tracker, "states_"))


def _tracker() -> Any:
    """None where there is none yet: Megatron's own getter would make one, of a kind that the host may not want."""
    return getattr(sys.modules.get(_RANDOM), "_CUDA_RNG_STATE_TRACKER", None)


# ------------------------------------------------------------------------------------------------ random states


def rng_trackers() -> RngTracker | None:
    """Those of model-parallel random states that were seeded, Megatron-Core's and DeepSpeed's; None where none was."""
    core = _tracker()
    found: list[RngTracker | None] = [core if core is not None and core.is_initialized() else None]
    found.append(ModelParallelRng.if_used())
    used = [tracker for tracker in found if tracker is not None]
    return _Trackers(used) if len(used) > 1 else next(iter(used), None)


class _Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[RngTracker]) -> None:
        self._trackers = trackers

    def get_states(self) -> list[Any]:
        return [tracker.get_states() for tracker in self._trackers]

    def set_states(self, states: list[Any]) -> None:
        for tracker, state in zip(self._trackers, states, strict=True):
            tracker.set_states(copy.copy(state))  # it goes on in what it is given


# ------------------------------------------------------------------------------------------------ DeepSpeed's mpu


class MegatronMpu:
    """`megatron.core.parallel_state` as the `mpu` of `deepspeed.initialize`, which asks by names of older Megatrons.

    Model-parallel is tensor-parallel here: pipelines of Megatron-Core have a training loop of their own.

    Raises:
        DependencyMissing: Megatron-Core is not installed.
    """

    def __init__(self) -> None:
        deps.require("megatron")
        from megatron.core import parallel_state

        self._state: Any = parallel_state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_model_parallel_world_size(self) -> int:
        return int(self._state.get_tensor_model_parallel_world_size())

    def get_model_parallel_rank(self) -> int:
        return int(self._state.get_tensor_model_parallel_rank())

    def get_model_parallel_group(self) -> Any:
        return self._state.get_tensor_model_parallel_group()
