"""Ways to recover the saved state of decoder layers, side by side in one engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.utils.checkpoint import checkpoint

from benchmarks.records import Case
from benchmarks.selective import selective_checkpoint
from ds_hilore.core.config import Mode
from ds_hilore.core.treatment import REPLAYED, STORED, Treatment
from ds_hilore.core.types import Action
from ds_hilore.integration.checkpoint import deepspeed_checkpoint

torch_checkpoint = partial(checkpoint, use_reentrant=False)

NONE, TORCH = Case("none"), Case("torch")
#: torch's selective activation checkpointing, with the best fixed policy.
SELECTIVE = "torch_sac"

#: Methods without a budget, in the order of the report.
PLAIN_METHODS = (NONE.method, TORCH.method, "deepspeed")
#: Alternatives that keep as much as the budget allows, and are tuned to it.
TUNED_METHODS = ("every_n_layers", "best_k_layers", SELECTIVE)
HILORE_FORCED: Mapping[str, Treatment] = MappingProxyType(
    {"hilore_all_R": REPLAYED, "hilore_all_A": Treatment.parse("R:attention"), "hilore_all_H": STORED}
)
#: Our kinds of replay, and the method in which every layer is replayed so.
HILORE_REPLAYS: Mapping[str, str] = MappingProxyType({"hilore": "hilore_all_R", "hilore_attention": "hilore_all_A"})
#: Methods that follow the engine's own plan, and the mode in which it plans.
HILORE_PLANNED: Mapping[str, Mode] = MappingProxyType(
    {
        "hilore_exact": Mode.EXACT,
        "hilore_update_aware": Mode.UPDATE_AWARE,
        "hilore_static_risk": Mode.STATIC_RISK,
        "hilore_paper": Mode.PAPER,
    }
)
#: Methods that run only where they are asked for: compression has to be calibrated first.
LOSSY = ("hilore_update_aware", "hilore_static_risk", "hilore_paper")
METHODS = (*PLAIN_METHODS, *TUNED_METHODS, *HILORE_FORCED, *HILORE_PLANNED)


def planned_mode(method: str) -> Mode | None:
    """The mode in which the engine plans for a method; None where it does not. A suffix ("+...") changes no mode."""
    return HILORE_PLANNED.get(method.partition("+")[0])


def needs_paper_engine(method: str) -> bool:
    """Whether the method is another engine's: all others plan, measure and replay with what mode paper has not."""
    return planned_mode(method) is Mode.PAPER


def letter(treatment: Treatment) -> str:
    """H kept, L compressed, R replayed, A replayed but for the attention kernel, whose outputs are kept."""
    return "A" if treatment.keeps and treatment.action is Action.RECOMPUTE else treatment.action.letter


@contextlib.contextmanager
def applied(engine: Any, case: Case) -> Iterator[None]:
    """Inside, the engine's updates recover state as `case` says."""
    hilore = engine.hilore
    mode = planned_mode(case.method)
    if mode is not None:
        hilore.parts.planner.set_budget(case.budget_bytes)
        risk = hilore.learning.risk
        configured = risk.rules
        risk.rules = dataclasses.replace(
            configured, limit=0.0 if mode is Mode.EXACT else configured.limit, static=mode is Mode.STATIC_RISK
        )
        try:
            yield
        finally:
            risk.rules = configured
    elif case.method in HILORE_FORCED:
        hilore.force(HILORE_FORCED[case.method])
        try:
            yield
        finally:
            hilore.force(None)
    elif case.method == NONE.method:
        with hilore.paused():
            yield
    else:
        with hilore.host_checkpointing(_checkpoint_function(case, layer_count(engine))):
            yield


def _checkpoint_function(case: Case, layers: int) -> Callable[..., Any]:
    """What a method that knows nothing of hilore calls in place of each layer."""
    if case.method == "deepspeed":
        return deepspeed_checkpoint()
    chosen = selective_checkpoint(case.policy) if case.method == SELECTIVE and case.kept else _plain_call
    return ByLayer(frozenset(case.kept), chosen, torch_checkpoint, layers)


def _plain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class ByLayer:
    """One checkpoint function for some layers, one for all others. Layers are counted in their order of calls."""

    def __init__(
        self, chosen: frozenset[int], for_chosen: Callable[..., Any], for_others: Callable[..., Any], layers: int
    ) -> None:
        self._chosen = chosen
        self._for_chosen = for_chosen
        self._for_others = for_others
        self._layers = layers
        self._calls = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self._calls % self._layers
        self._calls += 1
        run = self._for_chosen if layer in self._chosen else self._for_others
        return run(function, *args, **kwargs)


def layer_count(engine: Any) -> int:
    return len(engine.hilore.parts.unit_names)


def kept_layers(method: str, keep: int, layers: int) -> list[tuple[int, ...]]:
    """Which layers a tuned method keeps when it keeps about `keep` of them; one entry per way to do that.

    transformers' `every_n_layers=n` checkpoints layers 0, n, 2n, ...
    """
    if method != "every_n_layers":
        return [tuple(range(keep)), tuple(range(layers - keep, layers))]
    every = [n for n in range(1, layers + 1) if layers - len(range(0, layers, n)) == keep]
    return [tuple(layer for layer in range(layers) if layer % n) for n in every[:1]]


def plainest(case: Case, layers: int) -> Case:
    """The case that does exactly the same, with no budget to tell apart what budgets make alike.

    A tuned method that keeps no layer is torch's checkpointing, and one that keeps all state of all layers is none.
    """
    if case.method not in TUNED_METHODS:
        return case
    if not case.kept:
        return TORCH
    if len(case.kept) == layers and case.method != SELECTIVE:
        return NONE
    return dataclasses.replace(case, budget=None, budget_bytes=None)


def actions(case: Case, layers: int) -> str:
    """One letter per layer of a method that knows nothing of hilore: H kept, S kept in part by a policy, R replayed."""
    chosen = "S" if case.method == SELECTIVE else "H"
    kept = range(layers) if case.method == NONE.method else case.kept
    return "".join(chosen if layer in kept else "R" for layer in range(layers))
