"""transformers' Trainer: its targets are announced before a forward; its plain next-token loss has coefficients 1/N.

`Trainer.compute_loss` and `Trainer.log` are led through this file while an engine with a block is attached and the
Trainer is imported (`patches`). A loss that a subclass, `compute_loss_func`, label smoothing or the model itself makes
differently is not told, and runs with exact actions; its targets are a forecast for pruning all the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hilore.integration.method_patch import MethodPatch
from ds_hilore.integration.transformers import pretrained_models
from ds_hilore.runtime.update import MicrobatchFacts

if TYPE_CHECKING:
    from ds_hilore.runtime.controller import Controller

_log = logging.getLogger(__name__)


def patches() -> list[MethodPatch]:
    """What is led through this file. Empty where the Trainer is not imported: then nobody can be using it."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None:
        return []
    leads = ("self", "model", "inputs", "return_outputs", "num_items_in_batch")
    return [
        MethodPatch(trainer, "compute_loss", leads, _around_loss, "transformers"),
        MethodPatch(trainer, "log", ("self", "logs"), _around_log, "transformers"),
    ]


def told(model: Any) -> Controller | None:
    """The controller of the engine `model`, in a pass with grad; else None."""
    controller: Controller | None = getattr(model, "hilore", None)
    return controller if torch.is_grad_enabled() else None


def note_accumulation(trainer: Any, engine: Any) -> None:
    """The Trainer counts an update's microbatches itself, whatever the JSON says; says so where they differ."""
    script, json = int(trainer.args.gradient_accumulation_steps), int(engine.gradient_accumulation_steps())
    if engine.hilore.expect_microbatches(script) and json != script and engine.hilore.parts.rank == 0:
        _log.warning(
            "hilore: gradient accumulation is %d in the DeepSpeed JSON and %d in the script; the script's is in force",
            json,
            script,
        )


def _around_loss(
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Mapping[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    def as_before() -> Any:
        return original(
            trainer, model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
        )

    controller = told(model)
    if controller is None:
        return as_before()
    note_accumulation(trainer, model)
    targets = targets_of(inputs)
    if targets is None:
        return as_before()
    divisor = update_divisor(trainer, targets, num_items_in_batch)
    plain = is_plain_loss(trainer, model)
    controller.announce_microbatch(
        MicrobatchFacts(torch.ones_like(targets[:, 0], dtype=torch.float32), targets, divisor, exact_only=not plain)
    )
    result = as_before()
    if plain:
        controller.note_coefficients(targets.float() / -divisor, targets)
    return result


def _around_log(original: Callable[..., Any], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    """What the Trainer logs of training steps has our metrics beside it, as `hilore/...`."""
    controller = getattr(getattr(trainer, "model_wrapped", None), "hilore", None)
    if controller is not None and "loss" in logs:  # neither of an evaluation nor of the whole run
        logs.update({f"hilore/{name}": value for name, value in controller.metrics().items()})
    return original(trainer, logs, *args, **kwargs)


def targets_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """[B, T - 1] bool: positions whose next token is a target. None where labels are not one per token."""
    labels, ids = inputs.get("labels"), inputs.get("input_ids")
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.dim() != 2 or labels.shape != ids.shape:
        return None
    return labels[:, 1:] != -100


def update_divisor(trainer: Any, targets: Tensor, num_items: Tensor | int | None) -> Tensor:
    """N: what the targets' losses are divided by, over the whole update and all ranks.

    Source: `Trainer.compute_loss` and `Trainer.training_step`.
    """
    ranks = trainer.accelerator.num_processes
    if num_items is None or not trainer.model_accepts_loss_kwargs:
        return targets.sum().clamp(min=1) * (ranks * trainer.current_gradient_accumulation_steps)
    counted = torch.as_tensor(num_items, device=targets.device)
    return counted if trainer.args.average_tokens_across_devices else counted * ranks


def is_plain_loss(trainer: Any, model: Any) -> bool:
    """Whether the loss is the model's own mean over next tokens, so that omega is -1/N at every target."""
    from transformers import Trainer
    from transformers.loss.loss_utils import ForCausalLMLoss

    models = pretrained_models(model.module)
    return (
        type(trainer).compute_loss is Trainer.compute_loss
        and type(trainer).training_step is Trainer.training_step
        and trainer.label_smoother is None
        and trainer.compute_loss_func is None
        and trainer.loss_is_scaled_for_ga is None
        and len(models) == 1
        and models[0].loss_function is ForCausalLMLoss
        and not getattr(models[0].config, "output_router_logits", False)
    )
