"""Which controller a call belongs to: the engine whose forward runs, else the one whose forward ran last.

Context variables, so that two engines in one process, or engines in different threads, do not meet. Outside of any
engine the functions here do what the plain ones do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.grpo import GRPOLossConfig, token_coefficients
from ds_hilore.objective.grpo import grpo_loss as pure_loss
from ds_hilore.runtime.update import MicrobatchFacts, announced_microbatches

if TYPE_CHECKING:
    from ds_hilore.objective.update import Count, UpdateSize
    from ds_hilore.runtime.controller import Controller

_running: ContextVar[Controller | None] = ContextVar("ds_hilore_running", default=None)
_latest: ContextVar[weakref.ref[Controller] | None] = ContextVar("ds_hilore_latest", default=None)


@contextmanager
def forward_of(controller: Controller) -> Iterator[None]:
    """The forward of the controller's engine runs inside."""
    token = _running.set(controller)
    controller.begin_forward()
    try:
        yield
    finally:
        controller.end_forward()
        _running.reset(token)
        _latest.set(weakref.ref(controller))


@contextmanager
def beside(controller: Controller) -> Iterator[None]:
    """Units that are called inside belong to the controller, which is told of no forward: passes beside the engine."""
    token = _running.set(controller)
    try:
        yield
    finally:
        _running.reset(token)


def running() -> Controller | None:
    """The controller whose engine's forward is running in this context."""
    return _running.get()


def responsible(engine: Any = None) -> Controller | None:
    """The controller of `engine`; without one, the running or latest one of this context."""
    if engine is not None:
        controller: Controller | None = getattr(engine, "hilore", None)
        return controller
    controller = _running.get()
    if controller is not None:
        return controller
    latest = _latest.get()
    return None if latest is None else latest()


def grpo_loss(  # noqa: PLR0913  (the loss's own arguments, and the engine)
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: Count | UpdateSize,
    *,
    config: GRPOLossConfig,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
    engine: Any = None,
) -> Tensor:
    """This microbatch's share of the update's GRPO loss; its token coefficients go to the engine that ran the forward.

    Arguments, result and errors of `objective.grpo.grpo_loss`. Multiply the result by data-parallel ranks times
    accumulation steps before `engine.backward` (by the ranks alone with `scale_wrt_gas=False`). `engine`: needed only
    where several engines run forwards before the loss.
    """
    controller = responsible(engine)
    if controller is not None and logps.requires_grad:
        omega = token_coefficients(
            logps, old_logps, advantages, mask, num_tokens, config=config, ref_logps=ref_logps, weights=weights
        )
        controller.note_coefficients(omega, mask)
    return pure_loss(
        logps, old_logps, advantages, mask, num_tokens, config=config, ref_logps=ref_logps, weights=weights
    )


def observe_logps(logps: Tensor, mask: Tensor | None = None, *, engine: Any = None) -> Tensor:
    """For losses that are not ours: reads the token coefficients as the gradient at `logps` [B, T] in backward.

    Gives `logps` back. Outside of any engine, and under `torch.no_grad`, nothing happens. A microbatch may have several
    of them; observe only what its loss uses: until the gradient of each has come, nothing is compressed.

    Raises:
        UsageError: log-probabilities without a gradient, or shapes that do not fit.

    Source: design section 5, "The loss hook". Never differentiate the engine's outputs yourself
    (`autograd.grad(loss, logps)`): that fires DeepSpeed's backward hooks.
    """
    controller = responsible(engine)
    if controller is not None and torch.is_grad_enabled():
        controller.observe(logps, mask)
    return logps


def begin_update(
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    num_tokens: Tensor | float,
    weights: Sequence[Tensor] | None = None,
    *,
    exact_only: bool = False,
    engine: Any = None,
) -> None:
    """Tells all microbatches of this rank's next update, where the host knows them (GRPO does).

    Args:
        advantages: per microbatch, [B], [B, 1] or [B, T].
        masks: per microbatch, [B, T]; true where a token is optimised.
        num_tokens: N of the whole update over all ranks (`objective.update.count_update_tokens`).
        weights: per microbatch, importance weights of the rollout engine.
        exact_only: the loss has parts that do not go through log-probabilities (an entropy bonus, a router's auxiliary
            loss), so nothing may be compressed.

    Raises:
        UsageError: lists of different lengths, shapes that do not fit, or no engine to tell.
    """
    facts = announced_microbatches(advantages, masks, num_tokens, weights, exact_only)
    _told(engine, "begin_update").announce_update(facts)


def begin_microbatch(
    advantages: Tensor,
    mask: Tensor,
    num_tokens: Tensor | float,
    weights: Tensor | None = None,
    *,
    exact_only: bool = False,
    engine: Any = None,
) -> None:
    """Tells one microbatch before its forward; shapes, `exact_only` and errors as `begin_update`."""
    facts = MicrobatchFacts(advantages, mask, num_tokens, weights, exact_only)
    _told(engine, "begin_microbatch").announce_microbatch(facts)


def _told(engine: Any, name: str) -> Controller:
    controller = responsible(engine)
    if controller is None:
        raise UsageError(
            f"{name}: no engine with a hilore block is known here yet; pass engine=, the one that runs the update"
        )
    return controller


def claim(controller: Controller) -> None:
    """A new engine is the one that is meant until another one runs."""
    _latest.set(weakref.ref(controller))
