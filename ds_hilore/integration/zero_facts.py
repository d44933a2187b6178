"""What decides the memory of a DeepSpeed engine, read from the engine and its configuration (memory/zero.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_hilore.memory.zero import OptimizerFacts, Parameter, ZeroFacts

_BYTES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def facts_of(engine: Any, *, stepped: bool | None = None) -> ZeroFacts:
    """The facts of an initialised engine of ZeRO stage 0 to 3.

    Args:
        stepped: whether the account is of an update after the first; default: whether the engine has stepped.
    """
    import deepspeed.comm as dist

    stage = int(engine.zero_optimization_stage())
    group = engine.seq_data_parallel_group
    _, accumulated = engine.get_data_types()
    optimizer, unnamed = optimizer_facts(getattr(engine, "basic_optimizer", None))
    zero = engine._config.zero_config
    return ZeroFacts(
        stage=stage,
        parameters=_parameters(engine),
        world_size=dist.get_world_size(group=group),
        rank=dist.get_rank(group=group),
        half=bool(engine.fp16_enabled() or engine.bfloat16_enabled()),
        accumulation=int(engine.gradient_accumulation_steps()),
        accumulation_bytes=_BYTES[accumulated],
        communication_bytes=_BYTES[engine.communication_data_type],
        master_bytes=_BYTES[getattr(engine.optimizer, "master_weights_and_grads_dtype", torch.float32)],
        reduce_bucket=int(zero.reduce_bucket_size),
        contiguous_gradients=bool(zero.contiguous_gradients),
        overlap_comm=bool(zero.overlap_comm),
        reduce_scatter=bool(zero.reduce_scatter),
        optimizer=optimizer,
        fused=hasattr(engine.optimizer, "fp16_groups_flat"),
        offload_optimizer=_offloads(zero.offload_optimizer),
        offload_parameters=_offloads(zero.offload_param),
        persistence_threshold=int(zero.param_persistence_threshold),
        model_persistence_threshold=int(zero.model_persistence_threshold),
        max_reuse_distance=int(zero.max_reuse_distance),
        prefetch_bucket=int(zero.prefetch_bucket_size),
        sub_group=int(zero.sub_group_size),
        containers=_containers(engine.module),
        lazy_pages=torch.device(engine.device).type == "cpu",
        stepped=engine.global_steps > 0 if stepped is None else stepped,
        unknown=(*unnamed, *_unknown_settings(engine)),
    )


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
    names = {module: name for name, module in engine.module.named_modules()}
    found = []
    for name, p in engine.module.named_parameters():
        leaf = getattr(p, "ds_z3_leaf_module", None)
        stored = getattr(p, "ds_tensor", None)
        found.append(
            Parameter(
                numel=int(getattr(p, "ds_numel", p.numel())),
                trainable=p.requires_grad,
                element_bytes=(p if stored is None else stored).element_size(),
                module=name.rpartition(".")[0] if leaf is None else names[leaf],
                leaf=leaf is not None,
                group=groups.get(id(p), 0),
            )
        )
    return tuple(found)


def _containers(model: nn.Module) -> int:
    """Modules around the first parameter, its own module aside; lists of modules are never called."""
    name, _ = next(iter(model.named_parameters()))
    around = ["", *(name[:i] for i, letter in enumerate(name) if letter == ".")][:-1]
    return sum(1 for path in around if not isinstance(model.get_submodule(path), nn.ModuleList))


def optimizer_facts(optimizer: Any) -> tuple[OptimizerFacts, tuple[str, ...]]:
    """What an optimizer keeps and needs, or nothing and a line that names it where that is not known."""
    group: Mapping[str, Any] = optimizer.param_groups[0] if getattr(optimizer, "param_groups", None) else {}
    describe = _OPTIMIZERS.get(type(optimizer).__name__)
    if describe is None:
        name = type(optimizer).__name__
        return OptimizerFacts(state_tensors=0), (f"state and temporaries of optimizer {name}",)
    return describe(optimizer, group), ()


def _torch_adam(_optimizer: Any, group: Mapping[str, Any]) -> OptimizerFacts:
    """Source: torch.optim.adam; without a wish, foreach is chosen where all parameters are on CUDA."""
    state = 3 if group.get("amsgrad") else 2
    if group.get("fused"):
        return OptimizerFacts(state)
    foreach = group.get("foreach")
    if foreach is None:
        foreach = all(p.device.type == "cuda" for p in group["params"])
    return OptimizerFacts(state, copies_of_all=1) if foreach else OptimizerFacts(state, copies_of_largest=2)


def _torch_sgd(_optimizer: Any, group: Mapping[str, Any]) -> OptimizerFacts:
    """A first momentum is a clone; updates are in place."""
    return OptimizerFacts(1 if group.get("momentum") else 0)


def _cpu_adam(optimizer: Any, _group: Mapping[str, Any]) -> OptimizerFacts:
    return OptimizerFacts(2, state_bytes=4 if optimizer.fp32_optimizer_states else 2)


def _in_place(state_tensors: int) -> Callable[[Any, Mapping[str, Any]], OptimizerFacts]:
    return lambda _optimizer, _group: OptimizerFacts(state_tensors)


_OPTIMIZERS: dict[str, Callable[[Any, Mapping[str, Any]], OptimizerFacts]] = {
    "Adam": _torch_adam,
    "AdamW": _torch_adam,
    "SGD": _torch_sgd,
    "DeepSpeedCPUAdam": _cpu_adam,
    "FusedAdam": _in_place(2),
    "FusedLion": _in_place(1),
    "DeepSpeedCPULion": _in_place(1),
}


def _offloads(settings: Any) -> bool:
    return settings is not None and settings.device != "none"


def _unknown_settings(engine: Any) -> Iterable[str]:
    """Settings that change what is held in ways that memory/arithmetic.py does not follow."""
    zero = engine._config.zero_config
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
        "experts (their own data-parallel groups)": bool(engine.has_moe_layers),
    }
    return (f"effect of {name}" for name, is_set in settings.items() if is_set)
