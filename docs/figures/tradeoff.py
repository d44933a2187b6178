"""The README's measurements of budgets as one picture: memory to the right, time upwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from docs.figures.draw import GRID, INK, PALE, REPLAYED, STORED, Svg

_HEAD = "| budget | time / checkpointing | best k |"
_ENDS = re.compile(r"peak of checkpointing \(([\d,]+) MB.*?without\s+it \(([\d,]+) MB", re.DOTALL)
_BUDGET = re.compile(r"([\w.=]+x?) = ([\d,]+) MB")


@dataclass(frozen=True)
class Point:
    """A way to run the update: peak in MB, time relative to checkpointing."""

    name: str
    peak_mb: float
    time: float


@dataclass(frozen=True)
class Measured:
    """Checkpointing, no checkpointing, and under each budget our plan and as many whole layers stored as fit."""

    checkpointing: Point
    none: Point
    planned: tuple[Point, ...]
    best_k: tuple[Point, ...]


def read(text: str) -> Measured:
    """The table of budgets in a section of measurements.

    Raises:
        ValueError: the section has no such table, or not the sentence with the two peaks before it.
    """
    ends, start = _ENDS.search(text), text.find(_HEAD)
    if ends is None or start < 0:
        raise ValueError(
            f"the section of measurements has no table {_HEAD!r} after a sentence with the 'peak of checkpointing (... "
            "MB' and 'that without it (... MB': docs/figures/tradeoff.svg is drawn from them"
        )
    rows = [line.strip("| ").split(" | ") for line in text[start:].splitlines()[2:] if line.startswith("|")]
    checkpointing = Point("checkpointing", _number(ends[1]), 1.0)
    limited = [(found, row) for row in rows if (found := _BUDGET.fullmatch(row[0]))]
    unlimited = next(row for row in rows if row[0] == "unlimited")
    none = Point("no checkpointing", _number(ends[2]), _number(unlimited[1].rpartition(" ")[2]))
    ours = [Point(found[1], _number(found[2]), _number(row[1])) for found, row in limited]
    best = [Point(found[1], _number(found[2]), _number(row[2])) for found, row in limited]
    return Measured(checkpointing, none, _sorted(ours), _sorted(best))


def _sorted(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(sorted(points, key=lambda point: point.peak_mb))


def _number(text: str) -> float:
    """The first number of a cell."""
    found = re.search(r"[\d,]+\.?\d*", text)
    if found is None:
        raise ValueError(f"{text!r} in the table of budgets begins with no number")
    return float(found[0].replace(",", ""))


def tradeoff(text: str) -> str:
    """The picture, as SVG. Args and errors: those of `read`."""
    found = read(text)
    svg = Svg(
        800,
        400,
        "Time of an update against the memory that it may use",
        "Checkpointing takes least memory and most time. Plans get faster with every bit of memory, and reach the time "
        "of no checkpointing with less memory than that takes.",
    )
    points = (found.checkpointing, *found.planned, *found.best_k, found.none)
    least, most = min(p.peak_mb for p in points) - 150, max(p.peak_mb for p in points) + 150
    low, high = 0.65, max(p.time for p in points) + 0.03

    def at(point: Point) -> tuple[float, float]:
        return 70 + 700 * (point.peak_mb - least) / (most - least), 340 - 300 * (point.time - low) / (high - low)

    for level in (0.7, 0.8, 0.9, 1.0):
        y = at(Point("", least, level))[1]
        svg.line(70, y, 770, y, GRID)
        svg.text(62, y + 4, f"{level:.1f}", 12, PALE, ' text-anchor="end"')
    for peak in range(1500, int(most), 500):
        svg.text(at(Point("", peak, low))[0], 360, f"{peak:,}", 12, PALE, ' text-anchor="middle"')
    svg.text(420, 384, "memory budget of the process, MB", 13, PALE, ' text-anchor="middle"')
    svg.text(70, 24, "time of an update, checkpointing = 1", 13, PALE)
    for line, ink, name in ((found.best_k, REPLAYED, "whole layers stored, best k"), (found.planned, STORED, "plan")):
        _curve(svg, [at(point) for point in line], ink, name)
    for point, side, below in ((found.checkpointing, "start", 24), (found.none, "end", -12)):
        x, y = at(point)
        svg.rect(x - 6, y - 6, 12, 12, INK)
        svg.text(
            x - 6 if side == "start" else x + 8,
            y + below,
            point.name,
            13,
            INK,
            f' font-weight="bold" text-anchor="{side}"',
        )
    return svg.done()


def _curve(svg: Svg, points: list[tuple[float, float]], ink: str, name: str) -> None:
    for (x1, y1), (x2, y2) in pairwise(points):
        svg.line(x1, y1, x2, y2, ink, ' stroke-width="2"')
    for x, y in points:
        svg.rect(x - 4, y - 4, 8, 8, ink, ' rx="4"')
    x, y = points[len(points) // 2]
    above = name != "plan"
    svg.text(x + 8, y - 10 if above else y + 22, name, 13, ink, f' text-anchor="{"start" if above else "end"}"')
