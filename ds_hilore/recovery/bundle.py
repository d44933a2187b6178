"""The saved state of one unit call: what autograd holds in place of each saved tensor.

Autograd keeps the object that a pack hook returns and gives it back to the unpack hook; when a node has run (without
`retain_graph`) it lets go of the object. So values hang on the objects themselves and are freed by autograd exactly
at their last use, and `retain_graph` keeps them, with no book-keeping of ours.

    Handle         one slot: (owner, position in the order of saving) -> value, or None when it must be replayed
    ParameterRef   a parameter, or a view of one: by reference, never saved state (design fact 7)
    Kept           a tensor held as it is
    Derived        an operation on other values, evaluated at unpack (design facts 11, 12)
    Encoded        a tensor held by a codec (encoded.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ds_hilore.core.errors import StateChanged

Operation = Callable[..., Tensor]


class Value(Protocol):
    """Something that yields a saved tensor at unpack. `signature` identifies how it is made within its unit class."""

    signature: int

    def get(self) -> Tensor: ...

    def held(self) -> Iterable[Tensor]:
        """Every tensor that it holds, through derivations, parameters left out."""
        ...


class HeldTensor(Value, Protocol):
    """How an input may be held. `tensor`: what `get` gives, unchecked."""

    @property
    def tensor(self) -> Tensor: ...


class Kept:
    """A tensor held as it is. Holds a detached alias: holding the tensor itself would hold the graph behind it."""

    __slots__ = ("signature", "tensor", "version")

    def __init__(self, tensor: Tensor, signature: int) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.signature = signature

    def get(self) -> Tensor:
        # Hooks bypass autograd's own check; a detached alias shares the version counter of its source.
        if self.tensor._version != self.version:
            raise StateChanged(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was changed in place after it was "
                f"saved (version {self.version}, now {self.tensor._version}); clone it before the in-place operation"
            )
        return self.tensor

    def held(self) -> Iterable[Tensor]:
        return (self.tensor,)


class Number(Kept):
    """A Python number, as autograd holds it: held as it is.

    No graph is behind it, and a dispatch mode, which is given such a tensor as a bare float, could not detach it.
    """

    __slots__ = ()

    def __init__(self, tensor: Tensor, signature: int) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.signature = signature


class Derived:
    """`operation(*operands)`, kept between its first and its last use only where it is used more than once.

    `stride` is that of the tensor which this stands for: a recipe proven on one shape may lay out another one
    differently, and strides choose the kernels of backward, hence bits.
    """

    __slots__ = ("memo", "operands", "operation", "signature", "stride", "uses")

    def __init__(self, operation: Operation, operands: tuple[Value, ...], signature: int) -> None:
        self.operation = operation
        self.operands = operands
        self.signature = signature
        self.stride: tuple[int, ...] | None = None
        self.uses = 0
        self.memo: Tensor | None = None
        for operand in operands:
            if type(operand) is Derived:
                operand.uses += 1

    def get(self) -> Tensor:
        result = self.memo
        if result is None:
            # Casts stand in the graph, hence in the recipe; an autocast around backward must not add its own.
            with torch.no_grad(), torch._C._DisableAutocast():
                result = self.operation(*[operand.get() for operand in self.operands])
            if self.stride is not None and result.stride() != self.stride:
                result = _laid_out(result, self.stride)
        self.uses -= 1
        self.memo = result if self.uses > 0 else None
        return result

    def held(self) -> Iterable[Tensor]:
        for operand in self.operands:
            yield from operand.held()


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Geometry(NamedTuple):
    """A view of a tensor, relative to that tensor's own storage offset."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor, base: Tensor) -> Geometry:
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - base.storage_offset()))

    def apply(self, base: Tensor) -> Tensor:
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class ParameterRef:
    """A parameter or a view of one, rebound at unpack to whatever storage the parameter has then.

    Under ZeRO-3 that is the newly gathered one. The very object is handed back where it was saved itself: after
    stage-3 initialisation `F.linear` saves parameters, not views.
    """

    __slots__ = ("geometry", "parameter", "signature", "version")

    def __init__(self, parameter: Parameter, view: Tensor) -> None:
        self.parameter = parameter
        self.version = parameter._version
        self.geometry = None if view is parameter else Geometry.of(view, parameter)
        self.signature = -1

    def get(self) -> Tensor:
        parameter = self.parameter
        if parameter._version != self.version:
            raise StateChanged(
                f"a parameter of shape {tuple(parameter.shape)} was changed between forward and backward; "
                "run the optimizer step (or load weights) only after the backward pass"
            )
        if self.geometry is None:
            return parameter
        if not torch.is_grad_enabled():  # as in any backward without create_graph
            return self.geometry.apply(parameter)
        with torch.no_grad():
            return self.geometry.apply(parameter)

    def held(self) -> Iterable[Tensor]:
        return ()


class Handle:
    """One slot of a unit call (its `owner`; in a replay, of that replay).

    `value` is None when the slot was not kept or was dropped: then the unit is replayed.
    """

    __slots__ = ("__weakref__", "index", "owner", "value")

    def __init__(self, owner: Any, index: int, value: Value | None) -> None:
        self.owner = owner
        self.index = index
        self.value = value


class SlotMeta(NamedTuple):
    """What a replayed slot must look like. One per slot, in the order of saving; parameters have None."""

    shape: torch.Size
    dtype: torch.dtype


def parameter_of(tensor: Tensor) -> Parameter | None:
    """The parameter that `tensor` is, or is a view of."""
    kind = type(tensor)
    if kind is Parameter:
        return tensor  # type: ignore[return-value]
    if tensor._is_view():
        base = tensor._base
        if isinstance(base, Parameter):
            return base
    # parameters of other tensor classes are marked, plain tensors never are; isinstance alone is slow here
    return tensor if kind is not Tensor and isinstance(tensor, Parameter) else None


def raw_saved(node: Any, name: str) -> object:
    """What our pack hook returned for the operand `name` of an autograd node; a tensor where none was called."""
    # Borrowed: valid only while the node lives, which it does here, and read at once (design fact 12).
    saved = getattr(node, "_raw_saved_" + name, None)
    if saved is None:
        return None
    try:
        return saved.data
    except RuntimeError:
        return None


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage address: a tensor saved many times, or seen through views, counts once (design fact 9)."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def peek(value: Value) -> Tensor:
    """The tensor of `value` without counting as one of its uses: for proofs."""
    noted = list(_derived_below(value))
    uses = [derived.uses for derived in noted]
    try:
        return value.get()
    finally:
        for derived, count in zip(noted, uses, strict=True):
            derived.uses = count
            derived.memo = None


def _derived_below(value: Value) -> Iterator[Derived]:
    if isinstance(value, Derived):
        yield value
        for operand in value.operands:
            yield from _derived_below(operand)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits, but for the payload of NaN. Waits for the device: for proofs only."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def substitute(handles: Iterable[Handle], instead: Callable[[Value], Value | None]) -> None:
    """Puts other values in place of those that handles hold and recipes start from.

    Args:
        instead: what takes the place of a value, asked once for each use of it; None: it stays.
    """
    done: set[int] = set()
    for handle in handles:
        if handle.value is not None:
            handle.value = _chosen(handle.value, instead, done)


# Not a function inside of `substitute`: one that calls itself is a cycle, and would hold what it took away.
def _chosen(value: Value, instead: Callable[[Value], Value | None], done: set[int]) -> Value:
    other = instead(value)
    if other is not None:
        return other
    if isinstance(value, Derived) and id(value) not in done:
        done.add(id(value))
        value.operands = tuple([_chosen(operand, instead, done) for operand in value.operands])
    return value


def sources(values: Iterable[Value | None]) -> Iterator[Value]:
    """What the values are, or are derived from; one that serves several comes several times."""
    for value in values:
        if isinstance(value, Derived):
            yield from sources(value.operands)
        elif value is not None:
            yield value


def kept_tensors(values: Iterable[Value | None]) -> Iterator[Tensor]:
    """Every tensor that the values hold, through derivations, parameters left out."""
    for value in values:
        if value is not None:
            yield from value.held()
