"""Which saved tensors of a unit go together: state groups, told from the operations that saved them.

    attention_qk    what attention's backward rebuilds the probabilities from: the most sensitive state
    attention_v     values
    attention_out   output of the attention kernel, input of its output projection
    mlp             operands of an activation, and of the product with it
    residual        inputs of normalisations behind the first one: the residual stream between attention and MLP

Everything else is in no group and always exact: statistics of norms, log-sum-exp, masks, indices, small tensors, and
what the unit was called with, which a replay needs.

The autograd graph names the operation that saved a tensor; for each kind of call it is read once, when the forward of
such a call has just ended and its graph is still at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_hilore.recovery.bundle import Handle, Kept, raw_saved

GROUPS = ("attention_qk", "attention_v", "attention_out", "mlp", "residual")
#: Tensors with less than this share of the elements of the unit's input are held as they are: log-sum-exp, the narrow
#: side of adapters.
SMALL = 1 / 8

_ATTENTION = ("ScaledDotProduct", "FlashAttn", "FlashAttention", "EfficientAttention")
_ATTENTION_ROLES = {
    "query": "attention_qk",
    "key": "attention_qk",
    "q": "attention_qk",
    "k": "attention_qk",
    "value": "attention_v",
    "v": "attention_v",
    "output": "attention_out",
    "out": "attention_out",
}
_ACTIVATIONS = frozenset(
    {
        "SiluBackward0",
        "GeluBackward0",
        "ReluBackward0",
        "SigmoidBackward0",
        "TanhBackward0",
        "GatedProductBackward",
    }
)
_RAW = "_raw_saved_"
_NORMS = frozenset({"FusedRmsNormBackward0", "NativeLayerNormBackward0", "PowBackward0"})


def groups_of(outputs: Iterable[Tensor], owner: object, inputs: Iterable[Tensor]) -> dict[int, str]:
    """State group by slot, for the saved tensors of one call that are held as they are.

    Args:
        outputs: of the unit, with the graph behind them.
        owner: the call; slots of others are not looked at.
        inputs: what the unit was called with: the graph ends there, and these tensors are in no group.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    width = max((tensor.numel() for tensor in inputs if tensor.is_floating_point()), default=0)
    ends = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    storage_of: dict[int, int] = {}  # by slot
    group_of: dict[int, str] = {}  # by storage
    for node in _nodes(outputs, ends):
        for name, handle in _saved(node):
            value = handle.value
            if handle.owner is not owner or not isinstance(value, Kept) or not _large(value.tensor, width):
                continue
            storage = value.tensor.untyped_storage().data_ptr()
            if storage in given:
                continue
            storage_of[handle.index] = storage
            group = _group(node, name)
            if group is not None:
                group_of[storage] = _calmer(group, group_of.get(storage))
    # a projection's input goes with the operation that it came from, or the same memory went to
    return {slot: group_of[storage] for slot, storage in storage_of.items() if storage in group_of}


def _calmer(group: str, known: str | None) -> str:
    """The most sensitive group where several operations save one tensor: the first of `GROUPS`."""
    return group if known is None or GROUPS.index(group) < GROUPS.index(known) else known


def _large(tensor: Tensor, width: int) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= max(1, width * SMALL)


def _group(node: Any, name: str) -> str | None:
    kind: str = node.name()
    if any(word in kind for word in _ATTENTION):
        return _ATTENTION_ROLES.get(name)
    if kind in _NORMS:
        return "residual" if name in ("input", "self") else None
    if kind in _ACTIVATIONS:
        return "mlp"
    if kind == "MulBackward0" and any(_is_activation(parent) for parent, _ in node.next_functions):
        return "mlp"
    return None


def _is_activation(node: Any) -> bool:
    return node is not None and node.name() in _ACTIVATIONS


def _saved(node: Any) -> Iterator[tuple[str, Handle]]:
    """The slots that a node saved, by the name of the operand."""
    for attribute in dir(node):
        if attribute.startswith(_RAW):
            name = attribute.removeprefix(_RAW)
            saved = getattr(node, attribute)
            # lists of tensors (indices), and all that an autograd.Function in Python saves
            found = [each.data for each in saved] if isinstance(saved, tuple) else [raw_saved(node, name)]
            yield from ((name, held) for held in found if type(held) is Handle)


def _nodes(outputs: Iterable[Tensor], ends: set[Any]) -> Iterator[Any]:
    seen: set[Any] = set(ends)
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)


def tensors_in(result: Any) -> list[Tensor]:
    """Tensors of a unit's result."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
