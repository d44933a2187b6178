"""Which positions of a microbatch can still change the model, and how they are cut into batches of their own.

A position is live at a unit where the gradient that arrives there is not exactly zero: read from the gradient itself,
never from what was announced. In a causal unit everything up to a segment's last live position matters as well (later
queries read it), nothing after it does. Segments are told apart by the attention mask itself: a border lies where no
later query looks back across it, so padding on the left and packed sequences need no declaration.

    LiveSet    the live positions, on the host      -> cutting(...)
    Cutting    groups of segments, and what is live behind the unit that ran them
    Cut        one group: picks its segments out of tensors, and puts gradients back

Legend of shapes: B rows, T positions, k segments in a group, L positions of a group's windows.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

#: What a further group costs, in positions of one row: launches and smaller matrix products. Measured on one CPU core
#: (one Llama layer, 576 wide, 8 rows of 256): best between 0 and 16, two per cent worse at 64. Kernels on an
#: accelerator are launched one by one, so there more positions are worth a launch.
GROUP_COST = {"cpu": 16}
GROUP_COST_ACCELERATOR = 256
#: Windows are lengthened to a multiple of this: kernels like even shapes.
ROUND = 8
#: The most positions, as a share of all, that run at once where a replay's own state sets the peak (`lean`). That state
#: is not held by recipes, which would bring it to 0.87 to 0.90 of this (design fact 13).
MOST_AT_ONCE = 0.8
#: From this share of all positions on everything is run, as the plain unit would: nothing to gain, the same bits.
WORTHWHILE = 0.97


class Extent(Enum):
    """What of a row may be left out."""

    SEGMENTS = "segments"  # causal: everything behind a segment's last live position, and whole dead segments
    ROWS = "rows"  # whole dead rows only


@dataclass(frozen=True)
class Segment:
    """Positions `start` to `stop` (exclusive) of a row, from the segment's begin to behind its last live position."""

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class HostCopy:
    """A tensor on its way to the host: one pinned copy, waited for by event. CPU tensors are there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.get_device_module(tensor.device).Event()
        self._event.record()

    @property
    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


class Borders:
    """Where segments begin: [B, T] bool on the host, column 0 always true. Compared by identity."""

    def __init__(self, flags: Tensor) -> None:
        self._copy = HostCopy(flags)

    @property
    def flags(self) -> Tensor:
        return self._copy.get()

    @cached_property
    def trivial(self) -> bool:
        """Whether every row is one segment from its first position on."""
        return not bool(self.flags[:, 1:].any())

    @classmethod
    def of_mask(cls, mask: Tensor, rows: int) -> Borders:
        """Reads an attention mask [B or 1, heads or 1, T, T], bool (true: attends) or additive. Does not wait.

        A border lies before position s where no query from s on attends a key before s.
        """
        length = mask.shape[-1]
        position = torch.arange(length, device=mask.device)
        found = []
        for row in mask:
            attends = (row if row.dtype is torch.bool else row > torch.finfo(row.dtype).min / 2).any(0)
            first = attends.view(torch.uint8).argmax(-1)
            first = torch.where(attends.any(-1), first, length)
            found.append(first.flip(0).cummin(0).values.flip(0) >= position)
        flags = torch.stack(found)
        flags[:, 0] = True
        return cls(flags.expand(rows, length))

    @classmethod
    def of_starts(cls, starts: Tensor, rows: int, length: int) -> Borders:
        """Reads where segments begin in all rows laid end to end, [n + 1] with the end of the last. Does not wait."""
        flags = torch.zeros(rows * length + 1, dtype=torch.bool, device=starts.device)
        flags[starts.long()] = True
        flags = flags[:-1].view(rows, length)
        flags[:, 0] = True
        return cls(flags)

    @classmethod
    def none(cls, rows: int, length: int) -> Borders:
        """Each row is one segment."""
        flags = torch.zeros(rows, length, dtype=torch.bool)
        flags[:, 0] = True
        return cls(flags)


def live_segments(live: Tensor, borders: Tensor) -> list[Segment]:
    """The segments that hold a live position, cut behind the last one.

    Args:
        live: [B, T] bool on the host.
        borders: [B, T] bool on the host, true where a segment begins (column 0 of every row).
    """
    length = live.shape[1]
    starts = borders.flatten().nonzero().flatten()
    segment_of = borders.flatten().long().cumsum(0) - 1
    at = live.flatten().nonzero().flatten()
    last = torch.full_like(starts, -1).scatter_reduce_(0, segment_of[at], at, "amax")
    pairs = zip(starts.tolist(), last.tolist(), strict=True)
    return [Segment(first // length, first % length, end % length + 1) for first, end in pairs if end >= 0]


def grouped(segments: list[Segment], cost: int) -> list[list[Segment]]:
    """Segments in groups that run as one batch, each as long as its longest: least positions plus `cost` per group.

    Exact, over all partitions of the segments in order of length (any other partition can be sorted into one of these
    at no loss).
    """
    ordered = sorted(segments, key=lambda segment: (-segment.length, segment.row, segment.start))
    best, cut_at = [0], [0]
    for end in range(1, len(ordered) + 1):
        total, begin = min((best[i] + (end - i) * ordered[i].length + cost, i) for i in range(end))
        best.append(total)
        cut_at.append(begin)
    groups = []
    end = len(ordered)
    while end:
        groups.append(sorted(ordered[cut_at[end] : end], key=lambda segment: (segment.row, segment.start)))
        end = cut_at[end]
    return groups[::-1]


class Cut:
    """One group of segments of a microbatch [rows, length].

    Each segment gets a window of L positions that begins where it begins (earlier where the row would end before). What
    a window holds besides its segment is computed along and has no gradient.

    Args:
        alone: no row has a second live segment, so whatever else a window reaches is dead.
    """

    def __init__(self, segments: list[Segment], rows: int, length: int, device: torch.device, alone: bool) -> None:
        longest = max(segment.length for segment in segments)
        self.length = min(length, -(-longest // ROUND) * ROUND)
        self.segments = segments
        self.shape = (rows, length)
        self.device = device
        self._begin = [min(segment.start, length - self.length) for segment in segments]
        self._rows = [segment.row for segment in segments]
        self._all_rows = self._rows == list(range(rows))
        self._uniform = len(set(self._begin)) == 1
        self._plain = self._uniform and (alone or all(segment.length == self.length for segment in segments))
        self.whole = self._all_rows and self.length == length

    @property
    def positions(self) -> int:
        """Positions that a replay of this group computes."""
        return len(self.segments) * self.length

    def halved(self, most: int) -> list[list[Segment]]:
        """The group's segments, in two parts where they hold more than `most` positions together."""
        middle = len(self.segments) // 2
        if self.positions <= most or middle == 0:
            return [self.segments]
        return [self.segments[:middle], self.segments[middle:]]

    def pick(self, tensor: Tensor) -> Tensor:
        """[k, L, ...] of a tensor [B or 1, T, ...]; the tensor itself where the group is everything."""
        if self.whole:
            return tensor
        if self._uniform:
            part = tensor.narrow(1, self._begin[0], self.length)
            return part if self._all_rows or self._shared(tensor) else part.index_select(0, self._row_index)
        if tensor.shape[0] == 1:
            return tensor[0][self._window_index]
        return tensor[self._row_index[:, None], self._window_index]

    def pick_index(self, tensor: Tensor) -> Tensor:
        """[L] of a tensor [T] that holds positions without rows. Only where all windows begin alike."""
        return tensor if self.whole else tensor.narrow(0, self._begin[0], self.length)

    def pick_mask(self, mask: Tensor) -> Tensor:
        """[k or 1, heads or 1, L, L] of an attention mask [B or 1, heads or 1, T, T]."""
        if self.whole:
            return mask
        size = self.length
        if self._uniform:
            part = mask.narrow(2, self._begin[0], size).narrow(3, self._begin[0], size)
            return part if self._all_rows or self._shared(mask) else part.index_select(0, self._row_index)
        return torch.stack(
            [
                mask[row if mask.shape[0] > 1 else 0, :, begin : begin + size, begin : begin + size]
                for row, begin in zip(self._rows, self._begin, strict=True)
            ]
        )

    def pick_starts(self, starts: Tensor) -> Tensor:
        """[m + 1] of this group's windows, from starts [n + 1] of all rows. What a window holds besides its segment is
        divided too, so that nothing is longer than the longest segment."""
        if self.whole:
            return starts
        most = max(segment.length for segment in self.segments)
        found: list[int] = []
        for window, (segment, begin) in enumerate(zip(self.segments, self._begin, strict=True)):
            before, after = segment.start - begin, segment.stop - begin
            places = [*range(0, before, most), before, *range(after, self.length, most)]
            found += [window * self.length + place for place in places]
        found.append(len(self.segments) * self.length)
        return self._to_device(torch.tensor(found, dtype=starts.dtype))

    def pick_gradient(self, gradient: Tensor) -> Tensor:
        """[k, L, H] of the gradient at the unit's output [B, T, H], zero outside of the segments."""
        part = self.pick(gradient)
        # A window may reach into a live segment next to its own, which has a window of its own.
        return part if self.whole or self._plain else part.masked_fill(self._outside, 0.0)

    def put(self, target: Tensor, gradient: Tensor) -> None:
        """Writes a group's input gradient [k, L, H] to its segments' places in `target` [B, T, H]."""
        if self._plain:
            part = target.narrow(1, self._begin[0], self.length)
            if self._all_rows:
                part.copy_(gradient)
            else:
                part.index_copy_(0, self._row_index, gradient)
            return
        taken, place = self._places
        target.flatten(0, 1).index_copy_(0, place, gradient.flatten(0, 1).index_select(0, taken))

    def _shared(self, tensor: Tensor) -> bool:
        """Whether a tensor has one row for all rows of the microbatch."""
        return tensor.shape[0] == 1 < self.shape[0]

    @cached_property
    def _row_index(self) -> Tensor:
        return self._to_device(torch.tensor(self._rows))

    @cached_property
    def _window_index(self) -> Tensor:
        return self._to_device(torch.tensor(self._begin)[:, None] + torch.arange(self.length))

    @cached_property
    def _outside(self) -> Tensor:
        """[k, L, 1] bool: positions of the windows that do not belong to their segment."""
        return self._to_device(~self._inside()[..., None])

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Positions of the segments among those of the windows, and among those of the microbatch."""
        rows, begin = torch.tensor(self._rows)[:, None], torch.tensor(self._begin)[:, None]
        place = rows * self.shape[1] + begin + torch.arange(self.length)
        inside = self._inside()
        return self._to_device(inside.flatten().nonzero().flatten()), self._to_device(place[inside])

    def _inside(self) -> Tensor:
        inside = torch.zeros(len(self.segments), self.length, dtype=torch.bool)
        for i, (segment, begin) in enumerate(zip(self.segments, self._begin, strict=True)):
            inside[i, segment.start - begin : segment.stop - begin] = True
        return inside

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


@dataclass
class Cutting:
    """The groups of one microbatch at one unit, and the live positions of what lies before the unit."""

    cuts: list[Cut]
    after: LiveSet

    @property
    def positions(self) -> int:
        return sum(cut.positions for cut in self.cuts)


_Terms = tuple[Borders, Extent, bool]


@dataclass(eq=False)
class LiveSet:
    """Live positions [B, T] bool on the host; what is cut from them is kept, since units in a row share it."""

    flags: Tensor
    device: torch.device
    _cuttings: dict[_Terms, Cutting] = field(default_factory=dict)

    def cutting(self, borders: Borders, extent: Extent, lean: bool = False) -> Cutting:
        """The groups in which a unit's live positions run, one after another. No group: nothing is live.

        Args:
            lean: no group may hold nearly everything (`MOST_AT_ONCE`).
        """
        terms = borders, extent, lean
        known = self._cuttings.get(terms)
        if known is None:
            known = self._cuttings[terms] = self._cut(*terms)
        return known

    def _cut(self, borders: Borders, extent: Extent, lean: bool) -> Cutting:
        rows, length = self.flags.shape
        if extent is Extent.ROWS:
            segments = [Segment(row, 0, length) for row in self.flags.any(1).nonzero().flatten().tolist()]
        else:
            segments = live_segments(self.flags, borders.flags)
        alone = len({segment.row for segment in segments}) == len(segments)
        cost = GROUP_COST.get(self.device.type, GROUP_COST_ACCELERATOR)
        cuts = [Cut(group, rows, length, self.device, alone) for group in grouped(segments, cost)]
        if sum(cut.positions for cut in cuts) >= WORTHWHILE * rows * length:
            segments, alone = [Segment(row, 0, length) for row in range(rows)], True
            cuts = [Cut(segments, rows, length, self.device, alone)]
        if lean:
            most = int(MOST_AT_ONCE * rows * length)
            cuts = [Cut(half, rows, length, self.device, alone) for cut in cuts for half in cut.halved(most)]
        after = torch.zeros_like(self.flags)
        for segment in segments:
            after[segment.row, segment.start : segment.stop] = True
        if torch.equal(after, self.flags):
            return Cutting(cuts, self)
        before = LiveSet(after, self.device)
        before._cuttings[(borders, extent, lean)] = Cutting(cuts, before)
        return Cutting(cuts, before)

    @classmethod
    def of_gradient(cls, gradient: Tensor) -> LiveSet:
        """Positions of a gradient [B, T, H] with anything but exact zeros; NaN is live. Waits for one copy."""
        flags = (gradient.detach() != 0).flatten(2).any(2)
        return cls(HostCopy(flags).get(), gradient.device)


class LiveChain:
    """Live positions on their way through backward, from unit to unit: read once, then handed on.

    A unit that was pruned knows where the gradient that it gives is zero. Where that very tensor, unchanged, arrives at
    the unit before, nothing needs to be read again, and nobody waits for the device. Anything that comes in between (a
    unit that was stored, a loss on hidden states) makes it another tensor, which is read.
    """

    def __init__(self) -> None:
        self.reads = 0  # how often the host had to look at a gradient
        self._gradient: weakref.ref[Tensor] | None = None
        self._version = 0
        self._live: LiveSet | None = None

    def read(self, gradient: Tensor) -> LiveSet:
        """Live positions of the gradient that arrives at a unit's output."""
        known, live = self._gradient, self._live
        self.clear()
        if live is not None and known is not None and known() is gradient and gradient._version == self._version:
            return live
        self.reads += 1
        return LiveSet.of_gradient(gradient)

    def note(self, gradient: Tensor, live: LiveSet) -> None:
        """`gradient` goes on to the unit before; it is zero wherever `live` is not.

        Referred to weakly: it lives no longer than autograd needs it, and a dead one matches nothing. What autograd
        adds to it in place raises its version.
        """
        self._gradient, self._version, self._live = weakref.ref(gradient), gradient._version, live

    def clear(self) -> None:
        self._gradient = self._live = None
