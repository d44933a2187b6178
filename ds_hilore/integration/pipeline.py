"""DeepSpeed's PipelineModule: ranges of its layers are the units, and a stage has several microbatches in flight.

A stage checkpoints `activation_checkpoint_interval` layers at a time; each such range that it would checkpoint is a
unit. Every stage measures and plans for itself, under its own budget. Only the last stage sees the loss; with exact
actions the others need nothing of it.

What is changed on an engine: its instructions for forward, backward and step (the map that its schedule is carried out
by), `train_batch`, and on its module `forward` and the checkpoint function. `eval_batch` runs as before.

Not covered: DualPipeV, tensor parallelism inside of a stage (both refused), and going on after an exception in the
middle of `train_batch`: other stages wait for messages that never come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import ConfigError, UnsupportedError, UsageError
from ds_hilore.integration.checkpoint import checkpoint
from ds_hilore.integration.fingerprint import digest
from ds_hilore.integration.gated_mlp import apply_gated_mlps, undo_gated_mlps
from ds_hilore.integration.host import AttachedHost
from ds_hilore.integration.megatron import rng_trackers
from ds_hilore.integration.units import Units, named
from ds_hilore.runtime.current import forward_of
from ds_hilore.runtime.microbatch import Microbatch


def is_pipeline(model: nn.Module) -> bool:
    """Whether `model` is a PipelineModule of DeepSpeed."""
    return any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__)


def pipeline_facts(module: Any) -> dict[str, Any]:
    """What all stages of a pipeline share, in place of what differs by stage in a fingerprint."""
    specs = [getattr(spec, "typename", type(spec)).__name__ for spec in module._layer_specs]
    return {
        "model parameters": "by stage",
        "number of units": "by stage",
        "pipeline layers": digest(repr(specs)),
        "pipeline partition": [int(boundary) for boundary in module.parts],
        "activation_checkpoint_interval": module.activation_checkpoint_interval,
    }


class LayerRange(nn.Module):
    """Consecutive layers of a stage, as one unit. Stands beside the model, which does not know it.

    Args:
        layers: entries of the stage's `forward_funcs`: modules, or functions (of which the module is found where it
            is bound by `partial`, as for tied layers).
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        for place, layer in enumerate(layers):
            module = layer.args[0] if isinstance(layer, functools.partial) and layer.args else layer
            if isinstance(module, nn.Module):
                self.add_module(str(place), module)

    @property
    def kinds(self) -> str:
        """Classes of the layers, for labels: "Embedding+Block"."""
        return "+".join(type(layer).__name__ for layer in self.children())

    def forward(self, run: Callable[..., Any], *inputs: Any) -> Any:
        """`run` is what the stage wants to be checkpointed: its layers in a row, seeds included."""
        return run(*inputs)


def pipeline_notes(module: Any, config: HiLoReConfig) -> list[str]:
    """What the user should know at start: of `module` as it was given, and of what the block itself asks for. What is
    only there by default is not worth a warning."""
    asked = config.model_fields_set
    found = []
    if module.activation_checkpoint_interval == 0:
        found.append("activation_checkpoint_interval is 0: every layer with parameters is a unit of its own")
    if config.prune_zero_exposure and "prune_zero_exposure" in asked:
        found.append("prune_zero_exposure is without effect in a pipeline")
    if config.selfcheck.updates and "selfcheck" in asked:
        found.append("selfcheck is without effect in a pipeline: its microbatches cannot be run by themselves")
    return found


def pipeline_units(module: Any, wanted: str | tuple[str, ...]) -> Units:
    """The units of this rank's stage, in forward order. An interval of 0 counts as 1.

    Args:
        module: the PipelineModule, after its engine was made (which may set the interval).
        wanted: the block's `units`.

    Raises:
        ConfigError: units were named.
    """
    if wanted != "auto":
        raise ConfigError(
            f"hilore.units = {list(wanted)}: in a pipeline the units are ranges of layers; leave the key out and set "
            "activation_checkpoint_interval and checkpointable_layers of the PipelineModule"
        )
    layers, interval = module.forward_funcs, _interval(module)
    holder, units = nn.ModuleDict(), list[LayerRange]()
    for start, is_unit in zip(range(0, len(layers), interval), _checkpointable(module)):
        if is_unit:
            part = layers[start : start + interval]
            first = module._local_start + start
            name = f"layers-{first}" if len(part) == 1 else f"layers-{first}-{first + len(part) - 1}"
            units.append(LayerRange(part))
            holder[name] = units[-1]
    places = named(holder, list(units))
    return Units({unit: (places[unit][0], places[unit][1].replace(LayerRange.__name__, unit.kinds)) for unit in units})


def refuse_pipeline(engine: Any) -> None:
    """Looks at an engine of a pipeline before anything is changed on it.

    Raises:
        UnsupportedError: DualPipeV, tensor parallelism within stages, or a DeepSpeed that we do not know.
    """
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if not isinstance(engine, PipelineEngine) or type(engine).__name__ == "DualPipeVEngine":
        raise UnsupportedError(
            f"{type(engine).__name__} is not supported: use a PipelineModule, whose engine is a PipelineEngine"
        )
    if engine.grid.model_parallel_size > 1:
        raise UnsupportedError(
            "tensor parallelism within the stages of a pipeline is not supported yet: ranks of a group communicate "
            "inside a unit; use a topology of pipe and data only"
        )
    known = {schedule.ForwardPass, schedule.BackwardPass, schedule.OptimizerStep}
    if not known <= set(engine._INSTRUCTION_MAP):
        raise UnsupportedError("this DeepSpeed carries out its pipeline schedule in a way that ds_hilore does not know")


class StageCheckpoint:
    """A stage's `activation_checkpoint_func`. Its calls within one forward are the units, in their order."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = units
        self._next = 0

    def begin(self) -> None:
        """A forward of the stage begins."""
        self._next = 0

    def __call__(self, run: Callable[..., Any], *inputs: Any) -> Any:
        unit = self._units[self._next]
        self._next += 1
        if not torch.is_grad_enabled():
            return run(*inputs)
        return checkpoint(unit.forward, run, *inputs)


@dataclass
class PipelineHost(AttachedHost):
    """An engine of a pipeline with its controller. The controller's microbatch in hand is that of the instruction."""

    waiting: dict[int, Microbatch] = field(default_factory=dict)  # by the engine's buffer, between forward and backward

    def __post_init__(self) -> None:
        self._checkpoint = StageCheckpoint(self.units.modules)
        self._units_interval = _interval(self.engine.module)
        self._in_instruction = False
        self._begun = False  # a forward of the running `train_batch` has begun
        self._broken = False

    def _change_model(self) -> None:
        module = self.engine.module
        self._stack.callback(undo_gated_mlps, apply_gated_mlps(self.units.modules))
        interval, results = _interval(module), _checkpointable(module)
        forward = functools.partial(self._stage_forward, module.forward)
        for name, value in {
            "activation_checkpoint_interval": interval,
            "is_checkpointable_results": results,
            "is_checkpointable_results_interval": interval,
            "activation_checkpoint_func": self._checkpoint,
            "forward": forward,
        }.items():
            _replace(self._stack, module, name, value)

    def _change_engine(self) -> None:
        from deepspeed.runtime.pipe import schedule

        self._wrap("train_batch", "save_checkpoint", "load_checkpoint", "compile")
        originals = self.engine._INSTRUCTION_MAP
        ours: dict[Any, Callable[..., None]] = {
            schedule.ForwardPass: self._forward_pass,
            schedule.BackwardPass: self._backward_pass,
            schedule.OptimizerStep: self._optimizer_step,
        }
        led = {kind: functools.partial(step, originals[kind]) for kind, step in ours.items()}
        _replace(self._stack, self.engine, "_INSTRUCTION_MAP", {**originals, **led})
        # Our units take inputs without a gradient: the first stage's need none.
        _replace(self._stack, self.engine, "_reentrant_activation_checkpointing", lambda: False)

    # -- what the schedule does ------------------------------------------------------------------------------------

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._broken:
            raise UsageError(
                "train_batch ended in an exception before, and a pipeline cannot begin an update again: other stages "
                "wait for its messages; start the job again from a checkpoint"
            )
        if self.engine.module.activation_checkpoint_interval != self._units_interval:
            raise UsageError("activation_checkpoint_interval was changed: call ds_hilore.detach(engine) before")
        self._meet_ranks()
        self._begun = False
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            self._broken = self._begun
            self._give_up_update(error)
            raise

    def _meet_ranks(self) -> None:
        """Before the first message of an update that a stage could wait for in vain."""
        if self.plane.world_size > 1:
            engine = self.engine
            facts = {"update": self.controller.update, "microbatches": engine.micro_batches}
            self.plane.agree("update", facts | {"global_steps": engine.global_steps})

    def restart_update(self) -> None:
        raise UsageError("restart_update: a pipeline cannot begin an update again; start the job from a checkpoint")

    def _give_up_update(self, error: BaseException | None) -> None:
        exhausted = self.controller.abort(error)
        self.waiting.clear()
        self.log.restart()
        if exhausted is not None:
            raise exhausted from error

    def _forward_pass(self, original: Callable[..., Any], engine: Any, buffer_id: int) -> None:
        if not torch.is_grad_enabled():
            original(engine, buffer_id)
            return
        self._begun = self._in_instruction = True
        try:
            original(engine, buffer_id)
        finally:
            self._in_instruction = False
        self.waiting[buffer_id] = self.controller.set_aside()

    def _stage_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's forward. The last stage's loss is computed after it, within the same instruction."""
        self._checkpoint.begin()
        if not self._in_instruction:
            return original(*args, **kwargs)
        self.controller.context.rng_tracker = rng_trackers()
        with forward_of(self.controller):
            result = original(*args, **kwargs)
        self.controller.outputs.mark(result)
        return result

    def _backward_pass(self, original: Callable[..., Any], engine: Any, buffer_id: int) -> None:
        self.controller.take_up(self.waiting.pop(buffer_id))
        self.controller.begin_backward()
        with self.scale.backward(True):
            original(engine, buffer_id)
        self.controller.end_backward()
        self.log.microbatch_done(self.controller)

    def _optimizer_step(self, original: Callable[..., Any], engine: Any, **kwargs: Any) -> None:
        original(engine, **kwargs)
        self.controller.end_update()
        self.log.update_done(self.controller, None)
        self._write_metrics()


def _interval(module: Any) -> int:
    """Layers in a unit."""
    return int(module.activation_checkpoint_interval) or 1


def _checkpointable(module: Any) -> list[bool]:
    """Of each range of layers, whether the stage would checkpoint it, as it was decided when the engine was made."""
    layers, interval = module.forward_funcs, _interval(module)
    if module.is_checkpointable_results and module.is_checkpointable_results_interval == interval:
        return list(module.is_checkpointable_results)
    return [module._is_checkpointable(layers[start : start + interval]) for start in range(0, len(layers), interval)]


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of one object, until the stack is closed."""
    if name in owner.__dict__:
        stack.callback(owner.__dict__.__setitem__, name, owner.__dict__[name])
    else:
        stack.callback(owner.__dict__.pop, name, None)
    owner.__dict__[name] = value
