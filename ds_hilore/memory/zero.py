"""What DeepSpeed holds on one rank, by arithmetic: parameters, masters, optimizer state, gradients, buckets.

Read from deepspeed 0.19.8, which allocates in the same way since 0.18.3; each function names its source. Sizes of
lasting tensors are exact. Of passing ones the largest moment is given, never less than what is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Place

_FP32 = 4


class Scheme(Enum):
    """Who holds masters, gradients and optimizer state."""

    TORCH = "torch"  # stage 0, fp32: torch's optimizer on the parameters themselves
    HALF = "half"  # stage 0, fp16 or bf16: FP16_Optimizer, FP16_UnfusedOptimizer
    BF16 = "bf16"  # stage 1, bf16 with fp32 accumulation: BF16_Optimizer
    PARTITIONED = "partitioned"  # stages 1 and 2: DeepSpeedZeroOptimizer
    SHARDED = "sharded"  # stage 3: DeepSpeedZeroOptimizer_Stage3


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model; a shared one is listed once.

    Args:
        numel: elements of the whole parameter.
        trainable: it has a gradient.
        element_bytes: of its dtype.
        module: the recovery unit it lies in, else its own module. What ZeRO-3 gathers it with.
        leaf: that module is a ZeRO-3 leaf, as recovery units are under ZeRO-3.
        unit: that module is a recovery unit.
        group: parameter group of the optimizer.
    """

    numel: int
    trainable: bool = True
    element_bytes: int = _FP32
    module: str = ""
    leaf: bool = False
    group: int = 0
    unit: bool = False

    @property
    def bytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer keeps, and what its step needs for a moment, in copies of what it steps.

    Args:
        state_tensors: tensors as large as the parameter (Adam: 2).
        state_bytes: bytes of an element of those.
        copies_of_largest: temporaries as large as the largest tensor that is stepped (torch's for-loop Adam: 2).
        copies_of_all: temporaries as large as everything that is stepped at once (torch's foreach Adam: 1).
    """

    state_tensors: int = 2
    state_bytes: int = _FP32
    copies_of_largest: int = 0
    copies_of_all: int = 0


@dataclass(frozen=True)
class ZeroFacts:
    """The part of a DeepSpeed configuration that decides what is held.

    Args:
        stage: of ZeRO, 0 to 3.
        parameters: of the model, in the order of `model.parameters()`.
        world_size, rank: data-parallel ranks, and which of them this is.
        half: "fp16" or "bf16" is enabled.
        accumulation: microbatches per update.
        accumulation_bytes: element of `grad_accum_dtype`; default that of the model.
        communication_bytes: element of the dtype in which gradients travel.
        master_bytes: element of master copies.
        reduce_bucket: elements.
        optimizer: its state and temporaries.
        fused: FP16_Optimizer for one fused torch optimizer (stage 0).
        offload_optimizer, offload_parameters: to the host.
        persistence_threshold, model_persistence_threshold, max_reuse_distance, prefetch_bucket, sub_group: ZeRO-3's, in
            elements.
        containers: modules around all others, without parameters of their own (ZeRO-3 fetches ahead at each).
        lazy_pages: the device is the CPU: memory that nothing was written to costs nothing, so a bucket is as large as
            its filling; and what is offloaded stays in the same memory.
        stepped: an update is behind, so optimizer state exists and persistent parameters are whole.
        buffer_bytes: of the model's buffers, which no stage cuts.
        unknown: what the configuration has that this arithmetic does not know, in words.

    Raises:
        UsageError: a stage or rank that does not exist.
    """

    stage: int
    parameters: tuple[Parameter, ...]
    world_size: int = 1
    rank: int = 0
    half: bool = False
    accumulation: int = 1
    accumulation_bytes: int = _FP32
    communication_bytes: int = _FP32
    master_bytes: int = _FP32
    reduce_bucket: int = 500_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool = False
    reduce_scatter: bool = True
    optimizer: OptimizerFacts = field(default_factory=OptimizerFacts)
    fused: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    persistence_threshold: int = 100_000
    model_persistence_threshold: int = 2**63 - 1
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket: int = 50_000_000
    sub_group: int = 1_000_000_000
    containers: int = 2
    lazy_pages: bool = False
    stepped: bool = True
    buffer_bytes: int = 0
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(f"ledger: ZeRO has stages 0 to 3, not {self.stage}")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"ledger: rank {self.rank} of {self.world_size}; ranks count from 0")

    @cached_property
    def scheme(self) -> Scheme:
        """Source: DeepSpeedEngine._do_optimizer_sanity_check."""
        if self.stage == 0:
            return Scheme.HALF if self.half else Scheme.TORCH
        if self.stage == 3:
            return Scheme.SHARDED
        widened = self.half and self.accumulation_bytes == _FP32
        return Scheme.BF16 if self.stage == 1 and widened and not self.offload_optimizer else Scheme.PARTITIONED

    @cached_property
    def trainable(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @cached_property
    def groups(self) -> tuple[tuple[Parameter, ...], ...]:
        """Trainable parameters by group of the optimizer; empty groups are none."""
        numbers = sorted({p.group for p in self.trainable})
        return tuple(tuple(p for p in self.trainable if p.group == number) for number in numbers)

    @property
    def state_place(self) -> Place:
        """Stage 0 takes no notice of `offload_optimizer`."""
        return Place.HOST if self.offload_optimizer and self.stage > 0 else Place.DEVICE

    @property
    def parameter_place(self) -> Place:
        return Place.HOST if self.offload_parameters and self.stage == 3 else Place.DEVICE

    @property
    def order_is_known(self) -> bool:
        """ZeRO-3 has recorded the order of its modules: from the second microbatch on."""
        return self.stepped or self.accumulation > 1

    def shard(self, parameter: Parameter) -> int:
        """Elements of a parameter's shard; padded. Source: Init._partition_numel."""
        return math.ceil(parameter.numel / self.world_size)

    def sharded(self, parameters: Iterable[Parameter]) -> int:
        return sum(self.shard(p) for p in parameters)

    def persists(self) -> tuple[Parameter, ...]:
        """Source: DeepSpeedZeRoOffload.mark_persistent_parameters."""
        found, total = [], 0
        for p in self.parameters:
            if p.numel + total <= self.model_persistence_threshold and p.numel <= self.persistence_threshold:
                found.append(p)
                total += p.numel
        return tuple(found)

    def modules(self) -> dict[str, tuple[Parameter, ...]]:
        """Parameters by what is gathered at once, in the model's order."""
        found: dict[str, list[Parameter]] = {}
        for p in self.parameters:
            found.setdefault(p.module, []).append(p)
        return {name: tuple(parameters) for name, parameters in found.items()}


@dataclass(frozen=True)
class FlatGroup:
    """A group of the optimizer as one flat tensor, cut into equal partitions (stages 1 and 2).

    Source: DeepSpeedZeroOptimizer.__init__; the flat tensor is padded to two elements per rank.
    """

    parameters: tuple[Parameter, ...]
    world_size: int
    rank: int

    @cached_property
    def numel(self) -> int:
        alignment = 2 * self.world_size
        return math.ceil(sum(p.numel for p in self.parameters) / alignment) * alignment

    @cached_property
    def partition(self) -> int:
        return self.numel // self.world_size

    @cached_property
    def members(self) -> tuple[Parameter, ...]:
        """Parameters that reach into this rank's partition."""
        begin, end = self.rank * self.partition, (self.rank + 1) * self.partition
        found, start = [], 0
        for p in self.parameters:
            if start < end and start + p.numel > begin:
                found.append(p)
            start += p.numel
        return tuple(found)

    @cached_property
    def padding(self) -> int:
        """Elements of this rank's partition behind the last parameter."""
        begin = self.rank * self.partition
        return max(0, min(self.partition, begin + self.partition - sum(p.numel for p in self.parameters)))


def flat_groups(facts: ZeroFacts) -> tuple[FlatGroup, ...]:
    return tuple(FlatGroup(group, facts.world_size, facts.rank) for group in facts.groups)
