"""Ways to recover the saved state of decoder layers, side by side in one engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.records import Case
from ds_hilore.core.types import Action

torch_checkpoint = partial(checkpoint, use_reentrant=False)

#: Methods without a budget, in the order of the report.
PLAIN_METHODS = ("none", "torch", "deepspeed")
#: Alternatives that keep as many layers as the budget allows, and are tuned to it.
TUNED_METHODS = ("every_n_layers", "best_k_layers")
HILORE_FORCED = {"hilore_all_R": Action.RECOMPUTE, "hilore_all_H": Action.STORE}
HILORE_PLANNED = ("hilore_exact",)
METHODS = (*PLAIN_METHODS, *TUNED_METHODS, *HILORE_FORCED, *HILORE_PLANNED)


@contextlib.contextmanager
def applied(engine: Any, case: Case) -> Iterator[None]:
    """Inside, the engine's updates recover state as `case` says."""
    hilore = engine.hilore
    if case.method in HILORE_PLANNED:
        hilore.parts.planner.set_budget(case.budget_bytes)
        yield
    elif case.method in HILORE_FORCED:
        hilore.force(HILORE_FORCED[case.method])
        try:
            yield
        finally:
            hilore.force(None)
    elif case.method == "none":
        with hilore.paused():
            yield
    else:
        function = deepspeed_checkpoint() if case.method == "deepspeed" else torch_checkpoint
        with hilore.host_checkpointing(KeepLayers(function, frozenset(case.kept), layer_count(engine))):
            yield


class KeepLayers:
    """A checkpoint function that leaves the state of some layers alone. Layers are counted in their order of calls."""

    def __init__(self, function: Callable[..., Any], kept: frozenset[int], layers: int) -> None:
        self._function = function
        self._kept = kept
        self._layers = layers
        self._calls = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self._calls % self._layers
        self._calls += 1
        if layer in self._kept:
            return function(*args, **kwargs)
        return self._function(function, *args, **kwargs)


def deepspeed_checkpoint() -> Callable[..., Any]:
    """DeepSpeed's own checkpoint function, under our patch of it.

    It is reentrant: without an input that needs a gradient (LoRA on a frozen embedding) nothing would be
    differentiated, so the first layer's input is made to need one, as `enable_input_require_grads` does.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    original = getattr(checkpointing.checkpoint, "_hilore_original", checkpointing.checkpoint)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if isinstance(first, Tensor) and not first.requires_grad:
            args = (first.detach().requires_grad_(), *args[1:])
        return original(partial(function, **kwargs), *args)

    return run


def layer_count(engine: Any) -> int:
    return len(engine.hilore.parts.unit_names)


def kept_layers(method: str, keep: int, layers: int) -> list[tuple[int, ...]]:
    """Which layers a tuned method keeps when it keeps about `keep` of them; one entry per way to do that.

    transformers' `every_n_layers=n` checkpoints layers 0, n, 2n, ...
    """
    if method == "best_k_layers":
        return [tuple(range(keep)), tuple(range(layers - keep, layers))]
    every = [n for n in range(1, layers + 1) if layers - len(range(0, layers, n)) == keep]
    return [tuple(layer for layer in range(layers) if layer % n) for n in every[:1]]
