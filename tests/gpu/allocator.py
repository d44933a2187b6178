"""Bytes that a piece of work holds: torch's caching allocator on CUDA, a count of live storages on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocator(Protocol):
    """Level and peak since `measured` was entered."""

    def level(self) -> int: ...

    def peak(self) -> int: ...


@contextmanager
def measured(device: torch.device, known: Iterable[Tensor]) -> Iterator[Allocator]:
    """Counts from here on. `known`: tensors that exist and are not to be counted when an operation shows them again."""
    if device.type == "cuda":
        yield _Cuda(device)
        return
    live = _LiveStorages(known)
    with live:
        yield live


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._start = torch.cuda.memory_allocated(device)

    def level(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start


class _LiveStorages(TorchDispatchMode):
    """Every storage that an operation gives back, until it dies. What kernels use inside is not seen."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._level = self._peak = 0

    def level(self) -> int:
        return self._level

    def peak(self) -> int:
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._level += size
        self._peak = max(self._peak, self._level)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._level -= size
