"""What planning takes of an update: time in the planner's answers, in a real engine.

    python -m benchmarks.planning_share                  # quick: 8 layers of SmolLM2, 512 tokens
    python -m benchmarks.planning_share --preset gpu

Counted is all that stands between the host and its update: profiles of the units, the plan before forward, the decision
after it, and making the first frontier of a new budget. Programmes that refine a frontier run in a process of their own
at low priority and are not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.records import Case
from benchmarks.spec import Spec
from benchmarks.subject import PRESETS

BUDGET = "1.10x"


class Stopwatch:
    """Adds up the seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        """Puts itself around a method of an object."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def shares(bench: Bench, updates: int) -> dict[str, list[float]]:
    """Share of each update that planning took: where the budget had just changed, and where it had not."""
    hilore = bench.engine.hilore
    stopwatch = Stopwatch()
    for name in ("prepare", "decide", "note_floor", "note_peaks"):
        stopwatch.watch(hilore.parts.planner, name)
    stopwatch.watch(hilore.measurements, "profiles")
    budget_bytes = int(1.1 * hilore.learning.baseline.result().peak_bytes)
    found: dict[str, list[float]] = {"new budget": [], "same budget": []}
    for turn in range(updates):
        case = Case("hilore_exact", BUDGET, budget_bytes + (turn + 1 << 20))
        for shares_of_kind in found.values():  # the first update of a budget, and one more
            stopwatch.take()
            seconds = bench.update(case)
            shares_of_kind.append(stopwatch.take() / seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--updates", type=int, default=10, help="of each kind")
    arguments = parser.parse_args()
    bench = Bench(Spec(arguments.preset))
    bench.learn()
    table = Table(title=f"planning's share of an update ({arguments.preset}, {bench.layers} layers)")
    for column in ("update", "median", "largest"):
        table.add_column(column, justify="right")
    for kind, found in shares(bench, arguments.updates).items():
        table.add_row(kind, f"{median(found):.4%}", f"{max(found):.4%}")
    Console().print(table)


if __name__ == "__main__":
    main()
