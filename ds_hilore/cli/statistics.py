"""Measurements in turns, medians of paired ratios, and how far those can be trusted: for `hilore bench` and the
benchmarks of this project."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import track

RESAMPLES = 2000

Case = TypeVar("Case", bound=Hashable)
Measure = TypeVar("Measure")


def in_turns(
    cases: Sequence[Case], turns: int, measure: Callable[[Case], Measure], console: Console
) -> dict[Case, list[Measure]]:
    """Measures all cases in each turn, each turn another one first, so that what else the machine does meets all of
    them."""
    found: dict[Case, list[Measure]] = {case: [] for case in cases}
    for turn in track(range(turns), "updates", console=console):
        first = turn % len(cases)
        for case in (*cases[first:], *cases[:first]):
            found[case].append(measure(case))
    return found


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios with its bootstrap interval (95 %, percentile method)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float], base: Sequence[float], seed: int = 0) -> Ratio:
        """Ratios are taken within a pair: what else the machine does meets both."""
        ratios = [time / reference for time, reference in zip(times, base, strict=True)]
        rng = random.Random(seed)
        medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
        return cls(median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"
