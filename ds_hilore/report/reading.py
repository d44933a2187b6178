"""Reads the logs of a run: of all ranks that have one, as far as they go.

A log is an input like any other. It is read line by line with a limit on the length of each; a line that is no record
(cut short by the end of a run, or damaged) is counted and passed over. Updates become rows of numbers as they are read,
so that 64 ranks of 10,000 updates take about 100 MB and not gigabytes.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ds_hilore.core.errors import UsageError
from ds_hilore.report.records import (
    MOST_LINE_BYTES,
    AuditRecord,
    ProspectRecord,
    Record,
    RunRecord,
    ShortageRecord,
    TrialRecord,
    UnitsRecord,
    UpdateRecord,
    parse,
    rank_of,
)
from ds_hilore.report.totals import Totals

Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Numbers of an update that become a column; one that an update does not have is NaN.
COLUMNS = (
    "seconds",
    "saved_seconds",
    "predicted_peak_bytes",
    "budget_bytes",
    "peak_bytes",
    "level_bytes",
    "exposure",
    "foreseen_exposure",
    "risk",
    "allowed_risk",
    "check_seconds",
)
#: Of these, 0 means that there is none.
_NONE_AT_ZERO = frozenset({"predicted_peak_bytes", "budget_bytes", "level_bytes"})
#: Shortages that are kept of a rank; all are counted.
MOST_SHORTAGES = 2_000

Actions = tuple[tuple[str, int], ...]
"""Letters in order of units, and how many microbatches of an update ran so."""


@dataclass
class RankLog:
    """What one rank has written of one run.

    Attributes:
        units: names, in order of the letters.
        updates: their numbers, ascending.
        actions, stages: of each update.
    """

    run: RunRecord
    units: list[str] = field(default_factory=list)
    updates: array[int] = field(default_factory=lambda: array("q"))
    actions: list[Actions] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    prospect: ProspectRecord | None = None
    trials: list[TrialRecord] = field(default_factory=list)
    shortages: list[ShortageRecord] = field(default_factory=list)
    audits: dict[int, AuditRecord] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    _columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    _known: dict[Any, Any] = field(default_factory=dict)  # equal actions and stages are one object

    @property
    def rank(self) -> int:
        return self.run.rank

    def column(self, name: str) -> Floats:
        """[updates] numbers, NaN where there is none."""
        return np.frombuffer(self._columns[name], dtype=np.float64) if self.updates else np.empty(0)

    def numbers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[updates] which they are."""
        return np.array(self.updates, dtype=np.int64)

    def add(self, record: Record) -> bool:
        """Takes a line; False: it does not fit those before."""
        if isinstance(record, UpdateRecord):
            return self._add_update(record)
        if isinstance(record, UnitsRecord):
            self.units[record.first :] = [*[""] * (record.first - len(self.units)), *record.names]
        elif isinstance(record, ProspectRecord):
            self.prospect = record
        elif isinstance(record, TrialRecord):
            self.trials.append(record)
        elif isinstance(record, ShortageRecord):
            if len(self.shortages) < MOST_SHORTAGES:
                self.shortages.append(record)
        elif isinstance(record, AuditRecord) and record.update not in self.audits:
            self.audits[record.update] = record
            self.totals.add_audit(record)
        return True

    def _add_update(self, record: UpdateRecord) -> bool:
        if self.updates and record.update <= self.updates[-1]:
            return False
        self.updates.append(record.update)
        actions: Actions = tuple(record.actions.items())
        self.actions.append(self._known.setdefault(actions, actions))
        self.stages.append(self._known.setdefault(record.stage, record.stage))
        for name, column in self._columns.items():
            value = record.kept_seconds if name == "saved_seconds" else getattr(record, name)
            missing = value is None or (value == 0 and name in _NONE_AT_ZERO)
            column.append(np.nan if missing else value)
        self.totals.add(record)
        return True


@dataclass(frozen=True)
class Run:
    """The newest run of a folder.

    Attributes:
        ranks: in order of ranks; those that have written at least one update.
        missing: ranks of the job that have none.
        damaged: lines of its logs that could not be read.
        earlier: runs of the folder that are not this one.
        unreadable: logs that could not be opened or read on, and why.
    """

    folder: Path
    ranks: tuple[RankLog, ...]
    missing: tuple[int, ...] = ()
    damaged: int = 0
    earlier: int = 0
    unreadable: tuple[str, ...] = ()

    @property
    def first(self) -> RankLog:
        """The lowest rank: what is the same on all is read from it."""
        return self.ranks[0]

    @property
    def block(self) -> dict[str, Any]:
        """The "hilore" block of its JSON."""
        return self.first.run.settings

    @property
    def audits(self) -> list[AuditRecord]:
        """In order of updates. All ranks write the same ones: each counts once."""
        found: dict[int, AuditRecord] = {}
        for rank in self.ranks:
            found = rank.audits | found
        return [found[update] for update in sorted(found)]


def read_run(folder: Path, progress: Callable[[int, int], object] = lambda done, all_of_it: None) -> Run:
    """Reads a folder that `hilore.report.path` named.

    Args:
        progress: told of bytes that are read, and of all there are.

    Raises:
        UsageError: there is no such folder, it cannot be read, or it holds no update of any run.
    """
    logs = _logs(folder)
    sizes = {path: _size(path) for path in logs}
    whole, before = sum(sizes.values()), 0
    found: list[tuple[RankLog, int]] = []
    runs: dict[str, float] = {}
    unreadable: list[str] = []
    for path in logs:
        read = _Reader(path, rank_of(path))
        for position in read.lines():
            progress(before + position, whole)
        before += sizes[path]
        unreadable += [] if read.failure is None else [read.failure]
        runs |= read.runs
        found += [(log, read.damaged[log.run.run]) for log in read.logs if log.updates]
    if not found:
        nothing = f"{folder}: its logs hold no update that can be read; a run writes one when its first update is over"
        raise UsageError("; ".join([nothing, *unreadable[:3], "or was it written by another version of ds_hilore?"]))
    newest = max((log.run for log, _ in found), key=lambda run: (run.started_s, run.run)).run
    chosen = sorted(((log, bad) for log, bad in found if log.run.run == newest), key=lambda each: each[0].rank)
    ranks = tuple(log for log, _ in chosen)
    present = {log.rank for log in ranks}
    missing = tuple(rank for rank in range(ranks[0].run.world) if rank not in present)
    bad_lines = sum(bad for _, bad in chosen)
    return Run(folder, ranks, missing, bad_lines, len(runs.keys() - {newest}), tuple(unreadable))


def _logs(folder: Path) -> list[Path]:
    remedy = 'set "report": {"path": FOLDER} in the hilore block of the DeepSpeed JSON, run, and name that folder here'
    try:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: {remedy}")
        found = sorted(path for path in folder.iterdir() if rank_of(path) is not None)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}): {remedy}") from None
    if not found:
        raise UsageError(f"{folder} holds no log of a run (rank-00000.jsonl and so on): {remedy}")
    return found


def _size(path: Path) -> int:
    """0 where that cannot be known: then opening it fails as well."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Reader:
    """One file, which several runs may have written to, one after the other."""

    def __init__(self, path: Path, rank: int | None) -> None:
        self.failure: str | None = None
        self.logs: list[RankLog] = []
        self.runs: dict[str, float] = {}
        self.damaged: dict[str, int] = {}
        self._path = path
        self._rank = rank

    def lines(self) -> Iterator[int]:
        """Reads on; gives the position from time to time."""
        try:
            with _opened(self._path) as file:
                for count, line in enumerate(_lines(file)):
                    self._take(line)
                    if count % 512 == 0:
                        yield file.tell()
        except OSError as error:
            self.failure = f"{self._path} cannot be read: {error.strerror or error}"

    def _take(self, line: bytes | None) -> None:
        if line is not None and not line.strip():
            return
        try:
            record = None if line is None else parse(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, RunRecord) and record.rank == self._rank and record.rank < record.world:
            self.logs.append(RankLog(record))
            self.runs[record.run] = record.started_s
            self.damaged[record.run] = 0
        elif self.logs and (record is None or isinstance(record, RunRecord) or not self.logs[-1].add(record)):
            self.damaged[self.logs[-1].run.run] += 1


def _opened(path: Path) -> IO[bytes]:
    """Opens a plain file; nothing else may hold the reader up.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is no plain file")
    return os.fdopen(descriptor, "rb")


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines; None in the place of one that is too long."""
    while line := file.readline(MOST_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MOST_LINE_BYTES:
            yield line
            continue
        while (rest := file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield None
