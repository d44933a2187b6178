"""Replay without dead work (design fact 14).

Under LoRA, peft computes `base_layer(x)` before `lora_A(x)`: even with early stop, each replay runs the unit's last
frozen projection although nothing that backward needs depends on it: 27 to 29 % of a layer's matrix products on 3B to
8B shapes. Such calls are skipped only where two things hold for the unit class, in the running job:

1. no recovered tensor has the call's output among its ancestors in the autograd graph of a full replay (structure);
2. replays in which the call is skipped and its output is NaN, infinity and minus infinity recover every tensor bit
   for bit (data: catches what autograd does not see, such as indices, and comparisons that one of them passes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ds_hilore.recovery.bundle import SlotMeta, Value, peek, same_bits
from ds_hilore.recovery.replay import Replay, ReplaySource, Site, SiteTrace

#: What a skipped call gives back in the trials.
POISONS = (float("nan"), float("inf"), float("-inf"))
#: Kinds of calls of one unit class that are looked at. Where the data decides what is saved (experts that are hit),
#: there would be no end of them.
MAX_KINDS = 16

ClassKey = tuple[str, tuple[torch.dtype | None, ...]]


class DeadWork:
    """Which calls are dead, per unit class; proven at the first replay of the class. One per controller."""

    def __init__(self, enabled: bool = True, report: Callable[[str, frozenset[Site]], None] | None = None) -> None:
        self.enabled = enabled
        self.proven: dict[ClassKey, frozenset[Site]] = {}
        self._report = report

    def replay(self, source: ReplaySource) -> list[Value | None]:
        """Recovers all slots of a call, without its dead work where that is proven."""
        module = source.inputs.module
        if not self.enabled or module is None:
            return Replay(source).run()
        key = class_key(source.unit_class, source.metas)
        dead = self.proven.get(key)
        if dead is None:
            if sum(1 for unit_class, _ in self.proven if unit_class == source.unit_class) >= MAX_KINDS:
                return Replay(source).run()
            return self._prove(key, source, module)
        return Replay(source, dead if _still_frozen(module, dead) else frozenset()).run()

    def names(self, unit_class: str, module: nn.Module) -> list[str]:
        """Submodules whose first call is dead in every kind of call of the class that was looked at."""
        kinds = [dead for (name, _), dead in self.proven.items() if name == unit_class]
        if not self.enabled or not kinds:
            return []
        dead = frozenset.intersection(*kinds)
        return sorted(site.module for site in dead if site.call == 0) if _still_frozen(module, dead) else []

    def _prove(self, key: ClassKey, source: ReplaySource, module: nn.Module) -> list[Value | None]:
        full = Replay(source)
        slots = full.run(traced=_frozen_projections(module))
        candidates = frozenset(_unreached(full.trace)) if full.trace is not None else frozenset()
        full.trace = None  # its nodes hold the replay's handles, which hold the replay: a cycle that gc cannot see
        if _equal_without(source, candidates, slots):
            dead = candidates
        else:
            dead = frozenset(site for site in candidates if _equal_without(source, frozenset({site}), slots))
            if not _equal_without(source, dead, slots):
                dead = frozenset()
        self.proven[key] = dead
        if self._report is not None:
            self._report(source.unit_class, dead)
        return slots


def class_key(unit_class: str, metas: Sequence[SlotMeta | None]) -> ClassKey:
    """Calls of one class that save the same kinds of tensors in the same order are the same computation."""
    return unit_class, tuple(None if meta is None else meta.dtype for meta in metas)


def _frozen_projections(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_modules() if name and _is_frozen_projection(child)]


def _is_frozen_projection(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
        return False
    return not any(parameter.requires_grad for parameter in module.parameters())


def _still_frozen(module: nn.Module, dead: frozenset[Site]) -> bool:
    return all(_is_frozen_projection(module.get_submodule(site.module)) for site in dead)


def _unreached(trace: SiteTrace) -> Iterable[Site]:
    """Sites whose output is no ancestor of any recovered slot. A site without a node proves nothing."""
    reached: set[Any] = set()
    stack = [node for node in trace.slots if node is not None]
    while stack:
        node = stack.pop()
        if node in reached:
            continue
        reached.add(node)
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return (site for site, node in trace.outputs.items() if node is not None and node not in reached)


def _equal_without(source: ReplaySource, skip: frozenset[Site], slots: list[Value | None]) -> bool:
    return not skip or all(_equal_with(source, skip, poison, slots) for poison in POISONS)


def _equal_with(source: ReplaySource, skip: frozenset[Site], poison: float, slots: list[Value | None]) -> bool:
    try:
        trial = Replay(source, skip, poison).run()
    except Exception:  # whatever model code makes of the poison: the call is needed
        return False
    return all(
        (ours is None) == (theirs is None) and (ours is None or theirs is None or same_bits(peek(ours), peek(theirs)))
        for ours, theirs in zip(trial, slots, strict=True)
    )
