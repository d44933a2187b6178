"""A run in as many columns as a picture has room for: updates in bins, ranks one below the other.

A figure that covers 10,000 updates has room for some 200 of them beside each other. Bins hold equally many updates; up
to that number there is one update in each. Sizes here: R ranks, B bins, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ds_hilore.report.reading import Actions, Floats, RankLog, Run
from ds_hilore.report.records import COMPRESSED, FOLLOWED, REPLAYED, STORED

MOST_BINS = 200

KINDS = (STORED, COMPRESSED, REPLAYED)
_PLACE = np.full(256, -1, dtype=np.int8)
_PLACE[[ord(kind) for kind in KINDS]] = range(len(KINDS))


@dataclass(frozen=True)
class Digest:
    """What pictures are drawn from.

    Args:
        bins: columns, at most.
    """

    run: Run
    bins: int = MOST_BINS

    @property
    def ranks(self) -> tuple[RankLog, ...]:
        return self.run.ranks

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first update, and the one after the last."""
        return min(rank.updates[0] for rank in self.ranks), max(rank.updates[-1] for rank in self.ranks) + 1

    @cached_property
    def edges(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[B + 1] updates at which bins begin, and the end."""
        first, end = self.span
        count = min(self.bins, end - first)
        return first + np.arange(count + 1) * (end - first) // count

    @property
    def centres(self) -> Floats:
        """[B] the middle of each bin, for curves."""
        return (self.edges[:-1] + self.edges[1:] - 1) / 2

    def bin_of(self, updates: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The bin of each update."""
        return np.searchsorted(self.edges, updates, side="right") - 1

    # -- numbers ---------------------------------------------------------------------------------------------------

    def mean(self, column: str) -> Floats:
        """[R, B] over the updates of a bin; NaN where there is none."""
        return self._by_bin(column)[0]

    def total(self, column: str) -> Floats:
        """[R, B] sums over the updates of a bin; NaN where there is none."""
        means, counts = self._by_bin(column)
        return np.where(counts > 0, means * counts, np.nan)

    def highest(self, column: str) -> Floats:
        """[R, B] the most of a bin; NaN where there is none."""
        found = np.full((len(self.ranks), len(self.edges) - 1), -np.inf)
        for row, rank in enumerate(self.ranks):
            values = rank.column(column)
            there = np.isfinite(values)
            np.maximum.at(found[row], self.bin_of(rank.numbers())[there], values[there])
        return np.where(np.isfinite(found), found, np.nan)

    def _by_bin(self, column: str) -> tuple[Floats, Floats]:
        shape = len(self.ranks), len(self.edges) - 1
        sums, counts = np.zeros(shape), np.zeros(shape)
        for row, rank in enumerate(self.ranks):
            values = rank.column(column)
            there = np.isfinite(values)
            places = self.bin_of(rank.numbers())[there]
            np.add.at(sums[row], places, values[there])
            np.add.at(counts[row], places, 1)
        return np.divide(sums, counts, out=np.full(shape, np.nan), where=counts > 0), counts

    # -- actions ---------------------------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Names of all units, of any rank, in the order in which they first ran."""
        found: dict[str, None] = {}
        for rank in self.ranks:
            found |= dict.fromkeys(self._names(rank))
        return tuple(found)

    def _names(self, rank: RankLog) -> list[str]:
        count = max((len(letters) for each in set(rank.actions) for letters, _ in each), default=0)
        names = rank.units[:count] + [""] * (count - len(rank.units))
        return [name or f"unit {place}" for place, name in enumerate(names)]

    @cached_property
    def _shares(self) -> tuple[Floats, Floats, Floats]:
        """Counts of (unit, bin, kind), (rank, bin, kind) and (unit, rank, kind): microbatches that were treated so."""
        place = {name: number for number, name in enumerate(self.units)}
        count = len(self.edges) - 1
        by_unit = np.zeros((len(place), count, len(KINDS)))
        by_rank = np.zeros((len(self.ranks), count, len(KINDS)))
        settled = np.zeros((len(place), len(self.ranks), len(KINDS)))
        for row, rank in enumerate(self.ranks):
            rows = np.array([place[name] for name in self._names(rank)], dtype=np.int64)
            made: dict[Actions, Floats] = {}
            for bin_, stage, actions in zip(self.bin_of(rank.numbers()), rank.stages, rank.actions):
                if actions not in made:
                    made[actions] = _counted(actions, len(rows))
                counted = made[actions]
                by_unit[rows, bin_] += counted
                by_rank[row, bin_] += counted.sum(0)
                if stage == FOLLOWED:
                    settled[rows, row] += counted
        return by_unit, by_rank, settled

    @property
    def by_unit(self) -> Floats:
        """[U, B, 3] how often each unit was stored, compressed and replayed, over ranks and microbatches."""
        return self._shares[0]

    @property
    def by_rank(self) -> Floats:
        """[R, B, 3] how often units of each rank were."""
        return self._shares[1]

    @property
    def settled(self) -> Floats:
        """[U, R, 3] how often each unit was on each rank, in updates that followed plans for good."""
        return self._shares[2]


def _counted(actions: Actions, units: int) -> Floats:
    """[units, 3] of one update of one rank."""
    found = np.zeros((units, len(KINDS)))
    for letters, count in actions:
        kinds = _PLACE[np.frombuffer(letters.encode("ascii", "replace"), dtype=np.uint8)]
        ran = np.flatnonzero(kinds >= 0)
        found[ran, kinds[ran]] += count
    return found


def lowest(rows: Floats) -> Floats:
    """[B] the least of all ranks; NaN where no rank has any."""
    return _over_ranks(np.fmin, rows)


def highest(rows: Floats) -> Floats:
    """[B] the most of all ranks; NaN where no rank has any."""
    return _over_ranks(np.fmax, rows)


def _over_ranks(function: np.ufunc, rows: Floats) -> Floats:
    return np.asarray(function.reduce(rows, axis=0))


def mean(rows: Floats) -> Floats:
    """[B] over the ranks that have any; NaN where none has."""
    there = np.isfinite(rows)
    counts = there.sum(0)
    return np.divide(np.where(there, rows, 0.0).sum(0), counts, out=np.full(rows.shape[1], np.nan), where=counts > 0)


def runs_of(stages: Sequence[str]) -> list[tuple[int, int, str]]:
    """Stretches of equal stages: first place, the place after the last, the stage."""
    found: list[tuple[int, int, str]] = []
    for place, stage in enumerate(stages):
        if found and found[-1][2] == stage:
            found[-1] = found[-1][0], place + 1, stage
        else:
            found.append((place, place + 1, stage))
    return found
