"""How much ZeRO-3 gathers at once: parameters in use, fetched ahead, and not yet released.

Follows `PartitionedParameterCoordinator` through one microbatch: modules run in order and, for backward, in reverse;
each is fetched, further ones are fetched ahead up to `prefetch_bucket_size` elements, and a parameter is released after
use unless it comes again within `max_reuse_distance` elements. At that setting's default, a billion, models of up to
half that size keep all they gathered until its last use. The very first microbatch does neither: its order is only
recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_hilore.memory.zero import Parameter, ZeroFacts


@dataclass(frozen=True)
class Gathered:
    """Device bytes at the fullest moment of each: whole parameters, and whole ones with flat copies beside them."""

    forward: int
    backward: int
    forward_with_copies: int
    backward_with_copies: int


def gathered_bytes(facts: ZeroFacts) -> Gathered:
    """What a microbatch gathers; persistent parameters aside, which stay."""
    if facts.world_size == 1 and not facts.offload_parameters:
        return Gathered(0, 0, 0, 0)  # a whole shard is a view of itself
    return _Walk(facts, list(facts.modules().values()), {id(p) for p in facts.persists()}).run()


@dataclass
class _Group:
    """Parameters that were fetched together. `unused`: how many of them no module has asked for since."""

    parameters: list[Parameter]
    unused: int
    arrived: bool = False

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.parameters)


@dataclass
class _Walk:
    """State while following one microbatch.

    A flat buffer of several parameters is copied out when the first of them is used, and freed when the last of them
    is: each holds the handle until then. That of a single one becomes the parameter itself.
    """

    facts: ZeroFacts
    modules: list[tuple[Parameter, ...]]
    persistent: set[int]  # ids; they are there, and part of all distances
    queue: list[Parameter] = field(default_factory=list)  # parameters in the order of their use
    position: int = 0  # in the queue; what is before it has been fetched
    whole: dict[int, int] = field(default_factory=dict)  # id -> bytes
    in_flight: dict[int, _Group] = field(default_factory=dict)  # by id of a parameter that was not used since
    whole_bytes: int = 0
    flat: int = 0
    highest: int = 0
    highest_with_copies: int = 0

    def run(self) -> Gathered:
        count = len(self.modules)
        trained = (number for number, module in enumerate(self.modules) if any(p.trainable for p in module))
        # Nothing before the first trained module has a backward: a frozen embedding, for one.
        order = [*range(count), *reversed(range(next(trained, count), count))]
        self.queue = [p for module in order for p in self.modules[module]]
        seen: list[tuple[int, int]] = []
        reached = 0
        for step, module in enumerate(order):
            if step in (0, count):  # modules around all others come first, in backward too, and fetch ahead
                for _ in range(self.facts.containers):
                    self._fetch_ahead()
            self._fetch(self.modules[module])
            reached += len(self.modules[module])
            self.position = max(self.position, reached)
            self._fetch_ahead()
            self._release(order, step)
            if step + 1 in (count, len(order)):
                seen.append((self.highest, self.highest_with_copies))
                self.highest, self.highest_with_copies = self.whole_bytes, self.whole_bytes + self.flat
        forward, backward = seen[0], seen[-1]
        return Gathered(forward[0], backward[0], forward[1], backward[1])

    def _note(self) -> None:
        self.highest = max(self.highest, self.whole_bytes)
        self.highest_with_copies = max(self.highest_with_copies, self.whole_bytes + self.flat)

    def _is_missing(self, p: Parameter) -> bool:
        return not (id(p) in self.whole or id(p) in self.in_flight or id(p) in self.persistent)

    def _submit(self, parameters: Sequence[Parameter]) -> None:
        missing = [p for p in parameters if self._is_missing(p)]
        group = _Group(missing, unused=len(missing))
        self.in_flight.update((id(p), group) for p in missing)
        self.flat += group.bytes
        self._note()

    def _fetch(self, module: tuple[Parameter, ...]) -> None:
        self._submit(module)
        for p in module:
            group = self.in_flight.pop(id(p), None)
            if group is not None:
                self._use(group)

    def _fetch_ahead(self) -> None:
        """Takes what comes next until it is enough; what is there already counts for nothing."""
        if not self.facts.order_is_known:
            return
        ahead: dict[int, Parameter] = {}
        numel = 0
        while self.position < len(self.queue) and numel < self.facts.prefetch_bucket:
            p = self.queue[self.position]
            self.position += 1
            if self._is_missing(p) and id(p) not in ahead:
                ahead[id(p)] = p
                numel += p.numel
        self._submit(list(ahead.values()))

    def _use(self, group: _Group) -> None:
        """Of one of the parameters of a group."""
        alone = len(group.parameters) == 1
        if not group.arrived:
            group.arrived = True
            self.whole.update((id(p), p.bytes) for p in group.parameters)
            self.whole_bytes += group.bytes
            if alone:
                self.flat -= group.bytes
            self._note()
        group.unused -= 1
        if not group.unused and not alone:
            self.flat -= group.bytes

    def _release(self, order: list[int], step: int) -> None:
        """Source: PartitionedParameterCoordinator.__params_to_release.

        It looks into the modules ahead as deeply as the module released is gathered: from a leaf module it sees the
        model around, first in backward, with all its parameters; from any other it sees no parameters of leaf modules.
        """
        module = self.modules[order[step]]
        leaf = module[0].leaf
        kept: set[int] = set()
        traversed = 0
        for later in range(step + 1, len(order)) if self.facts.order_is_known else ():
            if traversed >= self.facts.max_reuse_distance:
                break
            if leaf and later == len(self.modules):
                kept.update(id(p) for p in module)
                break
            ahead = self.modules[order[later]]
            if leaf or not ahead[0].leaf:
                kept.update(id(p) for p in ahead)
                traversed += sum(p.numel for p in ahead)
        for p in module:
            if id(p) not in kept:
                self.whole_bytes -= self.whole.pop(id(p), 0)
