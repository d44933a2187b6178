"""What the curves must show, held against a CSV of benchmarks.curves: pass, fail, or not measured.

    python -m benchmarks.claims docs/results/full.csv

Shares of recomputation are judged by the counted ones, which noise does not touch; the clock must not contradict, that
is, the better end of its interval must reach the mark too. Where nothing is counted (dead rows), the clock alone
decides: its median, and "not above" means that intervals meet. Ends with 1 if a claim fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.curve_rows import Row, kept_budget, of_family, read_rows
from benchmarks.methods import is_hilore
from benchmarks.records import Record

#: Counted shares that differ by less are the same: replays are timed.
SAME_SHARE = 0.01
SHARE_OF_LOGITS = 0.90
TIMES_BEST_K = 1.3
DEAD_ROWS_RATIO = 0.75


@dataclass(frozen=True)
class Claim:
    """`holds`: None where the file has not what it takes to tell. `seen`: the figures."""

    text: str
    holds: bool | None
    seen: str = "not measured"


def judged(rows: Iterable[Row]) -> list[Claim]:
    rows = list(rows)
    plain, prune = of_family(rows, "plain"), of_family(rows, "prune")
    found = [_nearly_all(plain), _times_best_k(plain), *_dead_rows(prune)]
    return found + [_lowest(family, of_family(rows, family)) for family in dict.fromkeys(row.family for row in rows)]


def _record(records: Iterable[Record], method: str, budget: str | None = None) -> Record | None:
    return next((each for each in records if (each.method, each.budget) == (method, budget)), None)


def _nearly_all(records: Sequence[Record]) -> Claim:
    text = (
        f"at 1.10x of checkpointing's peak with whole logits, plans with chunked loss save {SHARE_OF_LOGITS:.2f} of "
        "the recomputation, exactly and within the budget"
    )
    ours, none = _record(records, "hilore_exact", "1.10x+logits"), _record(records, "none")
    if ours is None or none is None or ours.counted_share is None:
        return Claim(text, None)
    likely, best = ours.recovered_share, _best_share(ours, none)
    exact, kept = ours.gradient_error == 0, kept_budget(ours, records)
    return Claim(
        text,
        min(ours.counted_share, best) >= SHARE_OF_LOGITS and exact and kept,
        f"counted {ours.counted_share:.3f}, clock {likely:.2f} (at best {best:.2f}), gradient error "
        f"{ours.gradient_error:.0e}, peak {ours.peak_bytes / 1e6:.0f} of {(ours.budget_bytes or 0) / 1e6:.0f} MB",
    )


def _times_best_k(records: Sequence[Record]) -> Claim:
    text = f"that is at least {TIMES_BEST_K} times what the best number of whole layers stored saves there"
    ours, best_k, none = (
        _record(records, "hilore_exact", "1.10x+logits"),
        _record(records, "best_k_layers", "1.10x+logits"),
        _record(records, "none"),
    )
    if ours is None or best_k is None or none is None or ours.counted_share is None or best_k.counted_share is None:
        return Claim(text, None)
    seen = (
        f"counted {ours.counted_share:.3f} against {best_k.counted_share:.3f}; "
        f"clock {ours.recovered_share:.2f} against {best_k.recovered_share:.2f}"
    )
    if TIMES_BEST_K * best_k.counted_share > 1:  # more than all cannot be saved
        return Claim(text, None, f"{seen}: nearly everything fits there, whichever way")
    return Claim(text, ours.counted_share >= TIMES_BEST_K * best_k.counted_share and not _slower(ours, best_k), seen)


def _dead_rows(records: Sequence[Record]) -> list[Claim]:
    """At the largest budget that both claims are made for: 1.10x, of whole logits where that was measured."""
    texts = (
        "with half of the rows dead, plans are faster than no checkpointing",
        f"and take at most {DEAD_ROWS_RATIO} of checkpointing's time",
    )
    ours = _record(records, "hilore_exact+prune", "1.10x+logits") or _record(records, "hilore_exact+prune", "1.10x")
    if ours is None:
        return [Claim(text, None) for text in texts]
    to_none = ours.time_ratio_to_none, ours.time_ratio_to_none_low, ours.time_ratio_to_none_high
    to_torch = ours.time_ratio_to_checkpointing, ours.time_ratio_low, ours.time_ratio_high
    return [
        Claim(text, ratio[0] < mark, f"at {ours.budget}: {ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]")
        for text, ratio, mark in zip(texts, (to_none, to_torch), (1.0, DEAD_ROWS_RATIO), strict=True)
    ]


def _lowest(family: str, records: Sequence[Record]) -> Claim:
    """Nothing that keeps a budget is below our best at that budget."""
    above: list[str] = []
    compared = 0
    for budget in dict.fromkeys(record.budget for record in records if record.budget is not None):
        at_budget = [record for record in records if record.budget == budget and kept_budget(record, records)]
        ours = [record for record in at_budget if is_hilore(record.method)]
        limit = next(record.budget_bytes or 0 for record in records if record.budget == budget)
        unlimited = [record for record in records if record.budget is None and record.peak_bytes <= limit]
        others = [record for record in (*at_budget, *unlimited) if not is_hilore(record.method)]
        if not others:  # nobody fits
            continue
        compared += 1
        beaten = [other.method for other in others if all(_is_above(one, other) for one in ours)]
        above += [f"{budget}: {', '.join(beaten)}"] if beaten else []
    seen = f"{compared - len(above)} of {compared} budgets" + "".join(f"; below us at {each}" for each in above)
    return Claim(f"{family}: no other method that fits is below our curve", not above if compared else None, seen)


def _is_above(ours: Record, other: Record) -> bool:
    if ours.counted_share is not None and other.counted_share is not None:
        return ours.counted_share < other.counted_share - SAME_SHARE or _slower(ours, other)
    return _slower(ours, other)


def _slower(ours: Record, other: Record) -> bool:
    """Whether intervals tell that we are."""
    return ours.time_ratio_low > other.time_ratio_high


def _best_share(ours: Record, none: Record) -> float:
    """Of recomputation, saved at the better end of the clock's interval."""
    return (1 - ours.time_ratio_low) / max(1e-9, 1 - none.time_ratio_to_checkpointing)


def table(claims: Iterable[Claim]) -> Table:
    words = {True: "pass", False: "FAIL", None: ""}
    shown = Table("claim", "", "seen")
    for claim in claims:
        shown.add_row(claim.text, words[claim.holds], claim.seen)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    found = judged(read_rows(parser.parse_args().csv))
    Console(width=160).print(table(found))
    sys.exit(int(any(claim.holds is False for claim in found)))


if __name__ == "__main__":
    main()
