"""What a picture of a report is, and what most are made from: curves over updates, stages shaded behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_hilore.report.digest import Digest, highest, lowest, mean, runs_of
from ds_hilore.report.reading import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Drawer = Callable[[Figure], None]

#: Behind updates of a stage; others have none.
_SHADES = {"measure_r": "#fbe9d7", "measure_h": "#fbe9d7", "trial": "#f3effa"}


@dataclass(frozen=True)
class Picture:
    """One picture of a report.

    Args:
        name: of its file.
        look_for: what to look for, in one line.
        draw: fills a sheet; None: there is nothing to show, `instead` says why.
    """

    name: str
    title: str
    look_for: str
    draw: Drawer | None
    instead: str = ""


def shade_stages(axes: Axes, digest: Digest) -> None:
    """What the run was doing: by the lowest rank."""
    rank = digest.run.first
    for begin, end, stage in runs_of(rank.stages):
        ink = _SHADES.get(stage)
        if ink is not None:
            axes.axvspan(rank.updates[begin] - 0.5, rank.updates[end - 1] + 0.5, color=ink, lw=0)
    first, end = digest.span
    axes.set_xlim(first - 0.5, end - 0.5)


def curve(axes: Axes, x: Floats, y: Floats, ink: str, name: str, **style: Any) -> None:
    """A curve, or points where there are so few that a line would not be seen; nothing where there are none."""
    there = np.isfinite(y)
    if there.any():
        axes.plot(x[there], y[there], color=ink, label=name, marker="o" if there.sum() < 3 else None, **style)


def band(axes: Axes, x: Floats, rows: Floats, ink: str, name: str) -> None:
    """The mean of all ranks, and from the lowest to the highest of them."""
    curve(axes, x, mean(rows), ink, name)
    if rows.shape[0] > 1:
        axes.fill_between(x, lowest(rows), highest(rows), color=ink, alpha=0.15, lw=0)


def byte_unit(*counts: Any) -> tuple[float, str]:
    """The unit that bytes of this size are drawn in."""
    most = max((float(np.nanmax(each)) for each in counts if np.isfinite(each).any()), default=0.0)
    return (1e9, "GB") if most >= 2e9 else (1e6, "MB")
