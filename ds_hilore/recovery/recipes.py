"""Recipes: saved tensors that are functions of other saved tensors (design facts 11 and 12).

A SwiGLU layer saves gate, silu(gate), up and their product; two of the four need not be held. The `grad_fn` of a
tensor that is being saved names the operation that made it and, through `_raw_saved_*`, what our own pack hook
returned for its operands; operands that were never saved are reached through `next_functions`.

A recipe is used only after it was proven in the running job: at its first occurrence in a unit class it is evaluated
on the spot and must give the saved tensor bit for bit, with the same strides (strides choose kernels in backward).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ds_hilore.recovery.bundle import Derived, Geometry, Handle, Kept, ParameterRef, Value, peek, same_bits

Edge = tuple[Any, int]
#: A rule looks at one autograd node and gives (name, operation, operands), or None where it does not apply.
Match = tuple[str, Callable[..., Tensor], tuple[Value, ...]]

#: Chains of unsaved intermediates longer than this are not followed: evaluating them would cost what replay costs.
MAX_DEPTH = 12
#: A tensor smaller than this many bytes is held, not derived: an operation costs more than its memory.
MIN_DERIVED_BYTES = 4096
#: Normalisation kernels do not save their epsilon; the one in use is found by the proof among these.
NORM_EPSILONS = (1e-6, 1e-5, 1e-12, 1e-8)


class RecipeProofs:
    """What was proven in this job, shared by all calls of one controller."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, ...], int] = {}
        self.proven: dict[tuple[str, int, int], bool] = {}
        self.epsilons: dict[tuple[str, int], float] = {}

    def signature(self, *parts: Any) -> int:
        """A small number for how a value is made, so that signatures of nested recipes stay cheap to compare."""
        return self._names.setdefault(parts, len(self._names))

    def rejected(self) -> int:
        return sum(1 for good in self.proven.values() if not good)


class BundleBuilder:
    """Decides for each tensor that one unit call saves whether to hold it or its recipe.

    Lives for one forward (or replay) of one unit only: it holds autograd nodes, hence the graph.
    """

    def __init__(self, proofs: RecipeProofs, unit_class: str, inputs: list[Tensor], owner: object) -> None:
        self.proofs = proofs
        self.unit_class = unit_class
        self.owner = owner
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
        if known is not None and (type(known) is not Kept or known.version == tensor._version):
            if type(known) is Derived:
                known.uses += 1
            return known
        value: Value | None = None
        if tensor.untyped_storage().nbytes() >= MIN_DERIVED_BYTES:
            value = self._derive(tensor, edge, slot)
        if value is None:
            value = Kept(tensor, self.proofs.signature("slot", slot))
        self._values[edge] = value
        return value

    # -- deriving one saved tensor ---------------------------------------------------------------------------------

    def _derive(self, tensor: Tensor, edge: Edge, slot: int) -> Derived | None:
        derived = self._view(tensor) if tensor._is_view() else self._resolve(edge, 0)
        if type(derived) is not Derived:
            return None
        key = (self.unit_class, slot, derived.signature)
        good = self.proofs.proven.get(key)
        if good is None:
            good = self.proofs.proven[key] = _is_bitwise(derived, tensor)
        if not good:
            return None
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
        rule = RULES.get(node.name())
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
            packed = _raw_saved(node, name)
            if type(packed) is Handle:
                return packed.value if packed.owner is self.owner else None
            if type(packed) is ParameterRef:
                return packed
            if isinstance(packed, Tensor) and packed.dim() == 0:  # a Python number: autograd does not pack those
                return Kept(packed, self.proofs.signature("number", float(packed)))
        edges = node.next_functions
        if position >= len(edges) or edges[position][0] is None:
            return None
        successor, output_nr = edges[position]
        parameter = getattr(successor, "variable", None)
        if isinstance(parameter, Parameter):
            return ParameterRef(parameter, parameter)
        return self._resolve((successor, output_nr), depth + 1)


def _raw_saved(node: Any, name: str) -> object:
    # Borrowed: valid only while the node lives, which it does here, and read at once (design fact 12).
    saved = getattr(node, "_raw_saved_" + name, None)
    if saved is None:
        return None
    try:
        return saved.data
    except RuntimeError:
        return None


def _is_bitwise(derived: Derived, tensor: Tensor) -> bool:
    try:
        # operations of the proof must not reach the hooks of the forward that is being watched
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            made = peek(derived)
        return made.stride() == tensor.stride() and same_bits(made, tensor.detach())
    except (RuntimeError, TypeError, ValueError):
        return False


# -- rules: one per autograd node ------------------------------------------------------------------------------------

Rule = Callable[[BundleBuilder, Any, Edge, int], "Match | None"]


def _unary(name: str, operation: Callable[[Tensor], Tensor], saved: str | None) -> Rule:
    def rule(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
        operand = builder.operand(node, saved, 0, depth)
        return None if operand is None else (name, operation, (operand,))

    return rule


def _gelu(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    operand = builder.operand(node, "self", 0, depth)
    if operand is None:
        return None
    form = node._saved_approximate
    return f"gelu_{form}", partial(F.gelu, approximate=form), (operand,)


def _pow(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    operand = builder.operand(node, "self", 0, depth)
    if operand is None:
        return None
    exponent = node._saved_exponent
    return f"pow_{exponent}", partial(_power, exponent=exponent), (operand,)


def _power(base: Tensor, exponent: float) -> Tensor:
    return base.pow(exponent)


def _mul(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    return _binary("mul", torch.mul, builder, node, depth, ("self", "other"))


def _div(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    return _binary("div", torch.div, builder, node, depth, ("self", "other"))


def _add(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    alpha = node._saved_alpha
    return _binary(f"add_{alpha}", partial(torch.add, alpha=alpha), builder, node, depth, (None, None))


def _sub(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    alpha = node._saved_alpha
    return _binary(f"sub_{alpha}", partial(torch.sub, alpha=alpha), builder, node, depth, (None, None))


def _binary(
    name: str,
    operation: Callable[..., Tensor],
    builder: BundleBuilder,
    node: Any,
    depth: int,
    saved: tuple[str | None, str | None],
) -> Match | None:
    left = builder.operand(node, saved[0], 0, depth)
    if left is None:
        return None
    right = builder.operand(node, saved[1], 1, depth)
    return None if right is None else (name, operation, (left, right))


def _cast(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    operand = builder.operand(node, None, 0, depth)
    if operand is None:
        return None
    dtype = node._input_metadata[edge[1]].dtype
    return f"cast_{dtype}", partial(_to, dtype=dtype), (operand,)


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


def _cat(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    parts = [builder.operand(node, None, position, depth) for position in range(len(node.next_functions))]
    if any(part is None for part in parts):
        return None
    dim = _signed(node._saved_dim)
    return f"cat_{dim}", partial(_concatenate, dim=dim), tuple(part for part in parts if part is not None)


def _concatenate(*parts: Tensor, dim: int) -> Tensor:
    return torch.cat(parts, dim)


def _slice(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    operand = builder.operand(node, None, 0, depth)
    if operand is None:
        return None
    dim, step = _signed(node._saved_dim), node._saved_step
    start, end = _signed(node._saved_start), _signed(node._saved_end)
    cut = partial(_cut, dim=dim, start=start, end=end, step=step)
    return f"slice_{dim}_{start}_{end}_{step}", cut, (operand,)


def _cut(tensor: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    index: list[slice] = [slice(None)] * tensor.dim()
    index[dim] = slice(start, min(end, tensor.shape[dim]), step)
    return tensor[tuple(index)]


def _transpose(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    operand = builder.operand(node, None, 0, depth)
    if operand is None:
        return None
    first, second = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return f"transpose_{first}_{second}", partial(_swap, first=first, second=second), (operand,)


def _swap(tensor: Tensor, first: int, second: int) -> Tensor:
    return tensor.transpose(first, second)


def _reshape(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    operand = builder.operand(node, None, 0, depth)
    if operand is None:
        return None
    shape = tuple(node._input_metadata[edge[1]].shape)
    return "reshape", partial(_view_as, shape=shape), (operand,)


def _view_as(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor.reshape(shape)


def _layer_norm(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    return _norm(builder, node, edge, depth, F.layer_norm, ("input", "weight", "bias"))


def _rms_norm(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    return _norm(builder, node, edge, depth, F.rms_norm, ("input", "weight"))


def _norm(
    builder: BundleBuilder,
    node: Any,
    edge: Edge,
    depth: int,
    function: Callable[..., Tensor],
    names: tuple[str, ...],
) -> Match | None:
    if edge[1] != 0:
        return None
    operands = [builder.operand(node, name, position, depth) for position, name in enumerate(names)]
    if operands[0] is None or not _weights_present(node, names, operands):
        return None
    shape = tuple(node._saved_normalized_shape)
    given = tuple(operand for operand in operands if operand is not None)
    kind = "layer_norm" if function is F.layer_norm else "rms_norm"
    epsilon = _epsilon(builder, node, function, shape, given)
    if epsilon is None:
        return None
    return f"{kind}_{epsilon}", partial(_normalise, function=function, shape=shape, epsilon=epsilon), given


def _weights_present(node: Any, names: tuple[str, ...], operands: list[Value | None]) -> bool:
    """A weight that the kernel used but that we cannot name would be left out silently."""
    for position, name in enumerate(names[1:], start=1):
        edges = node.next_functions
        has_edge = position < len(edges) and edges[position][0] is not None
        if operands[position] is None and (has_edge or _raw_saved(node, name) is not None):
            return False
    return True


def _epsilon(
    builder: BundleBuilder, node: Any, function: Callable[..., Tensor], shape: tuple[int, ...], given: tuple[Value, ...]
) -> float | None:
    """The epsilon whose statistics are the saved ones, bit for bit; found once per unit class and weight position."""
    key = (builder.unit_class, builder.proofs.signature("norm", *[value.signature for value in given]))
    if key in builder.proofs.epsilons:
        return builder.proofs.epsilons[key]
    statistic = _raw_saved(node, "result2" if function is F.layer_norm else "result1")
    if type(statistic) is not Handle or type(statistic.value) is not Kept:
        return None
    source = given[0]
    if type(source) is not Kept:
        return None
    native = torch.native_layer_norm if function is F.layer_norm else torch._fused_rms_norm
    for epsilon in NORM_EPSILONS:
        with torch.no_grad():
            if function is F.layer_norm:
                found = native(source.tensor, shape, None, None, epsilon)[2]
            else:
                found = native(source.tensor, shape, None, epsilon)[1]
        if same_bits(found, statistic.value.tensor):
            builder.proofs.epsilons[key] = epsilon
            return epsilon
    return None


def _normalise(
    source: Tensor, *weights: Tensor, function: Callable[..., Tensor], shape: tuple[int, ...], epsilon: float
) -> Tensor:
    return function(source, shape, *weights, eps=epsilon)


def _signed(number: int) -> int:
    """Autograd shows a negative dimension as an unsigned 64-bit number."""
    return number - (1 << 64) if number >= 1 << 63 else number


RULES: dict[str, Rule] = {
    "SiluBackward0": _unary("silu", F.silu, "self"),
    "GeluBackward0": _gelu,
    "ReluBackward0": _unary("relu", torch.relu, None),
    "SigmoidBackward0": _unary("sigmoid", torch.sigmoid, None),
    "TanhBackward0": _unary("tanh", torch.tanh, None),
    "RsqrtBackward0": _unary("rsqrt", torch.rsqrt, None),
    # a contiguous copy: whoever looks at it through a reshape copies again where that is needed
    "CloneBackward0": _unary("clone", lambda tensor: tensor, None),
    "NegBackward0": _unary("neg", torch.neg, None),
    "PowBackward0": _pow,
    "MulBackward0": _mul,
    "DivBackward0": _div,
    "AddBackward0": _add,
    "SubBackward0": _sub,
    "ToCopyBackward0": _cast,
    "CatBackward0": _cat,
    "SliceBackward0": _slice,
    "TransposeBackward0": _transpose,
    "ViewBackward0": _reshape,
    "UnsafeViewBackward0": _reshape,
    "ReshapeAliasBackward0": _reshape,
    "NativeLayerNormBackward0": _layer_norm,
    "FusedRmsNormBackward0": _rms_norm,
}
