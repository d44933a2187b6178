"""What decides the memory of a DeepSpeed engine, read from the engine and its configuration (memory/zero.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_hilore.memory.zero import OptimizerFacts, Parameter, ZeroFacts


def facts_of(engine: Any, *, stepped: bool | None = None) -> ZeroFacts:
    """The facts of an initialised engine of ZeRO stage 0 to 3.

    Args:
        stepped: whether the account is of an update after the first; default: whether the engine has stepped.
    """
    import deepspeed.comm as dist

    group = engine.seq_data_parallel_group
    _, accumulated = engine.get_data_types()
    zero = engine._config.zero_config
    device = torch.device(engine.device).type
    basic = getattr(engine, "basic_optimizer", None)
    optimizer, unnamed = optimizer_facts(basic, "cpu" if _offloads(zero.offload_optimizer) else device)
    experts = ("effect of experts (their own data-parallel groups)",) if engine.has_moe_layers else ()
    return ZeroFacts(
        parameters=_parameters(engine),
        world_size=dist.get_world_size(group=group),
        rank=dist.get_rank(group=group),
        half=bool(engine.fp16_enabled() or engine.bfloat16_enabled()),
        accumulation=int(engine.gradient_accumulation_steps()),
        accumulation_bytes=accumulated.itemsize,
        communication_bytes=engine.communication_data_type.itemsize,
        master_bytes=getattr(engine.optimizer, "master_weights_and_grads_dtype", torch.float32).itemsize,
        optimizer=optimizer,
        fused=hasattr(engine.optimizer, "fp16_groups_flat"),
        containers=_containers(engine.module),
        lazy_pages=device == "cpu",
        stepped=engine.global_steps > 0 if stepped is None else stepped,
        buffer_bytes=_buffer_bytes(engine.module),
        unknown=(*unnamed, *_unknown_settings(zero), *experts),
        **_zero_settings(zero),
    )


def facts_of_config(
    ds: Mapping[str, Any],
    model: nn.Module,
    units: Iterable[nn.Module] = (),
    *,
    world_size: int = 1,
    rank: int = 0,
    device: str = "cuda",
    stepped: bool = True,
) -> ZeroFacts:
    """The facts of an engine that a configuration would make, without making it: for plans without a run.

    Args:
        ds: the DeepSpeed JSON; "auto" counts as left out.
        model: may be on the meta device; its trainable parameters are one group of the optimizer.
        units: recovery units, which are ZeRO-3 leaf modules.
        device: type of the device it would run on.
        stepped: account of an update after the first.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**_given(ds.get("zero_optimization", {})))
    half = "bf16" if _enabled(ds, "bf16") or _enabled(ds, "bfloat16") else "fp16" if _enabled(ds, "fp16") else None
    own = half or "fp32"
    settings = _zero_settings(zero)
    where = "cpu" if settings["offload_optimizer"] else device
    name, group = _optimizer_of(ds, settings["offload_optimizer"])
    optimizer, unnamed = _describe(name, group, where)
    accumulation = _given(ds).get("gradient_accumulation_steps", 1)
    given_types = _given(ds.get("data_types", {}))
    return ZeroFacts(
        parameters=_planned_parameters(model, units, zero.stage == 3, 2 if half else None),
        world_size=world_size,
        rank=rank,
        half=half is not None,
        accumulation=int(accumulation),
        accumulation_bytes=_size(given_types.get("grad_accum_dtype") or own),
        communication_bytes=_size(_given(ds).get("communication_data_type") or own),
        optimizer=optimizer,
        fused=name == "FusedAdam",
        containers=_containers(model),
        lazy_pages=device == "cpu",
        stepped=stepped,
        buffer_bytes=_buffer_bytes(model, given_types.get("buffer_dtype") if half else None),
        unknown=(*unnamed, *_unknown_settings(zero)),
        **settings,
    )


def _given(block: Any) -> dict[str, Any]:
    """A block of the JSON without what a host will fill in."""
    return {key: value for key, value in block.items() if value != "auto"} if isinstance(block, Mapping) else {}


def _enabled(ds: Mapping[str, Any], name: str) -> bool:
    return _given(ds.get(name, {})).get("enabled") is True


def _size(dtype: str) -> int:
    return 4 if dtype in ("fp32", "float32", "float") else 2


def _optimizer_of(ds: Mapping[str, Any], offloaded: bool) -> tuple[str, dict[str, Any]]:
    """Class name and settings of the optimizer that DeepSpeed makes (DeepSpeedEngine._configure_basic_optimizer)."""
    block = _given(ds.get("optimizer", {}))
    group = _given(block.get("params", {}))
    name = str(block.get("type", "AdamW"))
    if name.lower() in ("adam", "adamw") and not group.get("torch_adam"):
        return ("DeepSpeedCPUAdam" if offloaded else "FusedAdam"), group
    names = {"adam": "Adam", "adamw": "AdamW", "lion": "DeepSpeedCPULion" if offloaded else "FusedLion"}
    return names.get(name.lower(), name), group


def _zero_settings(zero: Any) -> dict[str, Any]:
    """Fields of ZeroFacts that a DeepSpeedZeroConfig holds."""
    return {
        "stage": int(zero.stage),
        "reduce_bucket": int(zero.reduce_bucket_size),
        "contiguous_gradients": bool(zero.contiguous_gradients),
        "overlap_comm": bool(zero.overlap_comm),
        "reduce_scatter": bool(zero.reduce_scatter),
        "offload_optimizer": _offloads(zero.offload_optimizer),
        "offload_parameters": _offloads(zero.offload_param),
        "persistence_threshold": int(zero.param_persistence_threshold),
        "model_persistence_threshold": int(zero.model_persistence_threshold),
        "max_reuse_distance": int(zero.max_reuse_distance),
        "prefetch_bucket": int(zero.prefetch_bucket_size),
        "sub_group": int(zero.sub_group_size),
    }


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """The model's trainable parameters by group, as the optimizer of any stage keeps them."""
    if hasattr(optimizer, "trainable_param_groups"):  # stage 3
        return [list(group["params"]) for group in optimizer.trainable_param_groups]
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", [])]


def _parameters(engine: Any) -> tuple[Parameter, ...]:
    """In the model's order, which is that of its forward for decoder models."""
    groups = {id(p): number for number, group in enumerate(parameter_groups(engine.optimizer)) for p in group}
    controller = getattr(engine, "hilore", None)
    homes = _homes(engine.module, controller.parts.unit_names if controller is not None else ())
    names = {module: name for name, module in engine.module.named_modules()}
    found = []
    for name, p in engine.module.named_parameters():
        leaf = getattr(p, "ds_z3_leaf_module", None)
        stored = getattr(p, "ds_tensor", None)
        home = homes.get(id(p), name.rpartition(".")[0])
        found.append(
            Parameter(
                numel=int(getattr(p, "ds_numel", p.numel())),
                trainable=p.requires_grad,
                element_bytes=(p if stored is None else stored).element_size(),
                module=home if leaf is None else names[leaf],
                leaf=leaf is not None,
                unit=leaf is not None or id(p) in homes,
                group=groups.get(id(p), 0),
            )
        )
    return tuple(found)


def _planned_parameters(
    model: nn.Module, units: Iterable[nn.Module], leaf: bool, element_bytes: int | None
) -> tuple[Parameter, ...]:
    """The same for a model that no engine has taken yet."""
    homes = _homes(model, units)
    return tuple(
        Parameter(
            numel=p.numel(),
            trainable=p.requires_grad,
            element_bytes=element_bytes or p.element_size(),
            module=homes.get(id(p), name.rpartition(".")[0]),
            leaf=leaf and id(p) in homes,
            unit=id(p) in homes,
        )
        for name, p in model.named_parameters()
    )


def _homes(model: nn.Module, units: Iterable[nn.Module]) -> dict[int, str]:
    """Path of the unit that a parameter lies in, by id."""
    names = {module: name for name, module in model.named_modules()}
    return {id(p): names[unit] for unit in units for p in unit.parameters()}


def _buffer_bytes(model: nn.Module, dtype: str | None = None) -> int:
    """Source: DeepSpeedEngine._cast_module_mixed_precision; 0.18.3 converts all to the parameters' dtype.

    Args:
        dtype: that floating-point buffers are converted to; default: they stay as they are.
    """
    held = (b for b in model.buffers() if b.numel() > 1)
    return sum(b.numel() * (_size(dtype) if dtype and b.is_floating_point() else b.element_size()) for b in held)


def _containers(model: nn.Module) -> int:
    """Modules around the first parameter, its own module aside; lists of modules are never called."""
    name, _ = next(iter(model.named_parameters()))
    around = ["", *(name[:i] for i, letter in enumerate(name) if letter == ".")][:-1]
    return sum(1 for path in around if not isinstance(model.get_submodule(path), nn.ModuleList))


def optimizer_facts(optimizer: Any, device: str) -> tuple[OptimizerFacts, tuple[str, ...]]:
    """What an optimizer keeps and needs, or nothing and a line that names it where that is not known.

    Args:
        device: type of the device that it steps on.
    """
    groups = getattr(optimizer, "param_groups", None)
    group = dict(groups[0]) if groups else {}
    group.setdefault("fp32_optimizer_states", getattr(optimizer, "fp32_optimizer_states", True))
    return _describe(type(optimizer).__name__, group, device)


def _describe(name: str, group: Mapping[str, Any], device: str) -> tuple[OptimizerFacts, tuple[str, ...]]:
    if name in ("Adam", "AdamW"):
        return _torch_adam(group, device), ()
    if name == "SGD":  # updates in place; a first momentum is a clone
        return OptimizerFacts(1 if group.get("momentum") else 0), ()
    if name == "DeepSpeedCPUAdam":
        return OptimizerFacts(2, state_bytes=4 if group.get("fp32_optimizer_states", True) else 2), ()
    if name in _IN_PLACE:
        return OptimizerFacts(_IN_PLACE[name]), ()
    return OptimizerFacts(state_tensors=0), (f"state and temporaries of optimizer {name}",)


def _torch_adam(group: Mapping[str, Any], device: str) -> OptimizerFacts:
    """Source: torch.optim.adam; without a wish, foreach is chosen where all parameters are on CUDA."""
    state = 3 if group.get("amsgrad") else 2
    if group.get("fused"):
        return OptimizerFacts(state)
    foreach = group.get("foreach")
    if device == "cuda" if foreach is None else foreach:
        return OptimizerFacts(state, copies_of_all=1)
    return OptimizerFacts(state, copies_of_largest=2)


#: State tensors of optimizers whose kernels need no temporaries.
_IN_PLACE = {"FusedAdam": 2, "FusedLion": 1, "DeepSpeedCPULion": 1}


def _offloads(settings: Any) -> bool:
    return settings is not None and settings.device != "none"


def _unknown_settings(zero: Any) -> Iterable[str]:
    """Settings that change what is held in ways that memory/arithmetic.py does not follow."""
    offload = [s for s in (zero.offload_optimizer, zero.offload_param) if s is not None]
    settings = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "round_robin_gradients": zero.round_robin_gradients,
        "parameter_alignment": getattr(zero, "parameter_alignment", False),
        "zenflow": getattr(zero, "zenflow", None) is not None,
        "offload to nvme": any(s.device == "nvme" for s in offload),
        "offload_optimizer.ratio": getattr(zero.offload_optimizer, "ratio", 1.0) < 1.0,
    }
    return (f"effect of {name}" for name, is_set in settings.items() if is_set)
