"""How much ZeRO-3 gathers at once: parameters in use, fetched ahead, and not yet released.

Follows `PartitionedParameterCoordinator` through one microbatch: modules run in order and, for backward, in reverse;
each is fetched, further ones are fetched ahead up to `prefetch_bucket_size` elements, and a parameter is released after
use unless it comes again within `max_reuse_distance` elements. At that setting's default, a billion, models of up to
half that size keep all they gathered until its last use. The very first microbatch does neither: its order is only
recorded.
"""

from __future__ import annotations

from collections import deque
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
    persistent = {id(p) for p in facts.persists()}
    wanted = [tuple(p for p in module if id(p) not in persistent) for module in facts.modules().values()]
    return _Walk(facts, [module for module in wanted if module]).run()


@dataclass
class _Walk:
    """State while following one microbatch.

    A flat buffer of several parameters is freed when they have been copied out of it; that of a single one becomes the
    parameter itself.
    """

    facts: ZeroFacts
    modules: list[tuple[Parameter, ...]]
    whole: dict[int, int] = field(default_factory=dict)  # id -> bytes
    in_flight: dict[int, list[Parameter]] = field(default_factory=dict)  # id -> parameters fetched with it
    whole_bytes: int = 0
    flat: int = 0
    highest: int = 0
    highest_with_copies: int = 0

    def run(self) -> Gathered:
        order = [*range(len(self.modules)), *reversed(range(len(self.modules)))]
        queue = deque(p for module in order for p in self.modules[module])
        seen: list[tuple[int, int]] = []
        for step, module in enumerate(order):
            self._fetch(self.modules[module], queue)
            self._release(order, step)
            if step + 1 in (len(self.modules), len(order)):
                seen.append((self.highest, self.highest_with_copies))
                self.highest, self.highest_with_copies = self.whole_bytes, self.whole_bytes + self.flat
        forward, backward = seen[0], seen[-1]
        return Gathered(forward[0], backward[0], forward[1], backward[1])

    def _note(self) -> None:
        self.highest = max(self.highest, self.whole_bytes)
        self.highest_with_copies = max(self.highest_with_copies, self.whole_bytes + self.flat)

    def _submit(self, parameters: Sequence[Parameter]) -> None:
        missing = [p for p in parameters if id(p) not in self.whole and id(p) not in self.in_flight]
        for p in missing:
            self.in_flight[id(p)] = missing
        self.flat += sum(p.bytes for p in missing)
        self._note()

    def _fetch(self, module: tuple[Parameter, ...], queue: deque[Parameter]) -> None:
        self._submit(module)
        for p in module:
            group = self.in_flight.get(id(p))
            if group is not None:
                self._arrive(group)
        if not self.facts.stepped:
            return
        for _ in module:
            if queue:
                queue.popleft()
        ahead: dict[int, Parameter] = {}
        numel = 0
        while queue and numel < self.facts.prefetch_bucket:
            p = queue.popleft()
            if id(p) not in self.whole and id(p) not in self.in_flight and id(p) not in ahead:
                ahead[id(p)] = p
                numel += p.numel
        self._submit(list(ahead.values()))

    def _arrive(self, group: list[Parameter]) -> None:
        size = sum(p.bytes for p in group)
        self.whole.update((id(p), p.bytes) for p in group)
        self.whole_bytes += size
        if len(group) == 1:
            self.flat -= size
        self._note()
        if len(group) > 1:
            self.flat -= size
        for p in group:
            del self.in_flight[id(p)]

    def _release(self, order: list[int], step: int) -> None:
        """Source: PartitionedParameterCoordinator.__params_to_release."""
        kept: set[int] = set()
        if self.facts.stepped:
            traversed = 0
            for module in order[step + 1 :]:
                if traversed >= self.facts.max_reuse_distance:
                    break
                kept.update(id(p) for p in self.modules[module])
                traversed += sum(p.numel for p in self.modules[module])
        for p in self.modules[order[step]]:
            if id(p) not in kept:
                self.whole_bytes -= self.whole.pop(id(p), 0)
