"""What the update-step benchmark reports: one record per method and budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table

from ds_hilore.memory.meter import WANDER_BYTES


@dataclass(frozen=True)
class Case:
    """One thing to measure. `budget` as written, None for methods that know none; the rest is what tuning found.

    `kept`: decoder layers, by index, that keep their state, or of it what `policy` says (benchmarks.selective).
    """

    method: str
    budget: str | None = None
    budget_bytes: int | None = None
    kept: tuple[int, ...] = ()
    policy: str = ""

    @property
    def key(self) -> str:
        return self.method if self.budget is None else f"{self.method} @ {self.budget}"


@dataclass(frozen=True)
class Peak:
    """Physical memory of one update. `floor_bytes`: resident before its forward. `plan`: one letter per layer."""

    peak_bytes: int
    floor_bytes: int
    predicted_peak_bytes: int | None
    plan: str


@dataclass(frozen=True)
class Record:
    """One method under one budget.

    `phi` is (budget - peak of checkpointing) / (peak without checkpointing - peak of checkpointing). Shares are of the
    time that checkpointing costs: `recovered_share` by the clock, `counted_share` from measured seconds of the units'
    replays times what the plan replays. `gradient_error` is ||g - g_none|| / ||g_none||; 0 means the same bits.
    `actions`: layers by letter: H stored, R replayed, S replayed but for what the selective `policy` keeps.
    """

    method: str
    budget: str | None
    budget_bytes: int | None
    phi: float | None
    time_ratio_to_checkpointing: float
    time_ratio_low: float
    time_ratio_high: float
    time_ratio_to_none: float
    time_ratio_to_none_low: float
    time_ratio_to_none_high: float
    recovered_share: float
    counted_share: float | None
    peak_bytes: int
    floor_bytes: int
    predicted_peak_bytes: int | None
    gradient_error: float
    actions: Mapping[str, int]
    pairs: int
    policy: str = ""


def table(records: Iterable[Record], title: str) -> Table:
    """The records for people: memory in MB, shares in parts of 1."""
    records = list(records)
    shown = Table(title=title)
    floor = next((r.floor_bytes for r in records if r.method == "torch"), 0)
    for column in ("method", "budget", "phi", "time / checkpointing [95 %]", "recovered", "counted", "peak MB"):
        shown.add_column(column, no_wrap=column == "method")
    shown.add_column("predicted", justify="right")
    shown.add_column("layers")
    shown.add_column("gradient")
    for r in records:
        shown.add_row(
            r.method,
            "" if r.budget is None else f"{r.budget} = {(r.budget_bytes or 0) / 1e6:.0f} MB",
            "" if r.phi is None else f"{r.phi:.2f}",
            f"{r.time_ratio_to_checkpointing:.3f} [{r.time_ratio_low:.3f}, {r.time_ratio_high:.3f}]",
            f"{r.recovered_share:.2f}",
            "" if r.counted_share is None else f"{r.counted_share:.2f}",
            f"{r.peak_bytes / 1e6:.0f}" + (" OVER" if is_over(r, floor) else ""),
            prediction(r),
            " ".join(f"{count}{letter}" for letter, count in sorted(r.actions.items()))
            + (f" ({r.policy})" if r.policy else ""),
            "bitwise" if r.gradient_error == 0 else f"{r.gradient_error:.1e}",
        )
    return shown


def is_over(record: Record, floor_bytes: int) -> bool:
    """Whether an update took more than its budget, for reasons of its own.

    By how much the level before the forward has risen since the budget was taken is no method's doing, nor is by how
    much equal updates differ.

    Args:
        floor_bytes: what was resident before the update that budgets refer to (torch's checkpointing).
    """
    risen = max(0, record.floor_bytes - floor_bytes)
    return record.budget_bytes is not None and record.peak_bytes - risen - WANDER_BYTES > record.budget_bytes


def prediction(record: Record) -> str:
    """Predicted peak in MB and its error as a share of what the update adds to the floor."""
    if record.predicted_peak_bytes is None:
        return ""
    error = (record.predicted_peak_bytes - record.peak_bytes) / max(1, record.peak_bytes - record.floor_bytes)
    return f"{record.predicted_peak_bytes / 1e6:.0f} ({error:+.1%})"
