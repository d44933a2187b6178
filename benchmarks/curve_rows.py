"""Records of several runs as the rows of one CSV file, written and read again."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Record, is_over


@dataclass(frozen=True)
class Row:
    """A record and the family of curves that it belongs to."""

    family: str
    record: Record


FIELDS = tuple(field.name for field in dataclasses.fields(Record))
_WORDS = ("method", "budget", "policy")
_COUNT = re.compile(r"(\d+)([A-Z])")


def write_rows(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("family", *FIELDS))
        for row in rows:
            writer.writerow((row.family, *(_cell(getattr(row.record, name)) for name in FIELDS)))


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote.

    Raises:
        ValueError: the file has other columns.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or tuple(reader.fieldnames) != ("family", *FIELDS):
            raise ValueError(f"{path} has not the columns of this version: write it anew")
        return [Row(line["family"], Record(**{name: _value(name, line[name]) for name in FIELDS})) for line in reader]


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return " ".join(f"{count}{letter}" for letter, count in sorted(value.items()))
    return "" if value is None else json.dumps(value)


def _value(name: str, cell: str) -> Any:
    if name == "actions":
        return {letter: int(count) for count, letter in _COUNT.findall(cell)}
    if name in _WORDS:
        return cell if cell or name == "policy" else None
    return json.loads(cell) if cell else None


def of_family(rows: Iterable[Row], family: str) -> list[Record]:
    return [row.record for row in rows if row.family == family]


def replaced(known: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The rows known so far, with those of the families that were measured anew in place of theirs."""
    anew = {row.family for row in new}
    return [*(row for row in known if row.family not in anew), *new]


def kept_budget(record: Record, records: Iterable[Record]) -> bool:
    """Whether a record stayed within its budget, as measured among `records`."""
    floor = next((other.floor_bytes for other in records if other.method == "torch"), 0)
    return not is_over(record, floor)
