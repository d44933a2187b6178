"""Mixture-of-experts units: a replay takes the forward's own routing (design fact 17).

Near a tie, a replay whose router differs in the last bit could choose another expert, and every saved tensor behind
it would belong to another computation. So the indices that `torch.topk` gave in forward are kept (a few integers per
token), and in replay they are forced, in the same order: the same operation runs on ranks in place of scores, and its
values are then read from the replay's own scores. The host's own router-replay state is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ROUTER_NAMES = ("moe", "router", "experts", "topk", "sparsemlp")
_TOPK = (torch.topk, Tensor.topk)


def has_router(module: nn.Module | None) -> bool:
    """Whether the unit holds a mixture of experts, judged by the class names of its children."""
    if module is None:
        return False
    return any(any(word in type(child).__name__.lower() for word in _ROUTER_NAMES) for child in module.modules())


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module is under torch.compile, by either of its two ways."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def tells_choices(module: nn.Module | None) -> bool:
    """Whether the unit makes choices that a tape can take down.

    Those of a router under torch.compile are part of its graph: under a tape, which is a mode, it would be compiled
    anew, and save other tensors in replay than in forward. Without one the same kernels choose again.
    """
    if module is None or not has_router(module):
        return False
    return not any(is_compiled(child) and has_router(child) for child in module.modules())


class RoutingTape:
    """The top-k choices of one unit call, in the order in which they were made."""

    def __init__(self) -> None:
        self.choices: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _Recorder(self.choices):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        with _Forcer(self.choices):
            yield


class _Recorder(TorchFunctionMode):
    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self.choices = choices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.choices.append(result[1])
        return result


class _Forcer(TorchFunctionMode):
    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self.choices = iter(choices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        chosen = next(self.choices, None)
        if chosen is None:
            return func(*args, **kwargs)
        return _forced_topk(chosen, *args, **kwargs)


def _forced_topk(
    chosen: Tensor, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> torch.return_types.topk:
    """`torch.topk` (its own argument names) that gives the indices `chosen`, and the scores found there.

    It saves what topk saves, and its values stay in the autograd graph of the scores, for the search for dead work.
    """
    ranks = _Ranks.apply(input, chosen, dim)
    with torch.no_grad():
        values = input.gather(dim, chosen)
    result = torch.topk(ranks, k, dim, True, True)
    return torch.return_types.topk((_Instead.apply(result.values, values), result.indices))


class _Ranks(torch.autograd.Function):
    """For each chosen entry of the scores how early it was chosen (greatest first), 0 for all others."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor, dim: int) -> Tensor:
        count = chosen.shape[dim]
        shape = [1] * chosen.dim()
        shape[dim] = count
        # in float32 whatever the scores are: bfloat16 cannot tell ranks beyond 256 apart
        order = torch.arange(count, 0, -1, dtype=torch.float32, device=scores.device).view(shape)
        return torch.zeros_like(scores, dtype=torch.float32).scatter(dim, chosen, order.expand_as(chosen))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a replay's own graph is never differentiated")


class _Instead(torch.autograd.Function):
    """`values`, at the place of `ranks` in the graph. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, ranks: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a replay's own graph is never differentiated")
