"""The account of a DeepSpeed configuration, without a run.

Lines at REST are exact to the byte; tests hold them against live engines. Of what passes, a line gives the largest
moment: at REDUCE and STEP everything that comes on top of lasting tensors is one line, followed through the functions
named below, since gradients turn into buckets, partitions and copies of each other there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ds_hilore.core.types import Place
from ds_hilore.memory.gathering import gathered_bytes
from ds_hilore.memory.ledger import ALWAYS, Account, Entry, Item, Moment
from ds_hilore.memory.reduction import (
    NORM_BYTES,
    behind_units,
    compact,
    gradient_phases,
    own_gradients,
    written_before,
)
from ds_hilore.memory.zero import FlatGroup, Parameter, Scheme, ZeroFacts, flat_groups

#: Elements that the engine reduces at once without ZeRO (engine.py: MEMORY_OPT_ALLREDUCE_SIZE).
_REDUCED_AT_ONCE = 500_000_000

_BACKWARD = frozenset({Moment.BACKWARD})
_REDUCE = frozenset({Moment.REDUCE})
_STEP = frozenset({Moment.STEP})
_FORWARD = frozenset({Moment.FORWARD, Moment.LOSS})
_FROM_BACKWARD = frozenset({Moment.BACKWARD, Moment.REDUCE, Moment.STEP})
_AFTER_REST = ALWAYS - {Moment.REST}


def zero_account(facts: ZeroFacts) -> Account:
    """All of DeepSpeed's share of one rank's memory: what the model and its optimizer hold, activations aside."""
    build = _SCHEMES[facts.scheme]
    entries = (entry for entry in (*_untrained(facts), *build(facts)) if entry.bytes)
    return Account(tuple(entries), facts.unknown, device_is_host=facts.lazy_pages)


# -- parts that the schemes share ----------------------------------------------------------------------------------


def _bytes(parameters: tuple[Parameter, ...]) -> int:
    return sum(p.bytes for p in parameters)


def _numel(parameters: tuple[Parameter, ...]) -> int:
    return sum(p.numel for p in parameters)


def _untrained(f: ZeroFacts) -> Iterator[Entry]:
    frozen = [p for p in f.parameters if not p.trainable]
    held = sum((f.shard(p) if f.stage == 3 else p.numel) * p.element_bytes for p in frozen)
    yield Entry(Item.FROZEN, held, f.parameter_place)
    yield Entry(Item.BUFFERS, f.buffer_bytes)


def _state(f: ZeroFacts, numel: int, from_start: bool = False) -> Entry:
    """Source: optimizers make their state in their first step; FP16_Optimizer takes one on zeros at the start."""
    held = numel * f.optimizer.state_tensors * f.optimizer.state_bytes
    return Entry(Item.STATE, held, f.state_place, ALWAYS if f.stepped or from_start else _STEP)


def _lasting(f: ZeroFacts) -> frozenset[Moment]:
    """Moments of a buffer that exists from the start and is first written to in a backward; what that backward writes
    itself is in `_passing`."""
    if f.stepped or not f.lazy_pages:
        return ALWAYS
    return _AFTER_REST if written_before(f) else _STEP


def _until_reduced(f: ZeroFacts, held: int, after: frozenset[Moment]) -> Iterator[Entry]:
    """Whole gradients of the model, and moments at which they are there but for the backward of units."""
    modules = f.modules()
    late = 0 if f.accumulation > 1 else sum(own_gradients(modules[name]) for name in behind_units(f))
    yield Entry(Item.GRADIENTS, held - late, moments=_carried(f) | _BACKWARD)
    yield Entry(Item.GRADIENTS, held, moments=after)


def _carried(f: ZeroFacts) -> frozenset[Moment]:
    """Moments before the backward at which earlier microbatches of the update have left something."""
    return _FORWARD if f.accumulation > 1 else frozenset()


def _temporaries(f: ZeroFacts, stepped: list[int]) -> int:
    """Of one call of the optimizer's step on tensors of these numbers of elements."""
    if not stepped:
        return 0
    copies = f.optimizer.copies_of_largest * max(stepped) + f.optimizer.copies_of_all * sum(stepped)
    return copies * f.optimizer.state_bytes


def _first_state(f: ZeroFacts, numel: int) -> int:
    return 0 if f.stepped else numel * f.optimizer.state_tensors * f.optimizer.state_bytes


def _written(f: ZeroFacts, numel: int) -> int:
    """Elements of a bucket that cost memory, where gradients of `numel` elements pass through it."""
    return min(f.reduce_bucket, numel) if f.lazy_pages else f.reduce_bucket


def _filling(f: ZeroFacts) -> int:
    """Elements that a bucket holds when it is reduced: at most its size, at most all gradients; one gradient that is
    larger than the bucket goes by itself."""
    numels = [p.numel for p in f.trainable]
    return max(min(f.reduce_bucket, sum(numels)), max(numels, default=0))


def _buffers(f: ZeroFacts) -> int:
    """How many buckets are in use: two where communication overlaps and one does not hold everything."""
    second = f.overlap_comm and not (f.lazy_pages and _numel(f.trainable) <= f.reduce_bucket)
    return 2 if second else 1


def _flat_copy(numels: list[int], at_once: int) -> int:
    """Elements of the largest flat copy, where tensors are flattened until there are more than `at_once` elements.

    Flattening a single tensor makes no copy.
    """
    largest = count = total = 0
    for numel in numels:
        count, total = count + 1, total + numel
        if total > at_once:
            largest = max(largest, total if count > 1 else 0)
            count = total = 0
    return max(largest, total if count > 1 else 0)


# -- stage 0 -------------------------------------------------------------------------------------------------------


def _torch(f: ZeroFacts) -> Iterator[Entry]:
    """Source: DeepSpeedEngine.allreduce_bucket, _take_model_step."""
    trainable, numels = f.trainable, [p.numel for p in f.trainable]
    gradients = _bytes(trainable)
    yield Entry(Item.TRAINABLE, gradients)
    yield _state(f, _numel(trainable))
    yield from _until_reduced(f, gradients, _REDUCE | _STEP)
    yield from _allreduce(f, numels, trainable[0].element_bytes if trainable else 0)
    yield Entry(Item.OPTIMIZER_STEP, _temporaries(f, numels), moments=_STEP)


def _half(f: ZeroFacts) -> Iterator[Entry]:
    """Source: FP16_Optimizer.step, FP16_UnfusedOptimizer.step."""
    trainable, numels = f.trainable, [p.numel for p in f.trainable]
    gradients, widened = _bytes(trainable), _numel(trainable) * f.master_bytes
    yield Entry(Item.TRAINABLE, gradients)
    yield Entry(Item.MASTER, widened)
    yield _state(f, _numel(trainable), from_start=True)
    yield from _until_reduced(f, gradients, _REDUCE)
    yield from _allreduce(f, numels, trainable[0].element_bytes if trainable else 0)
    if f.fused:  # widened one by one, then flattened, then the gradients go
        stepped = [_numel(group) for group in f.groups]
        peak = max(gradients + 2 * widened, widened + _temporaries(f, stepped))
    else:
        peak = gradients + widened + _temporaries(f, numels)
    yield Entry(Item.OPTIMIZER_STEP, peak, moments=_STEP)


def _allreduce(f: ZeroFacts, numels: list[int], element_bytes: int) -> Iterator[Entry]:
    copy = _flat_copy(numels, _REDUCED_AT_ONCE)
    converted = min(sum(numels), _REDUCED_AT_ONCE) if f.communication_bytes != element_bytes else 0
    yield Entry(Item.REDUCED, copy * element_bytes + converted * f.communication_bytes, moments=_REDUCE)


# -- stages 1 and 2 ------------------------------------------------------------------------------------------------


def _bf16(f: ZeroFacts) -> Iterator[Entry]:
    """Source: BF16_Optimizer: fp32 gradients of everything stay, low-precision ones are set to zero, not freed."""
    groups = flat_groups(f)
    flat, partition = sum(g.numel for g in groups), sum(g.partition for g in groups)
    largest = max((p.numel for p in f.trainable), default=0)
    low = _bytes(f.trainable)
    yield Entry(Item.TRAINABLE, sum(g.numel * _element_bytes(g.parameters) for g in groups))
    yield Entry(Item.MASTER, partition * f.master_bytes)
    yield _state(f, partition)
    there = ALWAYS if written_before(f) else _FROM_BACKWARD
    yield Entry(Item.MASTER_GRADIENTS, flat * f.accumulation_bytes, moments=there)
    yield Entry(Item.GRADIENTS, low, moments=_carried(f) | _FROM_BACKWARD)
    converted = max((g.numel for g in groups), default=0) if f.communication_bytes != f.accumulation_bytes else 0
    passing = max(largest * f.accumulation_bytes, converted * f.communication_bytes)
    yield Entry(Item.REDUCED, passing, moments=_REDUCE)
    yield Entry(Item.OPTIMIZER_STEP, _temporaries(f, [g.partition for g in groups]), moments=_STEP)


def _element_bytes(parameters: tuple[Parameter, ...]) -> int:
    return parameters[0].element_bytes if parameters else 0


def _partitioned(f: ZeroFacts) -> Iterator[Entry]:
    """Source: DeepSpeedZeroOptimizer."""
    groups = flat_groups(f)
    yield Entry(Item.TRAINABLE, sum(g.numel * _element_bytes(g.parameters) for g in groups))
    partition = sum(g.partition for g in groups)
    yield Entry(Item.MASTER, partition * f.master_bytes, f.state_place)
    yield _state(f, partition)
    if f.offload_optimizer:
        yield Entry(Item.MASTER_GRADIENTS, partition * f.master_bytes, Place.HOST)
        yield from _staging(f, groups, partition)
    yield from (_gradients_of_stage_1 if f.stage == 1 else _gradients_of_stage_2)(f, groups)
    temporaries = _temporaries(f, [max((g.partition for g in groups), default=0)])
    if f.offload_optimizer:
        yield Entry(Item.OPTIMIZER_STEP, temporaries, Place.HOST, _STEP)
    else:
        yield Entry(Item.OPTIMIZER_STEP, _step_peak(f, groups), moments=_STEP)


def _staging(f: ZeroFacts, groups: tuple[FlatGroup, ...], partition: int) -> Iterator[Entry]:
    """Source: DeepSpeedZeroOptimizer.__init__, async_accumulate_grad_in_cpu_via_gpu."""
    element, largest = _element_bytes(f.trainable), max((p.numel for p in f.trainable), default=0)
    accumulates = f.stage == 2 and f.accumulation > 1 and not compact(f)
    yield Entry(Item.STAGING, partition * element, Place.HOST)
    if not f.lazy_pages:
        yield Entry(Item.STAGING, largest * element, Place.HOST)
    if accumulates or not f.lazy_pages:
        yield Entry(Item.STAGING, largest * element, moments=_lasting(f))
    if accumulates:
        held = sum(_numel(g.members) for g in groups) * element
        yield Entry(Item.STAGING, held, Place.HOST, ALWAYS if f.stepped else _AFTER_REST)


def _owned(f: ZeroFacts, groups: tuple[FlatGroup, ...]) -> int:
    """Bytes of reduced gradients of one backward: whole gradients of all that reaches into the partition."""
    if compact(f):
        return sum(g.partition for g in groups) * f.accumulation_bytes
    return sum(_bytes(g.members) for g in groups)


def _gradients_of_stage_2(f: ZeroFacts, groups: tuple[FlatGroup, ...]) -> Iterator[Entry]:
    if f.accumulation > 1 and not (f.offload_optimizer and not compact(f)):
        yield Entry(Item.PARTITION, _owned(f, groups), moments=_carried(f) | _BACKWARD | _REDUCE)
    yield from _passing(f)


def _passing(f: ZeroFacts) -> Iterator[Entry]:
    """Stages 2 and 3: gradients on their way (reduction.py), at the fullest instant of units' backward and after it."""
    phases, later = gradient_phases(f), behind_units(f) | {None}
    for moments, chosen in (
        (_BACKWARD, [phase for phase in phases if phase.module not in later]),
        (_REDUCE, [phase for phase in phases if phase.module in later]),
    ):
        fullest = max(chosen, key=lambda phase: phase.bytes, default=None)
        for item, count in (fullest.fullest if fullest is not None else {}).items():
            yield Entry(item, count, moments=moments)


def _gradients_of_stage_1(f: ZeroFacts, groups: tuple[FlatGroup, ...]) -> Iterator[Entry]:
    """Source: reduce_gradients. Whole gradients until the last microbatch, then bucket after bucket."""
    element = _element_bytes(f.trainable)
    gradients = _numel(f.trainable) * element
    if compact(f):  # grad_accum: fp32 in place of .grad
        gradients = _numel(f.trainable) * f.accumulation_bytes
        element = f.accumulation_bytes
    yield from _until_reduced(f, gradients, frozenset())
    bucket = 0
    if f.contiguous_gradients or f.offload_optimizer:
        bucket = _buffers(f) * _written(f, _numel(f.trainable)) * element
        # Made at the first gradient, given back when the update's last backward has been reduced.
        moments = _REDUCE if f.lazy_pages else _carried(f) | _BACKWARD | _REDUCE
        yield Entry(Item.BUCKETS, bucket, moments=moments)
    owned = 0 if f.offload_optimizer and not compact(f) else _owned(f, groups)
    yield Entry(Item.PARTITION, owned, moments=_REDUCE)
    besides = _reduce_peak(f, element, owned) - owned - (bucket if f.lazy_pages else 0)
    yield Entry(Item.REDUCED, max(0, besides), moments=_REDUCE)


def _reduce_peak(f: ZeroFacts, element: int, owned: int) -> int:
    """Stage 1: gradients left, bytes written to the bucket (where pages are lazy), copies, and the partition."""
    contiguous = f.contiguous_gradients or f.offload_optimizer
    left = peak = _numel(f.trainable) * element
    filling = written = 0
    for p in f.trainable:
        if filling and filling + p.numel > f.reduce_bucket:
            peak = max(peak, left + written + filling * _copy_bytes(f, element) + owned)
            filling = 0
        filling += p.numel
        if contiguous and p.numel <= f.reduce_bucket:
            if f.lazy_pages:
                written = max(written, filling * element)
            peak = max(peak, left + written)  # copied, and not yet let go
            left -= p.numel * element
    return max(peak, left + written + filling * _copy_bytes(f, element), left + written + owned)


def _copy_bytes(f: ZeroFacts, element: int) -> int:
    return element + (f.communication_bytes if f.communication_bytes != element else 0)


def _step_peak(f: ZeroFacts, groups: tuple[FlatGroup, ...]) -> int:
    """Gradients of the partitions, their flat copies and the optimizer's temporaries, group by group.

    Source: DeepSpeedZeroOptimizer.step, scaled_global_norm. State made in a first step is in a line of its own.
    """
    element, straight = _element_bytes(f.trainable), compact(f)

    def gradients(group: FlatGroup) -> int:
        if straight or not group.members:
            return group.partition * f.accumulation_bytes
        return _bytes(group.members) + group.padding * f.accumulation_bytes

    held = sum(gradients(group) for group in groups)
    peak = held + max((p.numel for g in groups for p in g.members), default=0) * NORM_BYTES
    state = 0
    for group in groups:
        flattened = 0 if straight else group.partition * element
        single = 0 if (element if not straight else 4) == f.master_bytes else group.partition * f.master_bytes
        peak = max(peak, held + state + flattened + single)
        held -= gradients(group)
        state += _first_state(f, group.partition)
        stepping = group.partition * f.master_bytes + _temporaries(f, [group.partition])
        peak = max(peak, held + state + stepping)
    return max(0, peak - state)


# -- stage 3 -------------------------------------------------------------------------------------------------------


def _sharded(f: ZeroFacts) -> Iterator[Entry]:
    """Source: DeepSpeedZeroOptimizer_Stage3, partition_parameters.py."""
    shards, element = f.sharded(f.trainable), _element_bytes(f.trainable)
    yield Entry(Item.TRAINABLE, shards * element, f.parameter_place)
    yield Entry(Item.MASTER, shards * f.master_bytes, f.state_place)
    yield _state(f, shards)
    yield Entry(Item.PARTITION, shards * f.accumulation_bytes, f.state_place)  # of zeros, from the start
    if f.offload_optimizer:
        yield Entry(Item.MASTER_GRADIENTS, shards * f.master_bytes, Place.HOST)
    yield from _gathered(f)
    if f.contiguous_gradients:
        yield Entry(Item.BUCKETS, _written(f, _numel(f.trainable)) * f.communication_bytes, moments=_lasting(f))
    yield from _passing(f)
    yield _step_of_stage_3(f)


def _gathered(f: ZeroFacts) -> Iterator[Entry]:
    if f.world_size > 1 or f.offload_parameters:
        whole = sum(p.bytes for p in f.persists())
        yield Entry(Item.PERSISTENT, whole, moments=ALWAYS if f.stepped else _AFTER_REST)
    found = gathered_bytes(f)
    yield Entry(Item.GATHERED, found.forward, moments=_FORWARD)
    yield Entry(Item.GATHERING, found.forward_with_copies - found.forward, moments=frozenset({Moment.FORWARD}))
    yield Entry(Item.GATHERED, found.backward, moments=_BACKWARD)
    yield Entry(Item.GATHERING, found.backward_with_copies - found.backward, moments=_BACKWARD)


def _step_of_stage_3(f: ZeroFacts) -> Entry:
    """Source: DeepSpeedZeroOptimizer_Stage3.step, _prepare_fp32_grad_for_sub_group, _create_fp16_sub_groups."""
    peak = 0
    for group in f.groups:
        for numel, several in _sub_groups(f, group):
            flattened = numel * f.accumulation_bytes if several else 0
            widened = numel * f.master_bytes if f.accumulation_bytes != f.master_bytes else 0
            gradient = 0 if f.offload_optimizer else (widened or flattened)
            copying = 0 if f.offload_optimizer else flattened + widened
            peak = max(peak, copying, gradient + _temporaries(f, [numel]))
    return Entry(Item.OPTIMIZER_STEP, peak, f.state_place, _STEP)


def _sub_groups(f: ZeroFacts, group: tuple[Parameter, ...]) -> Iterator[tuple[int, bool]]:
    """Elements of each sub group's shards, and whether it has several parameters."""
    numel = count = 0
    for p in group:
        numel, count = numel + f.shard(p), count + 1
        if numel >= f.sub_group:
            yield numel, count > 1
            numel = count = 0
    if count:
        yield numel, count > 1


_SCHEMES: dict[Scheme, Callable[[ZeroFacts], Iterator[Entry]]] = {
    Scheme.TORCH: _torch,
    Scheme.HALF: _half,
    Scheme.BF16: _bf16,
    Scheme.PARTITIONED: _partitioned,
    Scheme.SHARDED: _sharded,
}
