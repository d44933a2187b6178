"""What a soak has shown: a table by parts of the run, and what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from tests.soak.job import Seen

#: Updates at the beginning that may be over their budget.
SETTLING = 5
#: The level of the process from here to the end may grow by this part (issue 12).
FROM, GROWTH = 50, 0.01
#: Of a budget: by how much one and the same work's peak wanders (pages of the heap that are used again).
NOISE = 0.005
#: Measured over predicted peak: the median of the last part of a run may differ from the first one's by so much.
DRIFT = 0.02
#: Updates whose median counts as a level: single ones wander.
LEVEL_OF = 10

HEAD = ("updates", "rank", "level MB", "peak MB", "budget MB", "over", "worst", "predicted", "stored", "dead")


def over_budget(seen: Seen) -> int:
    """Bytes of a peak above its budget and what is noise; 0: it is kept."""
    return max(0, seen.peak - int(seen.budget * (1 + NOISE)))


def rows(parts: Sequence[Sequence[Seen]]) -> Iterator[tuple[str, ...]]:
    """One row for each rank (by position) of a part of the run."""
    for rank, part in enumerate(parts):
        planned = [each for each in part if each.predicted]
        yield (
            f"{part[0].update}-{part[-1].update}",
            str(rank),
            f"{median(each.level for each in part) / 1e6:.0f}",
            f"{max(each.peak for each in part) / 1e6:.0f}",
            f"{min(each.budget for each in part) / 1e6:.0f}-{max(each.budget for each in part) / 1e6:.0f}",
            str(sum(each.peak > each.budget for each in part)),
            f"{max(max(0, each.peak - each.budget) / each.budget for each in part):.2%}",
            f"{median(each.peak / each.predicted for each in planned):.3f}" if planned else "-",
            f"{sum(each.stored for each in part) / sum(each.units for each in part):.2f}",
            f"{sum(each.dead for each in part) / len(part):.2f}",
        )


def complaints(rank: int, run: Sequence[Seen]) -> list[str]:
    """Of a whole run of one rank; empty where all is as it should be."""
    return [f"rank {rank}: {said}" for said in (*_budgets(run), *_levels(run), *_predictions(run))]


def _budgets(run: Sequence[Seen]) -> Iterator[str]:
    for seen in run[SETTLING:]:
        if over_budget(seen):
            yield f"update {seen.update}: peak {seen.peak:,} over its budget of {seen.budget:,}"
        if seen.stored and seen.predicted > seen.budget:
            yield f"update {seen.update}: a plan of {seen.predicted:,} for a budget of {seen.budget:,}"


def _levels(run: Sequence[Seen]) -> Iterator[str]:
    if len(run) < FROM + 2 * LEVEL_OF:
        return
    before = median(each.level for each in run[FROM : FROM + LEVEL_OF])
    after = median(each.level for each in run[-LEVEL_OF:])
    if after > before * (1 + GROWTH):
        yield f"resident memory grew from {before:,.0f} to {after:,.0f}"


def _predictions(run: Sequence[Seen]) -> Iterator[str]:
    part = len(run) // 3
    ratios = [
        median(each.peak / each.predicted for each in some if each.predicted)
        for some in (run[:part], run[-part:])
        if any(each.predicted for each in some)
    ]
    if len(ratios) == 2 and part >= FROM and abs(ratios[1] - ratios[0]) > DRIFT:
        yield f"measured over predicted peaks drifted from {ratios[0]:.3f} to {ratios[1]:.3f}"
