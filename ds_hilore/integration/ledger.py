"""The account of a live DeepSpeed engine: every tensor that it is known to keep, each storage once.

What is read, by optimizer (deepspeed 0.19.8; names that 0.18.3 lacks are looked up with a default):

    torch.optim                       parameters, .grad, state
    FP16_Optimizer, FP16_Unfused...   fp16_groups, fp32_groups(_flat)
    BF16_Optimizer                    bf16_groups_flat, fp32_groups_flat_partition, fp32_groups_gradients_flat
    DeepSpeedZeroOptimizer            bit16_groups, single_partition_of_fp32_groups, ipg_buckets, grads_in_partition,
                                      averaged_gradients, all_grad_tensors, offload buffers
    DeepSpeedZeroOptimizer_Stage3     ds_tensor, fp32_partitioned_groups_flat, grad_partitions_flat_buffer, ipg_buckets,
                                      whole parameters by ds_status
    DeepSpeedZeRoOffload              ds_tensor, whole parameters by ds_status (a reference model under stage 3)

Bytes are those of storages, as an allocator counts them; pages that were never written to count too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.types import Place
from ds_hilore.memory.ledger import ALWAYS, Account, Entry, Item


def account_of(engine: Any) -> Account:
    """What the engine's model and optimizer hold now, as entries of all moments.

    An optimizer that is not one of those above is named in `Account.unknown`, not guessed at: its state then counts as
    far as it follows torch's interface, and nothing else of it does.
    """
    reader = _Reader(torch.device(engine.device))
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        _read_stage_3(reader, engine)
    elif hasattr(optimizer, "persistent_parameters"):
        _read_shards(reader, engine.module, optimizer.offload_device is not None)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        _read_stage_1_and_2(reader, optimizer)
    elif hasattr(optimizer, "fp32_groups_gradients_flat"):
        reader.take(Item.MASTER, optimizer.fp32_groups_flat_partition)
        reader.take(Item.MASTER_GRADIENTS, optimizer.fp32_groups_gradients_flat)
    elif hasattr(optimizer, "fp32_groups_flat") or hasattr(optimizer, "fp32_groups"):
        masters = list(getattr(optimizer, "fp32_groups_flat", None) or _chain(optimizer.fp32_groups))
        reader.take(Item.MASTER, masters)
        reader.take(Item.MASTER_GRADIENTS, (p.grad for p in masters))
    elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        reader.unknown.append(f"what optimizer wrapper {type(optimizer).__name__} keeps")
    _read_model(reader, engine)
    return reader.account()


class _Reader:
    """Collects storages by item and place; the first item that names a storage has it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unknown: list[str] = []
        self._seen: set[tuple[torch.device, int]] = set()
        self._bytes: dict[tuple[Item, Place], int] = {}

    def take(self, item: Item, tensors: Iterable[Tensor | None], place: Place | None = None) -> None:
        """Args: place: where the tensors count; default by their device, which tells nothing on a CPU engine."""
        for tensor in tensors:
            if tensor is None or tensor.numel() <= 1 or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr()
            if storage.nbytes() and key not in self._seen:
                self._seen.add(key)
                where = place or (Place.DEVICE if tensor.device.type == self.device.type else Place.HOST)
                self._bytes[item, where] = self._bytes.get((item, where), 0) + storage.nbytes()

    def account(self) -> Account:
        entries = (Entry(item, count, place, ALWAYS) for (item, place), count in self._bytes.items())
        return Account(tuple(entries), tuple(self.unknown), device_is_host=self.device.type == "cpu")


def _chain(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    return (item for group in groups for item in group)


def _place(offloaded: bool) -> Place | None:
    return Place.HOST if offloaded else None


def _read_model(reader: _Reader, engine: Any) -> None:
    """Parameters and gradients; the state of the optimizer inside. Last, since buckets and flat tensors hold them."""
    offloaded = bool(getattr(engine.optimizer, "cpu_offload", False) or _offloads_optimizer(engine.optimizer))
    reader.take(Item.STATE, _state(getattr(engine, "basic_optimizer", None)), _place(offloaded))
    for parameter in engine.module.parameters():
        item = Item.TRAINABLE if parameter.requires_grad else Item.FROZEN
        if not hasattr(parameter, "ds_tensor"):
            reader.take(item, [parameter.data])
        reader.take(Item.GRADIENTS, [parameter.grad, getattr(parameter, "grad_accum", None)])
    reader.take(Item.BUFFERS, engine.module.buffers())


def _state(optimizer: Any) -> Iterator[Tensor]:
    for state in getattr(optimizer, "state", {}).values():
        values = state.values() if isinstance(state, Mapping) else ()
        yield from (value for value in values if isinstance(value, Tensor))


def _read_stage_1_and_2(reader: _Reader, optimizer: Any) -> None:
    host = _place(optimizer.cpu_offload)
    for bucket in optimizer.ipg_buckets.values():
        reader.take(Item.BUCKETS, bucket.buffer)
    reader.take(Item.PARTITION, [getattr(optimizer, "grads_in_partition", None)])
    for by_group in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for gradients in by_group.values():
            reader.take(Item.PARTITION, [getattr(gradients, "flat_partition", None), *(gradients or ())])
    masters = optimizer.single_partition_of_fp32_groups
    reader.take(Item.MASTER, masters, host)
    reader.take(Item.MASTER_GRADIENTS, (master.grad for master in masters), host)
    if optimizer.cpu_offload:
        reader.take(Item.STAGING, optimizer.param_buffer_of_bit16_for_cpu_offload_groups, host)
        reader.take(Item.STAGING, [optimizer.temp_grad_buffer_for_cpu_offload], host)
        reader.take(Item.STAGING, optimizer.accumulated_grads_in_cpu.values(), host)
        reader.take(Item.STAGING, [optimizer.temp_grad_buffer_for_gpu_offload])


def _offloads_optimizer(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "offload_optimizer", False))


def _read_stage_3(reader: _Reader, engine: Any) -> None:
    optimizer = engine.optimizer
    host = _place(optimizer.offload_optimizer)
    for bucket in optimizer.ipg_buckets.values():
        reader.take(Item.BUCKETS, [bucket.buffer])
    reader.take(Item.PARTITION, [optimizer.grad_partitions_flat_buffer], host)
    reader.take(Item.MASTER, optimizer.fp32_partitioned_groups_flat, host)
    reader.take(Item.MASTER_GRADIENTS, (master.grad for master in optimizer.fp32_partitioned_groups_flat), host)
    _read_shards(reader, engine.module, optimizer.offload_param)


def _read_shards(reader: _Reader, model: nn.Module, offloaded: bool) -> None:
    """This rank's shards under ZeRO-3, and what of the parameters is whole just now."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in model.parameters():
        sharded: Any = parameter
        item = Item.TRAINABLE if parameter.requires_grad else Item.FROZEN
        reader.take(item, [sharded.ds_tensor], _place(offloaded))
        reader.take(Item.SECONDARY, [getattr(parameter, "ds_secondary_tensor", None)])
        if sharded.ds_status == ZeroParamStatus.AVAILABLE:
            reader.take(Item.PERSISTENT if sharded.ds_persist else Item.GATHERED, [parameter.data])
