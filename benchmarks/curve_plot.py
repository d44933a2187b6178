"""Time of an update against the memory that it may use, as a picture with a panel for each family of curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.curve_rows import Row, kept_budget, of_family
from benchmarks.methods import METHODS, base_of, is_hilore
from benchmarks.records import Record


def lines(records: Sequence[Record]) -> dict[str, list[tuple[float, Record]]]:
    """By method, its points from left to right: MB of the budget (of the peak, where there is none), and the record.

    Records that did not keep their budget have no place under it and are left out.
    """
    found: dict[str, list[tuple[float, Record]]] = {}
    for record in records:
        if kept_budget(record, records):
            limited = record.budget_bytes is not None and record.budget != "unlimited"
            found.setdefault(record.method, []).append(
                ((record.budget_bytes if limited else record.peak_bytes) / 1e6, record)  # type: ignore[operator]
            )
    return {method: sorted(points, key=lambda point: point[0]) for method, points in found.items()}


def draw(rows: Iterable[Row], titles: Mapping[str, str], heading: str, path: Path) -> None:
    """Writes the picture.

    Args:
        titles: of the panels, by family, in their order; families without rows have no panel.
        heading: above all of them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(rows)
    shown = {family: of_family(rows, family) for family in titles if of_family(rows, family)}
    figure = Figure(figsize=(5.6 * len(shown), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for panel, (family, records) in zip(panels, shown.items(), strict=True):
        for method, points in lines(records).items():
            _line(panel, method, points)
        panel.set(title=titles[family], xlabel="memory budget of the process, MB")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    panels[0].set(ylabel="time of an update, checkpointing = 1")
    figure.suptitle(heading)
    figure.savefig(path, dpi=120)


def _line(panel: Any, method: str, points: Sequence[tuple[float, Record]]) -> None:
    times = [record.time_ratio_to_checkpointing for _, record in points]
    below = [max(0.0, time - record.time_ratio_low) for time, (_, record) in zip(times, points)]
    above = [max(0.0, record.time_ratio_high - time) for time, (_, record) in zip(times, points)]
    panel.errorbar(
        [megabytes for megabytes, _ in points],
        times,
        yerr=(below, above),
        color=f"C{METHODS.index(base_of(method)) % 10}",
        linestyle=":" if "+cut" in method else "-",
        linewidth=2.2 if is_hilore(method) else 1.2,
        marker="s" if points[0][1].budget is None else "o",
        markersize=4,
        elinewidth=0.7,
        label=method,
    )
