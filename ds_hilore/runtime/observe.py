"""Reading the gradient at log-probabilities, at the start of the backward that the host runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ds_hilore.core.errors import UsageError

OptionalTensor = TypeVar("OptionalTensor", Tensor, "Tensor | None")


def check_observable(logps: Tensor, mask: Tensor | None) -> None:
    """Refuses what could only fail later, in the middle of a backward.

    Raises:
        UsageError: no gradient reaches `logps`, or shapes do not fit.
    """
    if not logps.requires_grad:
        raise UsageError(
            "observe_logps: these log-probabilities carry no gradient; pass the ones that the loss is made from, "
            "in a forward with grad"
        )
    if logps.dim() not in (1, 2):
        raise UsageError(
            f"observe_logps: log-probabilities of shape {tuple(logps.shape)}; give one per token, [rows, tokens] or "
            "[tokens]"
        )
    if mask is not None and mask.shape != logps.shape:
        raise UsageError(
            f"observe_logps: the mask has shape {tuple(mask.shape)}, the log-probabilities {tuple(logps.shape)}; "
            "give one entry per log-probability"
        )


def call_with_gradient(tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
    """Calls `receive` in backward with the whole gradient at `tensor`, before anything behind it runs.

    What hooks on the tensor itself made of the gradient is in it, whether they were registered before or after: a hook
    on the node runs after them. So where the tensor is an output of the engine, DeepSpeed has divided already.
    """
    node = tensor.grad_fn
    if node is None:  # a leaf: no unit is behind it
        tensor.register_hook(receive)
        return
    number = tensor.output_nr

    def pick(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None:
            receive(gradient)

    node.register_prehook(pick)  # must not hold the node: that circle through C++ is never collected


def as_rows(tensor: OptionalTensor) -> OptionalTensor:
    """[T] as the only row of [1, T]."""
    return tensor[None] if tensor is not None and tensor.dim() == 1 else tensor
