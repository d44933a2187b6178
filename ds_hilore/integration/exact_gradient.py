"""The exact gradient of a loss beside the engine, for audits, calibration and self-checks (design fact 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.errors import UsageError


def exact_gradients(
    engine: Any,
    loss_fn: Callable[[nn.Module], Tensor],
    *,
    parameters: Iterable[str] | None = None,
    reduce: bool = False,
) -> dict[str, Tensor]:
    """Gradients of `loss_fn(engine.module)`, whole and by parameter name, without any effect on the engine.

    `loss_fn` must call the module it is given, never the engine: a forward through the engine arms hooks which count a
    backward of the engine's, and under ZeRO-3 silently double its next gradient. All ranks call this in step, between
    two microbatches; under ZeRO-3 recovery units need `leaf_units`. The loss is differentiated as it is: no division
    by accumulation steps, no loss scale.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 0 to 3.
        loss_fn: gives a scalar; may use checkpointing. Randomness is the caller's: fork and seed it to compare.
        parameters: names as in `engine.module.named_parameters()`; default: all trainable ones.
        reduce: average over the engine's data-parallel ranks; otherwise this rank's own gradients.

    Returns:
        A tensor of the parameter's full shape and dtype per name; zeros where the loss does not use the parameter.

    Raises:
        UsageError: a name is unknown or not trainable, or the loss is no scalar that needs a gradient.
    """
    chosen = _choose(engine.module, parameters)
    with torch.enable_grad():
        loss = loss_fn(engine.module)
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        raise UsageError("exact_gradients: loss_fn must give a scalar tensor that requires grad")
    try:
        found = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
    finally:
        release_gathered(engine)
    gradients = by_name(chosen, found)
    return averaged(engine, gradients) if reduce else gradients


def _choose(module: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    known = trainable(module)
    if names is None:
        return known
    wanted = list(names)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(
            f"exact_gradients: {unknown[:3]} are not trainable parameters of {type(module).__name__}; "
            "give names as in engine.module.named_parameters()"
        )
    return {name: known[name] for name in wanted}


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def by_name(parameters: Mapping[str, nn.Parameter], found: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """Whole gradients in the order of `parameters`; zeros of the parameter's full shape where one got none."""
    return {
        name: _zeros(parameter) if gradient is None else gradient.detach()
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def _zeros(parameter: nn.Parameter) -> Tensor:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


def widened(gradient: Tensor) -> Tensor:
    """In float32, or float64 where it has that: sums and differences of gradients are no finer than their dtype."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def release_gathered(engine: Any) -> None:
    """What the engine's own epilogue does for modules whose last backward hook does not fire (no input with grad)."""
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    release = getattr(offload, "release_backward_leftovers", None)
    if release is not None:
        release()


def averaged(engine: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over the engine's data-parallel ranks, all of which call this; shapes and dtypes as given."""
    from deepspeed import comm

    group = engine.seq_data_parallel_group
    world = comm.get_world_size(group=group)
    averaged = {}
    for name, gradient in gradients.items():
        total = widened(gradient).contiguous().clone()
        comm.all_reduce(total, group=group)
        averaged[name] = total.div_(world).to(gradient.dtype)
    return averaged
