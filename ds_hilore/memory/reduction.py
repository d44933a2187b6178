"""What gradients become while a backward runs: buckets, copies, partitions; module after module, then at its end.

ZeRO-2 and ZeRO-3 reduce whenever a bucket is full. With buckets smaller than all gradients that is in the middle of the
backward, beside activations; else only when it is over, and then activations are gone. The walk follows the functions
that each part names, and says what was held at the fullest instant of each module's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ds_hilore.memory.ledger import Item
from ds_hilore.memory.zero import FlatGroup, Parameter, Scheme, ZeroFacts, flat_groups

#: Norms of gradients are taken in float64, one tensor after the other (base_optimizer: get_norm_dtype).
NORM_BYTES = 8


@dataclass
class Phase:
    """One module's backward, or (None) what happens when the last one is over.

    Args:
        fullest: bytes by item at the instant at which they are most together.
        highest: the most of each item, whenever that was.
    """

    module: str | None
    fullest: Counter[Item] = field(default_factory=Counter)
    highest: Counter[Item] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        return self.fullest.total()


def gradient_phases(facts: ZeroFacts) -> tuple[Phase, ...]:
    """The phases of a microbatch's backward, in order; those of modules without gradients are left out.

    Empty for schemes whose gradients are reduced after the backward (stages 0 and 1).
    """
    if facts.stage < 2 or not facts.trainable:
        return ()
    return (_Stage2(facts) if facts.scheme is Scheme.PARTITIONED else _Stage3(facts)).run()


def growing_gradients(facts: ZeroFacts) -> dict[str, int]:
    """Bytes by module that gradients, and what is made of them, grow by with its backward, and that stay or come again
    until all are there. Empty where nothing grows: what an earlier microbatch has left is there from the start."""
    if facts.stage > 1:
        phases, found = gradient_phases(facts), {}
        # a bucket that is whole from its first gradient on is there when the first unit is at its fullest
        highest = 0 if facts.lazy_pages or not phases else phases[0].highest[Item.BUCKETS]
        for phase in phases:
            if phase.module is not None:
                found[phase.module] = max(0, phase.bytes - highest)
                highest = max(highest, phase.bytes)
        return {name: count for name, count in found.items() if count}
    if facts.accumulation > 1:
        return {}
    return {name: count for name, of in facts.modules().items() if (count := own_gradients(of))}


def transient_gradients(facts: ZeroFacts) -> dict[str, int]:
    """Bytes by unit of gradients that are there until its backward is over, and do not grow: ZeRO-3's units hand theirs
    over together, into a bucket that is there already."""
    if facts.stage < 3:
        return {}
    return {name: own_gradients(of) for name, of in facts.modules().items() if any(p.unit for p in of)}


def own_gradients(module: tuple[Parameter, ...]) -> int:
    """Bytes of a module's gradients as backward gives them."""
    return sum(p.bytes for p in module if p.trainable)


def behind_units(facts: ZeroFacts) -> frozenset[str]:
    """Modules whose backward comes when that of the last recovery unit is over: a trained embedding. Activations of
    units are gone by then. None where no parameter is known to lie in a unit."""
    found: set[str] = set()
    for name, of in facts.modules().items():
        if any(p.unit for p in of):
            return frozenset(found)
        found.add(name)
    return frozenset()


@dataclass
class _Walk:
    facts: ZeroFacts
    phases: list[Phase] = field(default_factory=list)
    held: Counter[Item] = field(default_factory=Counter)
    filling: list[Parameter] = field(default_factory=list)

    def run(self) -> tuple[Phase, ...]:
        for name, of in reversed(self.facts.modules().items()):
            trained = [p for p in reversed(of) if p.trainable]
            if trained:
                self.phases.append(Phase(name))
                self.hold()
                self.backward(trained)
        self.phases.append(Phase(None))
        self.hold()
        self.finish()
        return tuple(self.phases)

    def backward(self, trained: list[Parameter]) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def hold(self, changes: Mapping[Item, int] | None = None) -> None:
        """What is held from now on, by item."""
        self.held.update({item: count - self.held[item] for item, count in (changes or {}).items()})
        phase = self.phases[-1]
        phase.highest |= self.held
        if self.held.total() > phase.bytes:
            phase.fullest = Counter(self.held)

    @property
    def filled(self) -> int:
        """Elements in the bucket."""
        return sum(p.numel for p in self.filling)


@dataclass
class _Stage2(_Walk):
    """Source: DeepSpeedZeroOptimizer: setup_buckets, reduce_independent_p_g_buckets_and_remove_grads,
    reduce_ipg_grads, average_tensor, copy_grads_in_partition."""

    written: list[int] = field(default_factory=lambda: [0, 0])  # bytes of each bucket's pages
    turn: int = 0
    owned: int = 0
    waiting: int = 0  # bytes of gradients that are in no bucket

    def __post_init__(self) -> None:
        f = self.facts
        self.groups = flat_groups(f)
        self.element = f.trainable[0].element_bytes
        self.contiguous = f.contiguous_gradients or f.offload_optimizer
        self.compact = compact(f)

    def backward(self, trained: list[Parameter]) -> None:
        f = self.facts
        for p in trained:
            if self.filling and self.filled + p.numel > f.reduce_bucket:
                self._reduce()
                self.turn = 1 - self.turn if f.overlap_comm else 0
            self.waiting += p.bytes
            bucketed = self.contiguous and p.numel <= f.reduce_bucket
            if bucketed:
                self.written[self.turn] = max(self.written[self.turn], (self.filled + p.numel) * self.element)
            self.hold({Item.BUCKETS: self._buckets(), Item.GRADIENTS: self.waiting})
            if bucketed:
                self.waiting -= p.bytes
                self.hold({Item.GRADIENTS: self.waiting})
            self.filling.append(p)

    def finish(self) -> None:
        if self.filling:
            self._reduce()

    def _buckets(self) -> int:
        if not self.contiguous:
            return 0
        if self.facts.lazy_pages:
            return sum(self.written)
        return (2 if self.facts.overlap_comm else 1) * self.facts.reduce_bucket * self.element

    def _reduce(self) -> None:
        f, filled = self.facts, self.filled
        if self.compact and f.accumulation == 1:  # made before anything is sent
            self.hold({Item.PARTITION: sum(g.partition for g in self.groups) * f.accumulation_bytes})
        copied = self._slices() > 1 and (f.reduce_scatter or not self.contiguous)
        converted = filled * f.communication_bytes if f.communication_bytes != self.element else 0
        self.hold({Item.REDUCED: (filled * self.element if copied else 0) + converted})
        self.hold({Item.REDUCED: 0})
        mine = {id(p) for g in self.groups for p in g.members}
        kept = [p for p in self.filling if id(p) in mine]
        if f.offload_optimizer and not self.compact:
            self.hold({Item.REDUCED: NORM_BYTES * max((p.numel for p in kept), default=0)})
            self.hold({Item.REDUCED: 0})
        elif not self.compact and self.contiguous:
            self._keep(kept)
        self.waiting = 0 if self.contiguous else sum(p.bytes for p in kept) + self.waiting - filled * self.element
        self.hold({Item.GRADIENTS: self.waiting})
        self.filling.clear()

    def _keep(self, kept: list[Parameter]) -> None:
        """Reduced gradients of this rank's are copied to where they stay; that is allocated at once, written bit by
        bit."""
        if kept:
            self.owned += sum(p.bytes for p in kept)
            members = sum(p.bytes for g in self.groups for p in g.members)
            self.hold({Item.PARTITION: self.owned if self.facts.lazy_pages else members})

    def _slices(self) -> int:
        """Pieces that one bucket is sent in: neighbours for the same rank are one. A single piece is not copied."""
        count, before = 0, None
        for p in self.filling:
            for rank in _owners(self.groups, p):
                if self.compact or rank != before:
                    count += 1
                before = rank
        return count


def _owners(groups: tuple[FlatGroup, ...], p: Parameter) -> Iterator[int]:
    """Ranks whose partitions a parameter reaches into."""
    for group in groups:
        start = 0
        for other in group.parameters:
            if other is p:
                yield from range(start // group.partition, (start + p.numel - 1) // group.partition + 1)
                return
            start += other.numel


@dataclass
class _Stage3(_Walk):
    """Source: DeepSpeedZeroOptimizer_Stage3: __add_grad_to_ipg_bucket, __avg_scatter_grads, partition_grads;
    reduce_scatter_coalesced. A unit hands its gradients over together, when the next backward begins (NOTE [Schedule
    rules] of integration/zero3.py)."""

    written: int = 0
    before: list[Parameter] = field(default_factory=list)  # of the module that has not handed over yet

    def backward(self, trained: list[Parameter]) -> None:
        self._hand_over()
        self.before = trained
        # there for a moment only: they come as the module's own state goes
        self.phases[-1].highest |= Counter({Item.GRADIENTS: self._waiting() + self._last()})

    def finish(self) -> None:
        self._hand_over()
        # a unit's wait for the begin of the next backward, and those of the modules between them come meanwhile
        self.hold({Item.GRADIENTS: self._waiting() + self._last()})
        if self.filling:
            self._reduce()

    def _last(self) -> int:
        """Gradients that may be there beside the bucket: those of two modules."""
        return sum(sorted(own_gradients(of) for of in self.facts.modules().values())[-2:])

    def _hand_over(self) -> None:
        f = self.facts
        for p in self.before:
            if self.filling and self.filled + p.numel > f.reduce_bucket:
                self._reduce()
            self.filling.append(p)
            if f.contiguous_gradients and p.numel <= f.reduce_bucket:
                self.written = max(self.written, self.filled * f.communication_bytes)
            self._hold_buckets()
        self.before = []
        self.hold({Item.GRADIENTS: self._waiting()})

    def _hold_buckets(self) -> None:
        if not written_before(self.facts):
            self.hold({Item.BUCKETS: self.written})

    def _waiting(self) -> int:
        """Gradients that are in no bucket."""
        if self.facts.contiguous_gradients:
            return sum(p.bytes for p in self.filling if p.numel > self.facts.reduce_bucket)
        return own_gradients(tuple(self.filling))

    def _reduce(self) -> None:
        f, filled = self.facts, self.filled
        alone = len(self.filling) == 1 and filled % f.world_size == 0
        padded = 0 if alone else f.world_size * f.sharded(self.filling)
        element = self.filling[0].element_bytes
        converted = filled * f.communication_bytes if f.communication_bytes != element else 0
        scattered = (
            f.world_size * f.sharded(self.filling) if f.lazy_pages else 0
        )  # gloo scatters from a copy of its own
        self.hold({Item.REDUCED: (padded + scattered) * f.communication_bytes + converted})
        self.hold({Item.REDUCED: padded * f.communication_bytes + converted})
        self.filling.clear()
        self.hold({Item.REDUCED: 0, Item.GRADIENTS: self._waiting()})


def compact(f: ZeroFacts) -> bool:
    """Reduced gradients go straight into an fp32 partition."""
    return f.accumulation_bytes == 4 and bool(f.trainable) and f.trainable[0].element_bytes != 4


def written_before(f: ZeroFacts) -> bool:
    """Whether an earlier backward has written to what is allocated at the start, or that does not matter."""
    return f.stepped or not f.lazy_pages or f.accumulation > 1
