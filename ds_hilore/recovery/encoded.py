"""Saved tensors held by codecs: what compress (L) does to a bundle.

The state groups that a treatment names are encoded when the unit's forward has ended, storage by storage: a tensor
that was saved twice, or seen through views, is encoded once. What is derived from an encoded tensor is derived from
its decoded form. The forward pass and its outputs are never touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hilore.codecs.base import Codec, Payload
from ds_hilore.recovery.bundle import Geometry, Handle, Kept, Value, substitute


class Packed:
    """One encoded tensor. Decoded at its first use and kept until the last, as a derived one is."""

    __slots__ = ("codec", "memo", "payload", "uses")

    def __init__(self, codec: Codec, payload: Payload) -> None:
        self.codec = codec
        self.payload = payload
        self.uses = 0
        self.memo: Tensor | None = None

    def get(self) -> Tensor:
        decoded = self.memo
        if decoded is None:
            decoded = self.codec.decode(self.payload)
        self.uses -= 1
        self.memo = decoded if self.uses > 0 else None
        return decoded


class Encoded:
    """An encoded tensor, or a view of one, in place of the saved tensor."""

    __slots__ = ("geometry", "packed", "signature")

    def __init__(self, packed: Packed, geometry: Geometry | None, signature: int) -> None:
        self.packed = packed
        self.geometry = geometry
        self.signature = signature

    def get(self) -> Tensor:
        decoded = self.packed.get()
        return decoded if self.geometry is None else self.geometry.apply(decoded)

    def held(self) -> Iterable[Tensor]:
        return self.packed.payload.tensors()


class Statistic(NamedTuple):
    """What encoding one tensor cost in precision. `squares`: [2] float64 on the device, as `Payload.squares`."""

    group: str
    codec: str
    squares: Tensor


class Shelf(NamedTuple):
    """Kept tensors of one storage: `base` covers what the views see, or stands alone."""

    group: str
    base: Kept
    views: tuple[Kept, ...]


#: Of what could be encoded of a call, that which is.
Encodable = Callable[[Sequence[Shelf]], list[Shelf]]


@dataclass(frozen=True)
class LargestOf:
    """Of one state group the largest tensor that has a storage of its own, the first saved of equals; nothing else of
    the call is encoded. What the paper encodes of a layer.

    Args:
        least_bytes: smaller tensors are not encoded.
        dtypes: nor are those of others.
    """

    group: str
    least_bytes: int
    dtypes: frozenset[torch.dtype]

    def __call__(self, found: Sequence[Shelf]) -> list[Shelf]:
        fitting = [shelf for shelf in found if shelf.group == self.group and self._fits(shelf.base.tensor)]
        return [max(fitting, key=lambda shelf: shelf.base.tensor.nbytes)] if fitting else []

    def _fits(self, tensor: Tensor) -> bool:
        own = tensor.nbytes == tensor.untyped_storage().nbytes()
        return own and tensor.dtype in self.dtypes and tensor.nbytes >= self.least_bytes


def shelves(handles: Iterable[Handle], groups: Mapping[int, str]) -> list[Shelf]:
    """What of a bundle can be encoded, by storage.

    A storage of which anything is in no group is left out, as encoding the rest would free nothing; so is a tensor
    that was changed in place since, whose own check must speak.
    """
    grouped: dict[int, list[tuple[str, Kept]]] = defaultdict(list)
    excluded: set[int] = set()
    seen: dict[int, str] = {}
    for handle in handles:
        value = handle.value
        if not isinstance(value, Kept):
            continue
        storage = value.tensor.untyped_storage().data_ptr()
        group = groups.get(handle.index) or seen.get(id(value))
        if group is None or value.tensor._version != value.version:
            excluded.add(storage)
        elif id(value) not in seen:
            seen[id(value)] = group
            grouped[storage].append((group, value))
    return [shelf for storage, kept in grouped.items() if storage not in excluded for shelf in _shelved(kept)]


def _shelved(kept: Sequence[tuple[str, Kept]]) -> list[Shelf]:
    """One shelf where a tensor covers the storage, else one a tensor: no view is wider than what it needs then."""
    group = min(name for name, _ in kept)
    for _, base in kept:
        tensor = base.tensor
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            return [Shelf(group, base, tuple(view for _, view in kept if view is not base))]
    return [Shelf(name, value, ()) for name, value in kept]


def encode(handles: Sequence[Handle], found: Iterable[Shelf], codecs: Mapping[str, Codec]) -> list[Statistic]:
    """Encodes the shelves of the groups in `codecs`, in place of what the handles hold.

    Tensors that a codec does not make smaller (bf16 of bfloat16 state) stay as they are.

    Returns:
        The statistics of every encoded tensor; nothing waits for the device.
    """
    replaced: dict[int, Encoded] = {}
    statistics: list[Statistic] = []
    for shelf in found:
        codec = codecs.get(shelf.group)
        if codec is None or not codec.supports(shelf.base.tensor.dtype):
            continue
        payload = codec.encode(shelf.base.tensor)
        statistics.append(Statistic(shelf.group, codec.name, payload.squares))
        packed = Packed(codec, payload)
        replaced[id(shelf.base)] = Encoded(packed, None, shelf.base.signature)
        for view in shelf.views:
            geometry = Geometry.of(view.tensor, shelf.base.tensor)
            replaced[id(view)] = Encoded(packed, geometry, view.signature)
    if replaced:
        _put_in_place(handles, replaced)
    return statistics


def _put_in_place(handles: Iterable[Handle], replaced: Mapping[int, Encoded]) -> None:
    def instead(value: Value) -> Value | None:
        encoded = replaced.get(id(value))
        if encoded is not None:
            encoded.packed.uses += 1
        return encoded

    substitute(handles, instead)
