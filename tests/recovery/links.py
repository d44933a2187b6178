"""Links to host memory that are late, fail, or keep a record, for tests of offload on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hilore.recovery.link import Link, PlainLink, Transfer
from ds_hilore.recovery.offload import Offload
from ds_hilore.recovery.unit import RecoveryContext


def over(link: Link) -> RecoveryContext:
    """A context whose units offload over this link."""
    return RecoveryContext(offload=Offload(lambda device: link))


class LateCopy:
    """A copy that has not begun. Its target is full of NaN until somebody waits for it, or time passes.

    Args:
        first: the copy that comes before it on the same stream.
    """

    def __init__(self, source: Tensor, first: LateCopy | None = None) -> None:
        self.target = torch.full_like(source, 0xFF)
        self._source: Tensor | None = source
        self._first = first

    def arrived(self) -> bool:
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            if self._first is not None:
                self._first.wait()
            self.target.copy_(self._source)
            self._source = self._first = None


class LateLink:
    """Copies are only made when somebody waits for them.

    Args:
        seed: then some arrive by themselves, later than they were asked for; None: none does.
        awaited: False: `wait` does nothing, as where somebody forgot it.
    """

    apart = True
    overlaps = True

    def __init__(self, seed: int | None = None, awaited: bool = True) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._awaited = awaited
        self._under_way: list[LateCopy] = []

    def to_host(self, source: Tensor) -> Transfer:
        return self._copy(source, None)

    def to_device(self, sent: Transfer) -> Transfer:
        assert isinstance(sent, LateCopy)
        return self._copy(sent.target, sent)

    def host_bytes(self, size: int) -> int:
        return size

    def _copy(self, source: Tensor, first: LateCopy | None) -> Transfer:
        if self._random is not None:
            for copy in self._under_way:
                if self._random.random() < 0.3:
                    copy.wait()
            self._under_way = [copy for copy in self._under_way if not copy.arrived()]
        copy = (LateCopy if self._awaited else _NeverCopied)(source, first)
        self._under_way.append(copy)
        return copy


class _NeverCopied(LateCopy):
    def wait(self) -> None:
        self._source = None


@dataclass
class WatchedLink(PlainLink):
    """Plain copies, counted; before each, `before` may raise.

    Attributes:
        sent, fetched: sizes of the copies that were made.
    """

    before: Callable[[str], None] = lambda way: None
    sent: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    apart: bool = True
    overlaps: bool = False

    def to_host(self, source: Tensor) -> Transfer:
        self.before("to host")
        self.sent.append(source.numel())
        return super().to_host(source)

    def to_device(self, sent: Transfer) -> Transfer:
        self.before("to device")
        self.fetched.append(sent.target.numel())
        return super().to_device(sent)


def failing(way: str, error: Exception, times: int = 1, after: int = 0) -> Callable[[str], None]:
    """Copies one way fail `times` times in a row, once `after` of them were made."""
    left = [after, times]

    def before(asked: str) -> None:
        if asked != way:
            return
        if left[0]:
            left[0] -= 1
        elif left[1]:
            left[1] -= 1
            raise error

    return before
