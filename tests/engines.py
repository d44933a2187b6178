"""Small DeepSpeed engines for tests, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


def config(stage: int, accumulation: int = 1, lr: float = 1e-3, **zero: Any) -> dict[str, Any]:
    """DeepSpeed JSON: AdamW of torch, no persistent parameters unless `zero` says so."""
    persistence = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **persistence, **zero},
        "zero_force_ds_cpu_optimizer": False,  # offload with torch's AdamW
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "steps_per_print": 10**9,
    }


def engine(model: nn.Module, settings: dict[str, Any], units: Iterable[nn.Module] | None = None) -> Any:
    """An engine for the trainable parameters of the model; `units` become ZeRO-3 leaf units. `settings` stay as they
    are: DeepSpeed 0.18 takes `torch_adam` out of the dictionary that it is given."""
    import deepspeed

    from ds_hilore.integration.zero3 import leaf_units

    trainable = [p for p in model.parameters() if p.requires_grad]
    with nullcontext() if units is None else leaf_units(model, units):
        made, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=deepcopy(settings))
    return made


def checkpointed(model: nn.Module) -> nn.Module:
    """torch's non-reentrant checkpointing of every decoder layer, with the embedding's output needing a gradient."""
    from torch.utils.checkpoint import checkpoint

    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    base._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=lambda f, *a, **k: checkpoint(f, *a, use_reentrant=False, **k)
    )
    return model


def gradients(engine: Any) -> dict[str, Tensor]:
    """Whole reduced gradients by name, between backward and step; a collective on all ranks."""
    from deepspeed.utils import safe_get_full_grad

    staged = engine.zero_optimization_stage() > 0
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            gradient = safe_get_full_grad(parameter) if staged else parameter.grad
            found[name] = torch.zeros(1) if gradient is None else gradient.detach().clone().float()
    return found


@contextmanager
def before_each_step(engine: Any) -> Iterator[list[dict[str, Tensor]]]:
    """Inside, `gradients` of every update, noted before each step: for hosts that call `step` themselves."""
    found: list[dict[str, Tensor]] = []
    step = engine._take_model_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(gradients(engine))
        return step(*args, **kwargs)

    engine._take_model_step = noting
    try:
        yield found
    finally:
        del engine._take_model_step


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative distance of two gradients over all parameters; infinite when any is NaN or misses."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    worst = 0.0
    for name, value in one.items():
        reference = other[name].reshape(-1)
        distance = float((value.reshape(-1) - reference).norm() / (reference.norm() + 1e-12))
        worst = max(worst, float("inf") if math.isnan(distance) else distance)
    return worst


def exact(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """The oracle: plain torch without DeepSpeed, mean of the losses' gradients, averaged over ranks; zeros where a rank
    does not use a parameter."""
    import torch.distributed as dist

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    listed = list(losses)
    found = torch.autograd.grad(sum(listed) / len(listed), list(trainable.values()), allow_unused=True)  # type: ignore[arg-type]
    averaged = {}
    for (name, parameter), gradient in zip(trainable.items(), found, strict=True):
        total = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        dist.all_reduce(total)
        averaged[name] = total / dist.get_world_size()
    return averaged
