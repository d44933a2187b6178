"""Ways to recover the saved state of decoder layers, side by side in one engine."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
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

NONE, TORCH, TORCH_LOGITS = Case("none"), Case("torch"), Case("torch+logits")
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


class Suffix(str, enum.Enum):
    """What may follow a method's name, after a "+" each: the same method under other circumstances."""

    LOGITS = "logits"  # the loss makes whole logits, as many loops still do
    PRUNE = "prune"  # dead rows are skipped: hilore is told of them, all others run without them (as CUT)
    CUT = "cut"  # the caller leaves dead rows out before the forward; what they would have given is not known


def base_of(method: str) -> str:
    """The method without its suffixes."""
    return method.partition("+")[0]


def suffixes(method: str) -> frozenset[Suffix]:
    """
    Raises:
        ValueError: one is not known.
    """
    return frozenset(Suffix(suffix) for suffix in method.split("+")[1:])


def like(base: str, method: str) -> Case:
    """A method without a budget, under the circumstances of another: "torch" and "best_k_layers+logits" give
    "torch+logits"."""
    return Case(base + method[len(base_of(method)) :])


def is_hilore(method: str) -> bool:
    return base_of(method) in HILORE_FORCED or base_of(method) in HILORE_PLANNED


def is_budgeted(method: str) -> bool:
    """Whether a method is measured under each budget."""
    return base_of(method) in TUNED_METHODS or base_of(method) in HILORE_PLANNED


def announces(method: str) -> bool:
    """Whether the engine is told which rows of a microbatch are live."""
    return is_hilore(method) and Suffix.PRUNE in suffixes(method)


def runs_live_rows_only(method: str) -> bool:
    """Whether dead rows are not in the microbatch at all."""
    given = suffixes(method)
    return Suffix.CUT in given or (Suffix.PRUNE in given and not is_hilore(method))


def check_method(method: str) -> None:
    """
    Raises:
        ValueError: there is no such method, or no such suffix.
    """
    known = [suffix.value for suffix in Suffix]
    if base_of(method) not in METHODS or not set(method.split("+")[1:]) <= set(known):
        raise ValueError(f"no such method: {method}; known: {', '.join(METHODS)}, each with +{', +'.join(known)}")


def planned_mode(method: str) -> Mode | None:
    """The mode in which the engine plans for a method; None where it does not. A suffix changes no mode."""
    return HILORE_PLANNED.get(base_of(method))


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
    elif base_of(case.method) in HILORE_FORCED:
        hilore.force(HILORE_FORCED[base_of(case.method)])
        try:
            yield
        finally:
            hilore.force(None)
    elif base_of(case.method) == NONE.method:
        with hilore.paused():
            yield
    else:
        with hilore.host_checkpointing(_checkpoint_function(case, layer_count(engine))):
            yield


def _checkpoint_function(case: Case, layers: int) -> Callable[..., Any]:
    """What a method that knows nothing of hilore calls in place of each layer."""
    if base_of(case.method) == "deepspeed":
        return deepspeed_checkpoint()
    chosen = selective_checkpoint(case.policy) if base_of(case.method) == SELECTIVE and case.kept else _plain_call
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
    if base_of(method) != "every_n_layers":
        return [tuple(range(keep)), tuple(range(layers - keep, layers))]
    every = [n for n in range(1, layers + 1) if layers - len(range(0, layers, n)) == keep]
    return [tuple(layer for layer in range(layers) if layer % n) for n in every[:1]]


def plainest(case: Case, layers: int) -> Case:
    """The case that does exactly the same, with no budget to tell apart what budgets make alike.

    A tuned method that keeps no layer is torch's checkpointing, and one that keeps all state of all layers is none.
    """
    if base_of(case.method) not in TUNED_METHODS:
        return case
    if not case.kept:
        return like(TORCH.method, case.method)
    if len(case.kept) == layers and base_of(case.method) != SELECTIVE:
        return like(NONE.method, case.method)
    return dataclasses.replace(case, budget=None, budget_bytes=None)


def actions(case: Case, layers: int) -> str:
    """One letter per layer of a method that knows nothing of hilore: H kept, S kept in part by a policy, R replayed."""
    chosen = "S" if base_of(case.method) == SELECTIVE else "H"
    kept = range(layers) if base_of(case.method) == NONE.method else case.kept
    return "".join(chosen if layer in kept else "R" for layer in range(layers))
