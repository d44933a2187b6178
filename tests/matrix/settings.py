"""The settings that users combine, and cells in which every possible pair of them occurs.

A cell has one value on each axis. All of them together would be tens of thousands; a pairwise covering array (from
allpairspy, the same each time) has a few dozen, and what goes wrong in software goes wrong with two settings at once
nearly always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

#: quantised: bitsandbytes' 4-bit layers, frozen, under LoRA. autocast: DeepSpeed's `torch_autocast` to bfloat16.
#: compiled: `module.compile()` of each layer's MLP.
AXES: dict[str, tuple[str, ...]] = {
    "family": ("llama", "qwen2", "qwen3_moe", "qwen3_next", "phi3", "gemma3", "mistral", "qwen2_5_vl"),
    "zero": ("0", "1", "2", "3"),
    "offload": ("none", "optimizer", "parameters"),
    "training": ("lora", "full", "quantised"),
    "precision": ("fp32", "bf16", "autocast"),
    "accumulation": ("1", "4"),
    "attention": ("eager", "sdpa"),
    "dropout": ("0", "0.1"),
    "compiled": ("nothing", "mlp"),
}

Cell = dict[str, str]
#: One value on each of two axes.
Pair = tuple[tuple[str, str], tuple[str, str]]

#: Pairs that the host does not have, with the reason.
IMPOSSIBLE: dict[Pair, str] = {
    (("zero", "0"), ("offload", "optimizer")): "DeepSpeed offloads shards only",
    (("zero", "0"), ("offload", "parameters")): "DeepSpeed offloads parameters under ZeRO-3 only",
    (("zero", "1"), ("offload", "parameters")): "DeepSpeed offloads parameters under ZeRO-3 only",
    (("zero", "2"), ("offload", "parameters")): "DeepSpeed offloads parameters under ZeRO-3 only",
}


def pairs(cell: Mapping[str, str]) -> list[Pair]:
    """The pairs of settings in a cell, or in the axes that it has so far, in the order of `AXES`."""
    return list(combinations([(axis, cell[axis]) for axis in AXES if axis in cell], 2))


def all_pairs() -> list[Pair]:
    """Every pair that the host has."""
    found = [
        ((one, first), (other, second))
        for one, other in combinations(AXES, 2)
        for first in AXES[one]
        for second in AXES[other]
    ]
    return [pair for pair in found if pair not in IMPOSSIBLE]


def cells() -> list[Cell]:
    """A pairwise covering array without impossible pairs."""
    from allpairspy import AllPairs

    def possible(values: Sequence[str]) -> bool:
        return not any(pair in IMPOSSIBLE for pair in pairs(dict(zip(AXES, values))))

    found = [dict(zip(AXES, values)) for values in AllPairs(list(AXES.values()), filter_func=possible)]
    for pair in all_pairs():  # those that it drops where what it has chosen before leaves no possible cell
        if not any(pair in pairs(cell) for cell in found):
            found.append(_filled(dict(pair)))
    return found


def _filled(chosen: Cell) -> Cell:
    """A cell with these values, and on each other axis the first that makes no impossible pair."""
    for axis, values in AXES.items():
        if axis not in chosen:
            fits = (v for v in values if not any(pair in IMPOSSIBLE for pair in pairs({**chosen, axis: v})))
            chosen[axis] = next(fits)
    return {axis: chosen[axis] for axis in AXES}


def name(cell: Mapping[str, str]) -> str:
    return "-".join(cell[axis] for axis in AXES)
