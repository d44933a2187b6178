"""Recipes: saved tensors that are functions of other saved tensors (design facts 11 and 12).

A SwiGLU layer saves gate, silu(gate), up and their product; two of the four need not be held. The `grad_fn` of a
tensor that is being saved names the operation that made it and, through `_raw_saved_*`, what our own pack hook
returned for its operands; operands that were never saved are reached through `next_functions`.

A recipe is used only after it was proven in the running job: at its first occurrence in a unit class it is evaluated
on the spot and must give the saved tensor bit for bit, with the same strides (strides choose kernels in backward). A
tensor that was written in place is never derived: its node does not tell of edits under `no_grad`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from ds_hilore.recovery.bundle import (
    Derived,
    Geometry,
    Handle,
    Kept,
    Number,
    ParameterRef,
    Value,
    peek,
    raw_saved,
    same_bits,
)
from ds_hilore.recovery.rules import COSTLY, RULES, Edge

#: Chains of unsaved intermediates longer than this are not followed: evaluating them would cost what replay costs.
MAX_DEPTH = 12
#: A tensor smaller than this many bytes is held, not derived: an operation costs more than its memory.
MIN_DERIVED_BYTES = 4096


class RecipeProofs:
    """What was proven in this job, shared by all calls of one controller.

    Args:
        enabled: whether anything is derived at all; else every saved tensor is held as it is.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._names: dict[tuple[Any, ...], int] = {}
        self.proven: dict[tuple[Hashable, int, int], bool] = {}
        #: slots of a kind of call for which no recipe was found, so that none is looked for again
        self.hopeless: set[tuple[Hashable, int, str, bool]] = set()
        #: of fused norms: by weight, because layers of one class may differ in it; by place where there is no weight
        self.epsilons: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.epsilons_without_weight: dict[tuple[Hashable, int], float] = {}

    def signature(self, *parts: Any) -> int:
        """A small number for how a value is made, so that signatures of nested recipes stay cheap to compare."""
        return self._names.setdefault(parts, len(self._names))

    def epsilon_of(self, weight: Parameter | None, place: tuple[Hashable, int]) -> float | None:
        """What is known of a fused norm's epsilon."""
        return self.epsilons_without_weight.get(place) if weight is None else self.epsilons.get(weight)

    def note_epsilon(self, weight: Parameter | None, place: tuple[Hashable, int], epsilon: float) -> None:
        if weight is None:
            self.epsilons_without_weight[place] = epsilon
        else:
            self.epsilons[weight] = epsilon

    def rejected(self) -> int:
        return sum(1 for good in self.proven.values() if not good)


class BundleBuilder:
    """Decides for each tensor that one unit call saves whether to hold it or its recipe.

    Lives for one forward (or replay) of one unit only: it holds autograd nodes, hence the graph.
    """

    def __init__(
        self, proofs: RecipeProofs, unit_class: str, inputs: list[Tensor], owner: object, *, short_lived: bool = False
    ) -> None:
        """`short_lived`: the bundle of a replay. It is used up at once, so only recipes that lower the peak of the
        unit's backward are worth their time: those of its norms (design fact 13)."""
        self.proofs = proofs
        self.short_lived = short_lived
        # Calls of one class whose inputs differ in needing gradients (the first layer's, over a frozen embedding) save
        # other tensors in the same places: what is found for one says nothing of the other.
        self.kind = (unit_class, *[tensor.requires_grad for tensor in inputs])
        self.owner = owner
        self._width = max((tensor.numel() for tensor in inputs if tensor.is_floating_point()), default=0)
        self._values: dict[Edge, Value] = {}  # what is held for an output that was saved, or is a unit input
        self._intermediates: dict[Edge, Derived] = {}  # outputs that were only passed through; not proven by themselves
        for position, tensor in enumerate(inputs):
            if tensor.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                self._values[(edge.node, edge.output_nr)] = Kept(tensor, proofs.signature("input", position))

    def hold(self, tensor: Tensor, slot: int) -> Value:
        """The value for a tensor that is being saved into position `slot`."""
        node = tensor.grad_fn
        if node is None:
            return Kept(tensor, self.proofs.signature("slot", slot))
        edge = (node, tensor.output_nr)
        known = self._values.get(edge)
        if type(known) is Derived:
            if tensor._version == 0:
                known.uses += 1
                return known
        elif type(known) is Kept and known.version == tensor._version:
            return known
        value = self._values[edge] = self._derive(tensor, edge, slot) or Kept(
            tensor, self.proofs.signature("slot", slot)
        )
        return value

    def _worth_deriving(self, tensor: Tensor) -> bool:
        if not self.proofs.enabled:
            return False
        if self.short_lived and tensor.numel() > self._width:
            return False  # an MLP's wide tensors are used up before the backward of its product, where the peak is
        return tensor.numel() * tensor.element_size() >= MIN_DERIVED_BYTES

    # -- deriving one saved tensor ---------------------------------------------------------------------------------

    def _derive(self, tensor: Tensor, edge: Edge, slot: int) -> Derived | None:
        place = (self.kind, slot, edge[0].name(), self.short_lived)
        if place in self.proofs.hopeless or tensor._version != 0 or not self._worth_deriving(tensor):
            return None
        derived = self._view(tensor) if tensor._is_view() else self._resolve(edge, 0)
        if type(derived) is not Derived:
            self.proofs.hopeless.add(place)
            return None
        key = (self.kind, slot, derived.signature)
        good = self.proofs.proven.get(key)
        if good is None:
            good = self.proofs.proven[key] = _is_bitwise(derived, tensor)
        if not good:
            return None
        derived.stride = tensor.stride()
        derived.uses += 1
        return derived

    def _view(self, tensor: Tensor) -> Value | None:
        """A view of a tensor that can be derived is a view of the derived one."""
        base = tensor._base
        if base is None or base.grad_fn is None:
            return None
        root = self._resolve((base.grad_fn, base.output_nr), 0)
        if type(root) is not Derived:
            return None
        root.stride = base.stride()  # the geometry counts in the base's own layout
        geometry = Geometry.of(tensor, base)
        # the geometry follows the batch's shape, so it is not part of the signature
        return Derived(geometry.apply, (root,), self.proofs.signature("view", root.signature))

    def _resolve(self, edge: Edge, depth: int) -> Value | None:
        """The value of one output of a node, saved or not; None where it cannot be had from what is held."""
        known = self._values.get(edge) or self._intermediates.get(edge)
        if known is not None:
            return known
        node = edge[0]
        if depth > MAX_DEPTH or node is None:
            return None
        kind = node.name()
        rule = None if self.short_lived and kind in COSTLY else RULES.get(kind)
        match = rule(self, node, edge, depth) if rule is not None else None
        if match is None:
            return None
        name, operation, operands = match
        signature = self.proofs.signature(name, *[operand.signature for operand in operands])
        derived = self._intermediates[edge] = Derived(operation, operands, signature)
        return derived

    def operand(self, node: Any, name: str | None, position: int, depth: int) -> Value | None:
        """An operand of `node`: what was packed for `_raw_saved_<name>`, else the value behind its input edge."""
        if name is not None:
            packed = raw_saved(node, name)
            if type(packed) is Handle:
                return packed.value if packed.owner is self.owner else None
            if type(packed) is ParameterRef:
                return packed
            if isinstance(packed, Tensor) and packed.dim() == 0:  # a Python number: autograd does not pack those
                return Number(packed, self.proofs.signature("number"))
        edges = node.next_functions
        if position >= len(edges) or edges[position][0] is None:
            return None
        successor, output_nr = edges[position]
        parameter = getattr(successor, "variable", None)
        if isinstance(parameter, Parameter):
            return ParameterRef(parameter, parameter)
        return self._resolve((successor, output_nr), depth + 1)


def _is_bitwise(derived: Derived, tensor: Tensor) -> bool:
    try:
        # operations of the proof must not reach the hooks of the forward that is being watched
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            made = peek(derived)
        return made.stride() == tensor.stride() and same_bits(made, tensor.detach())
    except Exception:  # whatever goes wrong with a recipe: the tensor is held
        return False
