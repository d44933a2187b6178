"""Memory budgets as the user writes them, and what they come to in bytes on one rank.

| written | kind | meaning |
|---|---|---|
| `"36GB"`, `"2GiB"`, `36000000000` | BYTES | that many bytes; kB to TB count in 1000s, KiB to TiB in 1024s |
| `0.9` (a number with a point, at most 1.0) | DEVICE_SHARE | this share of the device's memory |
| `"1.10x"` (at least `"1.0x"`) | CHECKPOINT_MULTIPLE | this multiple of our own all-R peak from the second update on |
| `"auto"`, `"free"` | AUTO | what the device has beside all that others hold, from the second update on |
| `["1.0x", "36GB"]` | one of these per rank | rank i takes entry i |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

from ds_hilore.core.errors import ConfigError

#: Smaller budgets are typing errors: no decoder model trains in less.
SMALLEST_BYTES = 1 << 20

#: A larger multiple is a typing error too: it limits nothing.
LARGEST_MULTIPLE = 1000.0

#: accelerate and the Trainer refuse an "auto" they do not know, hence the second word.
AUTO_WORDS = ("auto", "free")

#: What "auto" takes of a node's free memory for offloaded state: others on the node are still to take theirs.
AUTO_HOST_SHARE = 0.5

#: What "auto" takes of what is left: libraries' own buffers come late, and storing more fragments the allocator more.
AUTO_SHARE = 0.95

UNIT_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNIT_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

ALLOWED = (
    'bytes ("36GB", "512MB", "2GiB" or a whole number), a share of the device (0.9; 1.0 is all of it), '
    'a multiple of the checkpointing peak ("1.10x", at least "1.0x"), "auto" or "free" (what the device has free), or '
    "a list of these with one entry per rank"
)

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_MULTIPLE = re.compile(rf"{_NUMBER}\s*[xX]")
_BYTES = re.compile(rf"{_NUMBER}\s*([a-zA-Z]+)")
_BARE_NUMBER = re.compile(rf"{_NUMBER}\s*(%?)")


class BudgetKind(Enum):
    """What the number of a budget counts."""

    BYTES = "bytes"
    DEVICE_SHARE = "share of the device"
    CHECKPOINT_MULTIPLE = "multiple of the checkpointing peak"
    AUTO = "share of what the device has free"


@dataclass(frozen=True)
class MemoryBudget:
    """The memory limit of one rank. `value` is an int for BYTES and a float for the other kinds."""

    kind: BudgetKind
    value: int | float

    def for_rank(self, rank: int, world_size: int) -> MemoryBudget:
        """Gives the budget itself: one value holds for every rank."""
        return self

    def bytes_on(self, device_bytes: int, checkpointing_peak_bytes: int, ceiling_bytes: int | None = None) -> int:
        """Turns the budget into bytes.

        Args:
            device_bytes: memory of the rank's device.
            checkpointing_peak_bytes: peak of an all-R update of this rank, measured from the second update on.
            ceiling_bytes: how high peaks may come beside what others hold of the device; None: nobody holds anything.
        """
        if self.kind is BudgetKind.BYTES:
            return int(self.value)
        if self.kind is BudgetKind.DEVICE_SHARE:
            return int(self.value * device_bytes)
        if self.kind is BudgetKind.AUTO:
            return int(self.value * (device_bytes if ceiling_bytes is None else min(device_bytes, ceiling_bytes)))
        return int(self.value * checkpointing_peak_bytes)

    def as_json(self) -> int | float | str:
        """What the user could have written for it: `parse_budget(b.as_json()) == b`."""
        if self.kind is BudgetKind.AUTO:
            return "auto"
        return f"{self.value!r}x" if self.kind is BudgetKind.CHECKPOINT_MULTIPLE else self.value


@dataclass(frozen=True)
class RankBudgets:
    """One memory limit per rank, in rank order."""

    entries: tuple[MemoryBudget, ...]

    def for_rank(self, rank: int, world_size: int) -> MemoryBudget:
        """Gives the entry of `rank`.

        Raises:
            ConfigError: the list does not have one entry per rank of the job.
        """
        if len(self.entries) != world_size:
            raise ConfigError(
                f"hilore.memory_budget: the list has {len(self.entries)} entries and the job has {world_size} ranks; "
                "write one entry per rank, or one value for all of them"
            )
        return self.entries[rank]

    def as_json(self) -> list[int | float | str]:
        return [entry.as_json() for entry in self.entries]


def parse_budget(value: Any) -> MemoryBudget | RankBudgets:
    """Reads `memory_budget` as it stands in the JSON.

    Raises:
        ValueError: says the value, what is wrong with it and what is allowed.
    """
    if isinstance(value, MemoryBudget | RankBudgets):
        return value
    if not isinstance(value, list | tuple):
        return _parse_one(value)
    if not value:
        raise ValueError(f"the list is empty; allowed: {ALLOWED}")
    return RankBudgets(tuple(_parse_entry(index, entry) for index, entry in enumerate(value)))


def parse_host_budget(value: Any) -> MemoryBudget:
    """Reads `host_budget` as it stands in the JSON: bytes, or a share of what the node has free.

    Raises:
        ValueError: says the value and what is allowed.
    """
    if type(value) is int and value == 0:
        return MemoryBudget(BudgetKind.BYTES, 0)
    if isinstance(value, MemoryBudget) and value.kind in (BudgetKind.BYTES, BudgetKind.AUTO):
        return value
    try:
        found = _parse_one(value)
    except ValueError:
        found = None
    if found is None or found.kind not in (BudgetKind.BYTES, BudgetKind.AUTO):
        raise ValueError(
            'allowed: bytes per node ("64GB" or a whole number, at least 1 MiB), "auto" or "free" (half of what the '
            "node has free), or 0 for none"
        )
    return found if found.kind is BudgetKind.BYTES else MemoryBudget(BudgetKind.AUTO, AUTO_HOST_SHARE)


def _parse_entry(index: int, value: Any) -> MemoryBudget:
    if isinstance(value, list | tuple):
        raise ValueError(f"entry {index} is itself a list; allowed: {ALLOWED}")
    try:
        return _parse_one(value)
    except ValueError as error:
        raise ValueError(f"entry {index} is {value!r}: {error}") from None


def _parse_one(value: Any) -> MemoryBudget:
    if isinstance(value, MemoryBudget):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"a {type(value).__name__} is no budget; allowed: {ALLOWED}")
    if isinstance(value, int):
        return _bytes(value)
    if isinstance(value, float):
        return _share(value)
    return _parse_text(value.strip())


def _bytes(count: int) -> MemoryBudget:
    if count < SMALLEST_BYTES:
        hint = "; for the whole device write 1.0" if count == 1 else ""
        raise ValueError(f"{count} bytes are less than 1 MiB, too little for any model{hint}; allowed: {ALLOWED}")
    return MemoryBudget(BudgetKind.BYTES, count)


def _share(share: float) -> MemoryBudget:
    if not 0.0 < share <= 1.0:  # NaN fails this too
        hint = f'; for a multiple of the peak write "{share}x"' if 1.0 < share <= LARGEST_MULTIPLE else ""
        raise ValueError(f"a share of the device lies above 0 and at most at 1.0{hint}; allowed: {ALLOWED}")
    return MemoryBudget(BudgetKind.DEVICE_SHARE, share)


def _parse_text(text: str) -> MemoryBudget:
    if text.lower() in AUTO_WORDS:
        return MemoryBudget(BudgetKind.AUTO, AUTO_SHARE)
    if match := _MULTIPLE.fullmatch(text):
        multiple = float(match[1])
        if multiple < 1.0:
            raise ValueError('the multiple is below "1.0x", the peak of recomputing everything; nothing fits below it')
        if multiple > LARGEST_MULTIPLE:
            raise ValueError(f'a multiple above "{LARGEST_MULTIPLE:g}x" limits nothing; allowed: {ALLOWED}')
        return MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, multiple)
    if match := _BYTES.fullmatch(text):
        unit = match[2].lower()
        if unit not in UNIT_BYTES:
            known = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
            raise ValueError(f'unit "{match[2]}" is not known; units: {known}; allowed: {ALLOWED}')
        return _bytes(int(Decimal(match[1]) * UNIT_BYTES[unit]))
    if match := _BARE_NUMBER.fullmatch(text):
        raise ValueError(f'"{text}" has no unit; allowed: {ALLOWED}')
    raise ValueError(f'"{text}" cannot be read; allowed: {ALLOWED}')
