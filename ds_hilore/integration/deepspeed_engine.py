"""DeepSpeed engines with a "hilore" block: made, followed, and given back as they were.

`initialize` is `deepspeed.initialize`; `install` makes the plain one honour the block. An engine's `forward`,
`backward`, `step` and `load_checkpoint` are wrapped on the instance; nothing of DeepSpeed's classes is changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_hilore.core import deps
from ds_hilore.core.config import HiLoReConfig, RankBudgets
from ds_hilore.core.errors import UsageError
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.host_rules import check_against_ds_json
from ds_hilore.integration.checkpoint import DeepSpeedCheckpointPatch, ModelParallelRng
from ds_hilore.integration.control_plane import control_plane
from ds_hilore.integration.fingerprint import fingerprint, read_ds_config
from ds_hilore.integration.gated_mlp import apply_gated_mlps, undo_gated_mlps
from ds_hilore.integration.gradient_scale import EngineScale
from ds_hilore.integration.peft import let_embedding_outputs_require_grad
from ds_hilore.integration.refusals import (
    refuse_compile,
    refuse_compiled_model,
    refuse_engine,
    refuse_model,
    refuse_no_sync,
)
from ds_hilore.integration.reset import reset_update
from ds_hilore.integration.roles import decoder_layer_roles
from ds_hilore.integration.transformers import CheckpointingGuard, pretrained_models
from ds_hilore.integration.units import Units, apply_wrapping, find_units, undo_wrapping
from ds_hilore.integration.zero3 import leaf_units
from ds_hilore.memory.meter import peak_meter
from ds_hilore.planning.program import SolverLimits
from ds_hilore.profiling.clock import clock_for
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import claim, forward_of
from ds_hilore.runtime.parts import ControllerParts

_log = logging.getLogger(__name__)
_INSTALLED = "_hilore_original_initialize"


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` for a config that may have a "hilore" block; without one, exactly that.

    Args, Returns: those of `deepspeed.initialize`; the engine's controller is `engine.hilore`.

    Raises:
        ConfigError, UnsupportedError, DependencyMissing: the block, the model or the rest of the JSON cannot be had.
        RankMismatch: ranks were given different configs, models or versions.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

    original = getattr(deepspeed.initialize, _INSTALLED, deepspeed.initialize)
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    model: nn.Module | None = given.get("model")
    ds = read_ds_config(args, kwargs)
    config = HiLoReConfig.from_ds_json(ds) if ds is not None else None
    if config is None or model is None:
        result: tuple[Any, Any, Any, Any] = original(*args, **kwargs)
        return result
    assert ds is not None
    deps.check_versions()
    notes = check_against_ds_json(config, ds)
    units = find_units(model, config.units)
    refuse_model(model, units.modules)
    # As `deepspeed.initialize` does: ranks must have met before its first collective on their parameters.
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=given.get("distributed_port", TORCH_DISTRIBUTED_DEFAULT_PORT),
        dist_init_required=given.get("dist_init_required"),
    )
    with ExitStack() as on_failure:
        plane = _agreed_plane(model, config, ds, units)
        on_failure.callback(plane.close)
        with ExitStack() as stack:
            if _stage(ds) == 3:
                stack.enter_context(leaf_units(model, units.modules))
                let_embedding_outputs_require_grad(model)
            result = original(*args, **kwargs)
        attach(result[0], config, ds, units=units, notes=notes, plane=plane)
        on_failure.pop_all()
    return result


def install() -> None:
    """Makes plain `deepspeed.initialize` honour the block: for Trainer, accelerate and TRL."""
    import deepspeed

    original = deepspeed.initialize
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def honouring_the_block(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs)

    setattr(honouring_the_block, _INSTALLED, original)
    deepspeed.initialize = honouring_the_block


def uninstall() -> None:
    """Puts DeepSpeed's own `initialize` back; engines that exist stay as they are."""
    import deepspeed

    deepspeed.initialize = getattr(deepspeed.initialize, _INSTALLED, deepspeed.initialize)


def attach(
    engine: Any,
    config: HiLoReConfig,
    ds: Mapping[str, Any],
    *,
    units: Units | None = None,
    notes: list[str] | None = None,
    plane: ControlPlane | None = None,
) -> Controller:
    """Gives an initialised engine its controller, as `engine.hilore`. Under ZeRO-3 only `initialize` can call this.

    Args:
        plane: the control plane to use (another time limit, for example); ranks have agreed on the start on it.
            Default: one is made and ranks agree. The controller's from here on.

    Raises:
        UsageError: the engine has a controller.
        UnsupportedError: the engine uses something that is refused (design fact 6).
        RankMismatch: ranks disagree.
    """
    if getattr(engine, "hilore", None) is not None:
        raise UsageError("this engine has a hilore controller already; detach it first")
    units = units or find_units(engine.module, config.units)
    refuse_engine(engine, units.modules)
    plane = plane or _agreed_plane(engine.module, config, ds, units)
    with ExitStack() as on_failure:
        on_failure.callback(plane.close)
        scale = EngineScale(engine)
        controller = _controller(engine, config, units, plane.rank, plane.world_size, scale)
        on_failure.callback(controller.close)
        AttachedHost(engine, controller, plane, units, scale).apply()
        on_failure.pop_all()
    _say_start(engine, config, units, notes or [], plane.rank)
    claim(controller)
    return controller


def _agreed_plane(model: nn.Module, config: HiLoReConfig, ds: Mapping[str, Any], units: Units) -> ControlPlane:
    plane = control_plane()
    try:
        plane.agree("start", fingerprint(model, config, ds, units.names.values()))
    except BaseException:
        plane.close()
        raise
    return plane


def detach(engine: Any) -> None:
    """Takes the controller off. Units stay ZeRO-3 leaf modules: the engine's hooks rely on it."""
    host: AttachedHost | None = getattr(engine, "_hilore_host", None)
    if host is not None:
        host.undo()


@dataclass
class AttachedHost:
    """What was changed on one engine and its model, and how to change it back."""

    engine: Any
    controller: Controller
    plane: ControlPlane
    units: Units
    scale: EngineScale

    def apply(self) -> None:
        """Changes the model, DeepSpeed's checkpoint function and the engine; all or nothing."""
        self._stack = ExitStack()
        try:
            self._change()
        except BaseException:
            self._stack.close()
            raise

    def _change(self) -> None:
        for model in pretrained_models(self.engine.module) if not self.units.wrapped else []:
            guard = CheckpointingGuard(model)
            self._stack.callback(guard.undo)
            guard.apply()
        self._stack.callback(undo_wrapping, self.units.wrapped)
        apply_wrapping(self.units.wrapped)
        self._stack.callback(undo_gated_mlps, apply_gated_mlps(self.units.modules))
        DeepSpeedCheckpointPatch.apply()
        self._stack.callback(DeepSpeedCheckpointPatch.undo)
        for name in ("forward", "backward", "step", "load_checkpoint", "no_sync", "compile"):
            original = getattr(self.engine, name)
            self.engine.__dict__[name] = functools.partial(getattr(self, f"_{name}"), original)
            self._stack.callback(self.engine.__dict__.pop, name, None)
        self.engine.__dict__["hilore"] = self.controller
        self.engine.__dict__["_hilore_host"] = self

    def undo(self) -> None:
        """Gives back hooks, functions and methods; closes planner and control plane."""
        self._stack.close()
        self.engine.__dict__.pop("hilore", None)
        self.engine.__dict__.pop("_hilore_host", None)
        self.controller.close()
        self.plane.close()

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        refuse_compiled_model(self.engine.module)
        self._meet_ranks()
        self.controller.context.rng_tracker = ModelParallelRng.if_used()
        with forward_of(self.controller):
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._give_up_update()
                raise
        self.controller.outputs.mark(result)
        return result

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args:  # `loss`; the rest goes by name in DeepSpeed's own callers
            kwargs = {**dict(zip(("loss", "retain_graph", "scale_wrt_gas"), args)), **kwargs}
        self.controller.begin_backward()
        try:
            with self.scale.backward(kwargs.get("scale_wrt_gas", True)):
                result = original(**kwargs)
        except BaseException:
            self._give_up_update()
            raise
        if not kwargs.get("retain_graph", False):
            self.controller.end_backward()
        return result

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        boundary = self.engine.is_gradient_accumulation_boundary()
        result = original(*args, **kwargs)
        if boundary:
            self.controller.end_update()
            self._write_metrics()
        return result

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.controller.parameters_changed()
        return result

    def _no_sync(self, original: Callable[..., Any]) -> Any:
        refuse_no_sync(self.engine)
        return original()

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        refuse_compile()

    def _meet_ranks(self) -> None:
        """Before the first collective of a microbatch that a rank could wait for in vain (design fact 16)."""
        if self.plane.world_size == 1 or not self.controller.starts_microbatch:
            return
        first = self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0
        if first or self.engine.zero_optimization_stage() >= 2:
            self.plane.agree("microbatch", self.controller.progress() | {"micro_steps": self.engine.micro_steps})

    def _give_up_update(self) -> None:
        """The update starts again: what DeepSpeed left half done would be silently wrong (design fact 4)."""
        self.controller.abort()
        reset_update(self.engine)

    def _write_metrics(self) -> None:
        monitor = getattr(self.engine, "monitor", None)
        if monitor is not None and monitor.enabled and self.plane.rank == 0:
            samples = self.engine.global_samples
            monitor.write_events([(f"Train/hilore/{k}", v, samples) for k, v in self.controller.metrics().items()])


def _controller(
    engine: Any, config: HiLoReConfig, units: Units, rank: int, world_size: int, scale: EngineScale
) -> Controller:
    device = torch.device(engine.device)
    budget = config.memory_budget
    if isinstance(budget, RankBudgets):
        budget = budget.for_rank(rank, world_size)
    planner = RankPlanner(
        budget, config.planner.solver, SolverLimits(config.planner.time_limit_s, config.planner.relative_gap)
    )
    known = set(units.modules)
    stage3 = engine.zero_optimization_stage() == 3
    parts = ControllerParts(
        rank=rank,
        unit_names=units.names,
        planner=planner,
        meter=peak_meter(device),
        clock=clock_for(device),
        scale=scale,
        # Under ZeRO-3 a function that is no leaf module gathers in its replay: all ranks must replay it (fact 16).
        replay_only=(lambda module: module not in known) if stage3 else (lambda module: False),
        roles=decoder_layer_roles if config.prune_zero_exposure else None,
    )
    return Controller(parts)


def _stage(ds: Mapping[str, Any]) -> int:
    block = ds.get("zero_optimization", {})
    stage = block.get("stage", 0) if isinstance(block, Mapping) else 0
    return int(stage) if not isinstance(stage, str) else 0


def _say_start(engine: Any, config: HiLoReConfig, units: Units, notes: list[str], rank: int) -> None:
    if rank != 0:
        return
    budget = config.memory_budget.as_json()
    _log.info(
        "hilore: active. Units: %s; ZeRO-%d; budget %s; exact actions (store, recompute). The first two updates replay "
        "every unit and measure, plans follow.",
        units.summary(),
        engine.zero_optimization_stage(),
        budget,
    )
    for note in notes:
        _log.warning("hilore: %s", note)
