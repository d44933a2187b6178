"""How the outputs of autograd nodes are made from their operands: one rule per kind of node.

A rule only says what could be; recipes.py proves it before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hilore.recovery.bundle import Handle, Kept, ParameterRef, Value, peek, raw_saved, same_bits
from ds_hilore.recovery.gated import Gate

if TYPE_CHECKING:
    from ds_hilore.recovery.recipes import BundleBuilder

#: Normalisation kernels do not save their epsilon; the one in use is the one that gives the saved statistics.
NORM_EPSILONS = (1e-6, 1e-5, 1e-12, 1e-8)

Edge = tuple[Any, int]
#: A rule looks at one autograd node and gives (name, operation, operands), or None where it does not apply.
Match = tuple[str, Callable[..., Tensor], tuple[Value, ...]]
Rule = Callable[["BundleBuilder", Any, Edge, int], "Match | None"]


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
        if operands[position] is None and (has_edge or raw_saved(node, name) is not None):
            return False
    return True


def _epsilon(
    builder: BundleBuilder, node: Any, function: Callable[..., Tensor], shape: tuple[int, ...], given: tuple[Value, ...]
) -> float | None:
    """The epsilon whose statistics are the saved ones, bit for bit; found once per weight."""
    weight = given[1].parameter if len(given) > 1 and type(given[1]) is ParameterRef else None
    place = (builder.kind, builder.proofs.signature("norm", *[value.signature for value in given]))
    known = builder.proofs.epsilon_of(weight, place)
    if known is not None:
        return known
    statistic = raw_saved(node, "result2" if function is F.layer_norm else "result1")
    if type(statistic) is not Handle or type(statistic.value) is not Kept:
        return None
    source = peek(given[0])
    for epsilon in NORM_EPSILONS:
        with torch.no_grad():
            found = _statistic(function, source, shape, epsilon)
        if same_bits(found, statistic.value.tensor):
            builder.proofs.note_epsilon(weight, place, epsilon)
            return epsilon
    return None


def _statistic(function: Callable[..., Tensor], source: Tensor, shape: tuple[int, ...], epsilon: float) -> Tensor:
    """The reciprocal deviation that the kernel saves for its backward."""
    if function is F.layer_norm:
        return torch.native_layer_norm(source, shape, None, None, epsilon)[2]
    fused: Callable[..., tuple[Tensor, Tensor]] = torch._fused_rms_norm
    return fused(source, shape, None, epsilon)[1]


def _normalise(
    source: Tensor, *weights: Tensor, function: Callable[..., Tensor], shape: tuple[int, ...], epsilon: float
) -> Tensor:
    return function(source, shape, *weights, eps=epsilon)


def _gated_product(builder: BundleBuilder, node: Any, edge: Edge, depth: int) -> Match | None:
    packed = [saved.data for saved in node._raw_saved_tensors]
    if any(type(held) is not Handle or held.owner is not builder.owner or held.value is None for held in packed):
        return None
    gate: Gate = node.gate
    return f"gated_{gate.name}", partial(_multiply_gated, gate=gate), (packed[0].value, packed[1].value)


def _multiply_gated(x: Tensor, up: Tensor, gate: Gate) -> Tensor:
    return gate.apply(x).mul_(up)


def _signed(number: int) -> int:
    """Autograd shows a negative dimension as an unsigned 64-bit number."""
    return number - (1 << 64) if number >= 1 << 63 else number


#: Nodes whose operation computes more than it reads.
COSTLY = frozenset(
    {
        "SiluBackward0",
        "GeluBackward0",
        "SigmoidBackward0",
        "TanhBackward0",
        "PowBackward0",
        "NativeLayerNormBackward0",
        "FusedRmsNormBackward0",
        "GatedProductBackward",
    }
)

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
    "GatedProductBackward": _gated_product,
}
