"""What one rank holds: by name, by place, and at which moments of an update. Integers in, integers out; bytes.

An `Account` is filled in two ways: by arithmetic from what a configuration says (memory/zero.py), which needs no run,
and from the tensors of a live engine (integration/ledger.py), each storage once. Both use the same names, so they can
be held against each other line by line. Tensors of one element (step counters, flags) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Place


class Moment(str, Enum):
    """The moments of an update at which memory may be fullest. With accumulation, those of a later microbatch."""

    REST = "rest"  # before an update's first forward
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    REDUCE = "reduce"  # the last gradients of the update are reduced: after the last unit's backward
    STEP = "step"


ALWAYS = frozenset(Moment)
#: From the first forward of a microbatch to the end of its backward.
MICROBATCH = frozenset({Moment.FORWARD, Moment.LOSS, Moment.BACKWARD})


class Item(str, Enum):
    """The lines of an account."""

    FROZEN = "frozen parameters"  # or this rank's shards of them
    TRAINABLE = "trainable parameters"  # or shards; adapters under LoRA
    BUFFERS = "model buffers"
    PERSISTENT = "persistent parameters"  # ZeRO-3: small ones, whole on every rank
    GATHERED = "gathered parameters"  # ZeRO-3: whole ones of the units in use, soon to be used, or not yet released
    GATHERING = "gathering copies"  # ZeRO-3: the flat buffer beside them
    SECONDARY = "secondary shards"  # hpZ
    MASTER = "master copies"
    STATE = "optimizer state"
    GRADIENTS = "gradients"  # of whole parameters, before they are reduced
    PARTITION = "gradient partition"  # reduced, this rank's part
    MASTER_GRADIENTS = "master gradients"
    BUCKETS = "reduce buckets"
    REDUCED = "reduction copies"
    STAGING = "offload staging"
    OPTIMIZER_STEP = "optimizer temporaries"
    LOSS = "loss workspace"
    HELD = "kept by units"
    REPLAY = "replay workspace"
    PROCESS = "interpreter and libraries"
    FOREIGN = "held by others"  # on this device: a colocated sampler, the display

    @property
    def rank(self) -> int:
        """Place in the order of the table."""
        return list(Item).index(self)


@dataclass(frozen=True)
class Entry:
    """One line: so many bytes at one place, at these moments.

    Raises:
        UsageError: negative bytes.
    """

    item: Item
    bytes: int
    place: Place = Place.DEVICE
    moments: frozenset[Moment] = ALWAYS

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise UsageError(f"ledger: {self.item.value} cannot hold {self.bytes} bytes")


@dataclass(frozen=True)
class Line:
    """Entries of one item at one place, by moment: a row of the table."""

    item: Item
    place: Place
    bytes: Mapping[Moment, int]


@dataclass(frozen=True)
class Account:
    """All that one rank is known to hold.

    Args:
        entries: in any order; several may carry the same name.
        unknown: what is there but could not be counted, and why. An account with such lines is a lower limit.
        device_is_host: the device's memory is the host's (CPU runs), so both places count in one peak.
    """

    entries: tuple[Entry, ...] = ()
    unknown: tuple[str, ...] = ()
    device_is_host: bool = False

    def at(self, moment: Moment, place: Place = Place.DEVICE) -> int:
        """Bytes at one place at one moment. The host's lie on the device where both are the same memory."""
        return sum(e.bytes for e in self.entries if moment in e.moments and self._counts(e, place))

    def of(self, item: Item, moment: Moment = Moment.REST, place: Place | None = None) -> int:
        """Bytes of one item at a moment, at one place or at both."""
        return sum(e.bytes for e in self.entries if e.item is item and moment in e.moments and place in (None, e.place))

    def rise(self, moment: Moment) -> int:
        """Device bytes above the level at rest; below it where something went away."""
        return self.at(moment) - self.at(Moment.REST)

    def peak(self, place: Place = Place.DEVICE) -> tuple[Moment, int]:
        """The fullest moment and its bytes; the earliest of equal ones."""
        fullest = max(Moment, key=lambda moment: self.at(moment, place))
        return fullest, self.at(fullest, place)

    def planning_bases(self, growing_bytes: int = 0) -> tuple[int, int, int]:
        """What the planner's forward, loss and backward rows start from, without a run; loss workspace aside.

        Args:
            growing_bytes: gradients that the units bring with their backward (`grad_bytes` of their profiles), which
                are in the account of the backward and are not to count twice (`ZeroFacts.growing_gradients`).
        """
        return self.at(Moment.FORWARD), self.at(Moment.LOSS), self.at(Moment.BACKWARD) - growing_bytes

    def update_peak(self, microbatch_peak_bytes: int, level_bytes: int | None = None) -> int:
        """Peak of a whole update, given that of its fullest microbatch (a plan's), and the levels of REDUCE and STEP.

        Args:
            level_bytes: measured level at rest; default: that of the account.
        """
        rest = self.at(Moment.REST) if level_bytes is None else level_bytes
        return max(microbatch_peak_bytes, *(rest + self.rise(moment) for moment in (Moment.REDUCE, Moment.STEP)))

    def at_level(self, level_bytes: int) -> Account:
        """The account with everything else that a measured level at rest holds as one more line."""
        return self.with_entries([Entry(Item.PROCESS, max(0, level_bytes - self.at(Moment.REST)))])

    def with_entries(self, entries: Iterable[Entry]) -> Account:
        return replace(self, entries=(*self.entries, *entries))

    def lines(self) -> tuple[Line, ...]:
        """One line for each item and place that holds anything, in the order of `Item`."""
        found: dict[tuple[int, Item, Place], dict[Moment, int]] = {}
        for entry in self.entries:
            line = found.setdefault((entry.item.rank, entry.item, entry.place), dict.fromkeys(Moment, 0))
            for moment in entry.moments:
                line[moment] += entry.bytes
        ordered = sorted(found.items(), key=lambda kv: (kv[0][0], kv[0][2].value))
        return tuple(Line(item, place, bytes_) for (_, item, place), bytes_ in ordered if any(bytes_.values()))

    def as_json(self) -> dict[str, Any]:
        """Plain data: lines, sums by moment for each place, and what is unknown."""
        return {
            "lines": [
                {"item": line.item.value, "place": line.place.value, **{m.value: b for m, b in line.bytes.items()}}
                for line in self.lines()
            ],
            "total": {
                place.value: {moment.value: self.at(moment, place) for moment in Moment}
                for place in Place
                if not (self.device_is_host and place is Place.HOST)
            },
            "device_is_host": self.device_is_host,
            "unknown": list(self.unknown),
        }

    def _counts(self, entry: Entry, place: Place) -> bool:
        return entry.place is place or (self.device_is_host and place is Place.DEVICE)


def workload(held_bytes: int, loss_bytes: int, workspace_bytes: int) -> tuple[Entry, ...]:
    """What a microbatch adds.

    Args:
        held_bytes: kept by the units until their backward.
        loss_bytes: logits, or their chunks, and their gradients; there when the backward begins, too.
        workspace_bytes: of the unit whose backward needs most.
    """
    return (
        Entry(Item.HELD, held_bytes, moments=MICROBATCH),
        Entry(Item.LOSS, loss_bytes, moments=frozenset({Moment.LOSS})),
        Entry(Item.REPLAY, workspace_bytes, moments=frozenset({Moment.BACKWARD})),
    )
