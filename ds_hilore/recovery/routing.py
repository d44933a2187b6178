"""Mixture-of-experts units: a replay takes the forward's own routing (design fact 17).

Near a tie, a replay whose router differs in the last bit could choose another expert, and every saved tensor behind
it would belong to another computation. So the indices that `torch.topk` gave in forward are kept (a few integers per
token), and in replay they are forced: all other entries of the router's scores are lowered before the same operation
runs. The host's own router-replay state is not touched.
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


class RoutingTape:
    """The top-k choices of one unit call, in the order in which they were made."""

    def __init__(self) -> None:
        self._choices: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _Recorder(self._choices):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        with _Forcer(self._choices):
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
        scores, *rest = args
        dim = kwargs.get("dim", rest[1] if len(rest) > 1 else -1)
        largest = kwargs.get("largest", rest[2] if len(rest) > 2 else True)
        return func(_only_these(scores, chosen, dim, largest), *rest, **kwargs)


def _only_these(scores: Tensor, chosen: Tensor, dim: int, largest: bool) -> Tensor:
    """`scores` with every entry that was not chosen pushed out of reach, as a tensor that asks for a gradient alike.

    It is cut from the replay's graph, which is thrown away: only the values that the replay saves matter.
    """
    with torch.no_grad():
        out_of_reach = float("-inf") if largest else float("inf")
        forced = torch.full_like(scores, out_of_reach).scatter(dim, chosen, scores.gather(dim, chosen))
    return forced.requires_grad_(scores.requires_grad)
