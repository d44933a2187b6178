"""TRL's GRPOTrainer: its microbatches are announced before their forward, its log-probabilities are observed.

Nothing of TRL's loss is repeated here: coefficients are the gradient at the log-probabilities that `_compute_loss` gets
(out of TRL's chunked head), so every loss type, clip, mask and KL term is served. Only the size of the update is read
the way TRL normalises, for forecasts. Passes without grad (old policy, reference, evaluation) are left alone.

Two methods of the class are led through functions of this file while an engine with a block is attached, and TRL is
imported (`patches`). Not covered: subclasses that compute their loss without `_compute_loss` or
`_get_per_token_logps_and_entropies` of GRPOTrainer; they run with exact actions.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_hilore.core.deps import installed_version
from ds_hilore.core.errors import UnsupportedError
from ds_hilore.integration.method_patch import MethodPatch
from ds_hilore.integration.trainer import note_accumulation, told
from ds_hilore.runtime.update import MicrobatchFacts

if TYPE_CHECKING:
    from ds_hilore.runtime.controller import Controller

_log = logging.getLogger(__name__)
_MODULE = "trl.trainer.grpo_trainer"

Inputs = Mapping[str, Any]
"""One microbatch as `GRPOTrainer._compute_loss` gets it."""


@dataclass(frozen=True)
class _LossInProgress:
    """`_compute_loss` is running: for which model, and what its log-probabilities [B, T] are masked with."""

    model: Any
    mask: Tensor


_in_progress: ContextVar[_LossInProgress | None] = ContextVar("ds_hilore_trl_loss", default=None)


def patches() -> list[MethodPatch]:
    """What is led through this file. Empty where TRL's GRPO trainer is not imported: then nobody can be using it."""
    module = sys.modules.get(_MODULE)
    trainer = getattr(module, "GRPOTrainer", None)
    if trainer is None:
        return []
    logps_of = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
    return [
        MethodPatch(trainer, "_compute_loss", ("self", "model", "inputs"), _around_loss, "trl"),
        MethodPatch(trainer, "_get_per_token_logps_and_entropies", logps_of, _around_logps, "trl"),
    ]


# ------------------------------------------------------------------------------------------------ the two methods


def _around_loss(original: Callable[..., Any], trainer: Any, model: Any, inputs: Inputs) -> Any:
    controller = told(model)
    if controller is None:
        return original(trainer, model, inputs)
    note_accumulation(trainer, model)
    announce(trainer, controller, inputs)
    token = _in_progress.set(_LossInProgress(model, loss_mask(inputs)))
    try:
        return original(trainer, model, inputs)
    finally:
        _in_progress.reset(token)


def _around_logps(original: Callable[..., Any], trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(trainer, model, *args, **kwargs)
    controller, loss = told(model), _in_progress.get()
    if controller is None or loss is None or loss.model is not model:
        return result
    if not isinstance(result, tuple) or not result or not isinstance(result[0], Tensor):
        raise UnsupportedError(
            f"GRPOTrainer._get_per_token_logps_and_entropies of trl {installed_version('trl')} gave "
            f"{type(result).__name__}, ds_hilore knows a tuple that begins with log-probabilities; install a version "
            "of trl that ds_hilore knows (setup.py)"
        )
    logps = result[0]
    if logps.requires_grad:
        controller.observe(logps, loss.mask if loss.mask.shape == logps.shape else None)
    return result


# ------------------------------------------------------------------------------------------------ announcements


def announce(trainer: Any, controller: Controller, inputs: Inputs) -> None:
    """Tells the microbatch that comes next and, where TRL has all of them already, the whole update."""
    if controller.update == 0 and not controller.announced.begun:
        say_unaccounted(controller, unaccounted(trainer))
    window = _window(trainer, controller, inputs)
    if window is not None:
        controller.announce_update([facts_of(trainer, each) for each in window])
    elif not len(controller.announced):
        controller.announce_microbatch(facts_of(trainer, inputs))


def _window(trainer: Any, controller: Controller, inputs: Inputs) -> list[Inputs] | None:
    """All microbatches of the update that begins with `inputs`; None where it began before, or is not known whole.

    Source: `GRPOTrainer._prepare_inputs`: microbatch n is slice n % steps_per_generation of what was generated last,
    and new responses come every steps_per_generation * num_iterations microbatches.
    """
    steps = int(trainer.current_gradient_accumulation_steps)
    first = int(trainer._step)
    slices: list[Inputs] | None = trainer._buffered_inputs
    if controller.announced.begun or slices is None:
        return None
    generate_every = len(slices) * int(trainer.num_iterations)
    if any((first + ahead) % generate_every == 0 for ahead in range(1, steps)):
        return None
    window = [slices[(first + ahead) % len(slices)] for ahead in range(steps)]
    # Someone has put another microbatch in the place of TRL's own.
    return window if window[0] is inputs else None


def facts_of(trainer: Any, inputs: Inputs) -> MicrobatchFacts:
    """What TRL knows of a microbatch before its forward."""
    mask = loss_mask(inputs)
    divisor, per_row = update_divisor(trainer, inputs, mask)
    weights = _rollout_weights(trainer, inputs)
    if per_row is not None:
        weights = per_row if weights is None else weights * per_row
    exact = bool(unaccounted(trainer))
    return MicrobatchFacts(inputs["advantages"], mask, divisor, weights, exact_only=exact)


def loss_mask(inputs: Inputs) -> Tensor:
    """[B, T]: tokens with a loss."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def update_divisor(trainer: Any, inputs: Inputs, mask: Tensor) -> tuple[Tensor | float, Tensor | None]:
    """What the sum of token losses over the whole update is divided by, and a further factor [B, 1] of each row.

    A loss type that is not known here is taken to divide by its microbatch's tokens: forecasts are learnt to be off by
    a factor (planning/margin.py).

    Source: `GRPOTrainer._compute_loss`.
    """
    rows, microbatches = mask.shape[0], trainer.current_gradient_accumulation_steps * trainer.accelerator.num_processes
    loss_type = trainer.loss_type
    if loss_type in ("grpo", "sapo"):
        return float(rows * microbatches), 1 / mask.sum(1, keepdim=True).clamp(min=1)
    if loss_type == "luspo":
        return float(rows * microbatches), None
    if loss_type == "dr_grpo":
        return float(rows * microbatches * trainer.max_completion_length), None
    if loss_type in ("cispo", "dapo", "vespo"):
        share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
        if loss_type == "cispo":  # TRL's ratios end at epsilon_high itself, so most are above it by default
            share /= min(1.0, trainer.epsilon_high)
        return inputs["num_items_in_batch"].clamp(min=1.0) * share, None
    return mask.sum().clamp(min=1) * microbatches, None


def _rollout_weights(trainer: Any, inputs: Inputs) -> Tensor | None:
    """Importance weights of the rollout engine on the policy term, [B, 1] or [B, T]. VESPO has them in its own."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction) or trainer.loss_type == "vespo":
        return None
    weights: Tensor | None = inputs.get("importance_sampling_ratio")
    return weights


def unaccounted(trainer: Any) -> str:
    """What of the loss does not go through the log-probabilities; empty where nothing."""
    terms = ("entropy bonus", trainer._entropy_bonus_enabled), ("router's auxiliary loss", trainer.aux_loss_enabled)
    return ", ".join(name for name, present in terms if present)


def say_unaccounted(controller: Controller, terms: str) -> None:
    """Names what keeps plans from compressing although a gradient error is allowed."""
    if terms and controller.learning.risk.rules.limit > 0 and controller.parts.rank == 0:
        _log.warning("hilore: exact actions only: token coefficients do not hold the whole gradient (%s)", terms)


# ------------------------------------------------------------------------------------------------ the subclass


@cache
def _trainer_class() -> type:
    from trl import GRPOTrainer

    class HiLoReGRPOTrainer(GRPOTrainer):
        """GRPOTrainer whose DeepSpeed config may have a "hilore" block: `install()`, said by the name of the class."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from ds_hilore.integration.deepspeed_engine import install

            install()
            super().__init__(*args, **kwargs)

    return HiLoReGRPOTrainer


def __getattr__(name: str) -> Any:
    if name == "HiLoReGRPOTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
