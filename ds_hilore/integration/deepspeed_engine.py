"""DeepSpeed engines with a "hilore" block: made, followed, and given back as they were.

`initialize` is `deepspeed.initialize`; `install` makes the plain one honour the block. An engine's `forward`,
`backward`, `step`, `save_checkpoint`, `load_checkpoint` and some more are wrapped on the instance; nothing of
DeepSpeed's classes is changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ds_hilore.codecs.registry import codec_names
from ds_hilore.core import deps
from ds_hilore.core.config import HiLoReConfig, Mode, PaperConfig, RankBudgets
from ds_hilore.core.errors import ConfigError, UnsupportedError, UsageError
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.host_rules import check_against_ds_json, zero_stage
from ds_hilore.core.types import Solver
from ds_hilore.integration.architecture import rates_by_class, reach_by_unit
from ds_hilore.integration.carried import CarriedState
from ds_hilore.integration.control_plane import control_plane
from ds_hilore.integration.fingerprint import fingerprint, read_ds_config
from ds_hilore.integration.gradient_checks import CheckRules, GradientChecks
from ds_hilore.integration.gradient_scale import EngineScale
from ds_hilore.integration.host import AttachedHost
from ds_hilore.integration.model_parallel import GroupAgreement, tensor_parallel_ranks, tensor_parallel_size
from ds_hilore.integration.offloading import offer_host_memory
from ds_hilore.integration.peft import let_embedding_outputs_require_grad
from ds_hilore.integration.pipeline import (
    PipelineHost,
    is_pipeline,
    pipeline_facts,
    pipeline_notes,
    pipeline_units,
    refuse_pipeline,
)
from ds_hilore.integration.refusals import (
    refuse_engine,
    refuse_model,
)
from ds_hilore.integration.roles import decoder_layer_roles
from ds_hilore.integration.run_log import run_log
from ds_hilore.integration.selfcheck import SelfCheck
from ds_hilore.integration.stored import keep_calibration, keep_profile
from ds_hilore.integration.transformers import pretrained_models
from ds_hilore.integration.units import Units, find_units
from ds_hilore.integration.zero3 import leaf_units
from ds_hilore.memory.meter import peak_meter
from ds_hilore.objective.reach import Reach
from ds_hilore.planning.program import SolverLimits
from ds_hilore.profiling.clock import clock_for
from ds_hilore.profiling.cost_model import DeviceSpeed
from ds_hilore.profiling.measure import UnitRates
from ds_hilore.profiling.variants import FIRST
from ds_hilore.recovery.encoded import LargestOf
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import claim
from ds_hilore.runtime.parts import ControllerParts, Techniques
from ds_hilore.runtime.risk import RiskRules

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
    if config is None or model is None or not _has_optimizer(given, ds):
        result: tuple[Any, Any, Any, Any] = original(*args, **kwargs)
        return result
    assert ds is not None
    deps.check_versions()
    shared = tensor_parallel_size(given.get("mpu"))
    notes = check_against_ds_json(config, ds, shared)
    # A pipeline's units are known when its engine is: it may set the checkpoint interval.
    units = Units({}) if is_pipeline(model) else find_units(model, config.units)
    refuse_model(model, units.modules, zero_stage(ds), shared)
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
            if zero_stage(ds) == 3:
                stack.enter_context(leaf_units(model, units.modules))
                let_embedding_outputs_require_grad(model)
            result = original(*args, **kwargs)
        attach(result[0], config, ds, units=None if is_pipeline(model) else units, notes=notes, plane=plane)
        on_failure.pop_all()
    return result


def _has_optimizer(given: Mapping[str, Any], ds: Mapping[str, Any] | None) -> bool:
    """False for engines that only run forward passes: TRL gives its reference and reward models the actor's JSON."""
    found = given.get("optimizer") is not None or bool((ds or {}).get("optimizer"))
    if not found:
        _log.info("hilore: this engine has no optimizer, so it makes no updates: its block is not used")
    return found


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
    pipeline = is_pipeline(engine.module)
    if pipeline:
        refuse_pipeline(engine)
        notes = [*(notes or []), *pipeline_notes(engine.module, config)]
    units = units or (pipeline_units if pipeline else find_units)(engine.module, config.units)
    refuse_engine(engine, units.modules, config.compresses)
    plane = plane or _agreed_plane(engine.module, config, ds, units)
    with ExitStack() as on_failure:
        on_failure.callback(plane.close)
        scale = EngineScale(engine)
        controller = _controller(engine, config, units, plane, scale)
        on_failure.callback(controller.close)
        _know_proportions(engine, controller)
        notes = [*(notes or []), *offer_host_memory(engine, config, controller, plane)]
        keep_profile(engine, config, controller, plane.rank)
        log = run_log(engine, config, controller, plane, units.summary())
        on_failure.callback(log.close)
        host = (PipelineHost if pipeline else AttachedHost)(engine, controller, plane, units, scale, log)
        if config.compresses:
            rules = CheckRules(config.profile.calibration_microbatches, config.profile.audit_interval)
            host.checks = GradientChecks(engine, controller, plane, rules)
            keep_calibration(engine, config, host.checks, plane.rank)
        host.carried = CarriedState(engine, config, controller, plane, host.checks)
        if config.selfcheck.updates and not pipeline:
            host.selfcheck = SelfCheck(engine, controller, plane, config.selfcheck.updates)
        host.apply()
        weakref.finalize(engine, log.close)  # detached or not, a run ends with a line
        on_failure.pop_all()
    _say_start(engine, config, units, notes or [], plane.rank)
    claim(controller)
    return controller


#: What a device reaches in practice, to a power of ten: measured seconds set the scale, these only the proportions of
#: products to traffic.
_ANY_DEVICE = {"cpu": DeviceSpeed(1e11, 1e10), "cuda": DeviceSpeed(3e14, 3e12)}


def _know_proportions(engine: Any, controller: Controller) -> None:
    """How bytes and seconds of the units grow with tokens and length, by arithmetic, until several shapes were seen."""
    speed = _ANY_DEVICE.get(torch.device(engine.device).type, _ANY_DEVICE["cuda"])
    rates: dict[str, UnitRates] = {}
    for model in pretrained_models(engine.module):
        rates |= rates_by_class(model, controller.parts.unit_names, speed)
    controller.measurements.rates = rates


def _agreed_plane(model: nn.Module, config: HiLoReConfig, ds: Mapping[str, Any], units: Units) -> ControlPlane:
    plane = control_plane()
    try:
        facts = fingerprint(model, config, ds, units.names.values())
        plane.agree("start", facts | pipeline_facts(model) if is_pipeline(model) else facts)
    except BaseException:
        plane.close()
        raise
    return plane


def detach(engine: Any) -> None:
    """Takes the controller off. Units stay ZeRO-3 leaf modules: the engine's hooks rely on it."""
    host: AttachedHost | None = getattr(engine, "_hilore_host", None)
    if host is not None:
        host.undo()


def restart_update(engine: Any) -> None:
    """The current update begins again at its first microbatch: after an exception in code of the caller's own, between
    calls of the engine (a loss, say). One that comes out of such a call has done this already.

    Without it the host's rule holds: the microbatch that failed may be repeated alone, and gradients of those before it
    stay. Every rank runs the whole update again; those that go on with it are told where ranks meet next.

    Raises:
        UsageError: no controller is attached, or the engine is a pipeline's, which cannot begin an update again.
    """
    host: AttachedHost | None = getattr(engine, "_hilore_host", None)
    if host is None:
        raise UsageError("restart_update: this engine has no hilore block in force; DeepSpeed cannot do this by itself")
    host.restart_update()


def _controller(engine: Any, config: HiLoReConfig, units: Units, plane: ControlPlane, scale: EngineScale) -> Controller:
    device = torch.device(engine.device)
    budget = config.memory_budget
    if isinstance(budget, RankBudgets):
        budget = budget.for_rank(plane.rank, plane.world_size)
    meter = peak_meter(device, len(plane.node_ranks()))
    limits = SolverLimits(config.planner.time_limit_s, config.planner.relative_gap)
    paper = config.mode is Mode.PAPER
    solver = Solver.DYNAMIC if paper else config.planner.solver
    planner = RankPlanner(budget, solver, limits, meter.wander_bytes)
    known = set(units.modules)
    stage3 = engine.zero_optimization_stage() == 3
    agreement = _agreement(engine, units, plane)
    alone = agreement is None
    parts = ControllerParts(
        rank=plane.rank,
        unit_names=units.names,
        planner=planner,
        meter=meter,
        clock=clock_for(device),
        scale=scale,
        # Under ZeRO-3 a function that is no leaf module gathers in its replay: all ranks must replay it (fact 16).
        replay_only=(lambda module: module not in known) if stage3 else (lambda module: False),
        # What is found out in a trial is each rank's own.
        trial_microbatches=config.planner.trial_microbatches if alone else 0,
        codecs=config.codecs if config.compresses else (),
        risk=_risk_rules(engine, config),
        # A pruned replay knows one microbatch at a time.
        roles=decoder_layer_roles
        if config.prune_zero_exposure and not paper and alone and not is_pipeline(engine.module)
        else None,
        techniques=_papers_own(config.paper) if paper else Techniques(dead_work=alone),
        agreement=agreement,
        plane=plane,
        reaches=_reaches(engine, units) if config.compresses else {},
    )
    return Controller(parts)


def _agreement(engine: Any, units: Units, plane: ControlPlane) -> GroupAgreement | None:
    """With the ranks that share this one's layers; None where an mpu names none."""
    ranks = tensor_parallel_ranks(engine.mpu)
    return GroupAgreement(plane, ranks, [path for path, _ in units.names.values()]) if ranks else None


def _reaches(engine: Any, units: Units) -> dict[str, Reach]:
    found: dict[str, Reach] = {}
    for model in pretrained_models(engine.module):
        found |= reach_by_unit(model, units.names)
    return found


def _papers_own(paper: PaperConfig) -> Techniques:
    """What there is in mode `paper`: one tensor of the MLP that may be encoded, and nothing beside."""
    return Techniques(
        derived_state=False,
        dead_work=False,
        kept_outputs=False,
        encodable=LargestOf(FIRST, paper.least_tensor_bytes, frozenset(getattr(torch, name) for name in paper.dtypes)),
        least_encoded_bytes=paper.least_tensor_bytes,
    )


def _risk_rules(engine: Any, config: HiLoReConfig) -> RiskRules:
    """What gradient error is allowed.

    Raises:
        ConfigError: a codec that is not known.
        UnsupportedError: a pipeline, whose microbatches cannot be differentiated by themselves.
    """
    if not config.compresses:
        return RiskRules(microbatches=engine.gradient_accumulation_steps())
    unknown = sorted(set(config.codecs) - set(codec_names()))
    if unknown:
        raise ConfigError(f"hilore.codecs: {unknown} are not known; known: {', '.join(codec_names())}")
    if is_pipeline(engine.module):
        raise UnsupportedError(
            "hilore.max_gradient_error: compression cannot be calibrated in a pipeline yet; leave it at 0"
        )
    return RiskRules(
        limit=config.max_gradient_error,
        static=config.mode is Mode.STATIC_RISK,
        ranks=engine.dp_world_size,
        microbatches=engine.gradient_accumulation_steps(),
        linear=config.mode is Mode.PAPER,
    )


def _say_start(engine: Any, config: HiLoReConfig, units: Units, notes: list[str], rank: int) -> None:
    if rank != 0:
        return
    budget = config.memory_budget.as_json()
    actions = "exact actions (store, recompute)"
    if config.compresses:
        codecs = ", ".join(config.codecs)
        actions = f"gradient error up to {config.max_gradient_error} (store, compress by {codecs}, recompute)"
    _log.info(
        "hilore: active. Units: %s; ZeRO-%d; budget %s; %s. The first two updates replay every unit and measure, plans "
        "follow.",
        units.summary(),
        engine.zero_optimization_stage(),
        budget,
        actions,
    )
    for note in notes:
        _log.warning("hilore: %s", note)
