"""Records the collectives that this process issues, to compare their order between ranks and plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "all_gather_coalesced",
    "all_reduce_coalesced",
)

#: Operation, then (shape, dtype) of every tensor argument, then the number of ranks in the group.
Record = tuple[str, tuple[tuple[tuple[int, ...], str], ...], int]


@contextmanager
def recorded() -> Iterator[list[Record]]:
    """Fills the list it gives with one record per collective, in the order of issue.

    Covers torch.distributed (and deepspeed.comm, whose torch backend calls it) and the process-group operations that
    DeepSpeed's torch backend takes by name from torch.distributed when it is made.
    """
    records: list[Record] = []
    undo: list[tuple[Any, str, Any]] = []
    depth = [0]  # deepspeed.comm.x calls torch.distributed.x: only the outermost call is a record
    for owner in _owners():
        for name in _OPERATIONS:
            original = getattr(owner, name, None)
            if callable(original):
                undo.append((owner, name, owner.__dict__.get(name)))
                setattr(owner, name, _recording(original, name, records, depth))
    try:
        yield records
    finally:
        for owner, name, original in undo:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _owners() -> list[Any]:
    import deepspeed.comm

    return [dist, deepspeed.comm.comm, deepspeed.comm]


def _recording(original: Callable[..., Any], name: str, records: list[Record], depth: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0:
            records.append((name, tuple(_described([*args, *kwargs.values()])), _group_size(original, args, kwargs)))
        depth[0] += 1
        try:
            return original(*args, **kwargs)
        finally:
            depth[0] -= 1

    return call


def _described(arguments: list[Any]) -> Iterator[tuple[tuple[int, ...], str]]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield tuple(argument.shape), str(argument.dtype)
        elif isinstance(argument, list | tuple):
            yield from _described(list(argument))


def _group_size(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        group = inspect.signature(original).bind(*args, **kwargs).arguments.get("group")
    except (TypeError, ValueError):
        group = kwargs.get("group")
    return dist.get_world_size(group)
