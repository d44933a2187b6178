"""The pictures of a report: what each shows, and in one line what to look for.

A picture that has nothing to show says why instead. Everything is drawn for any number of ranks: curves are of the rank
with the most or the least, whichever counts, and maps have a row for each unit or rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_hilore.report.digest import Digest, highest, lowest, mean
from ds_hilore.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    label,
    legend_above,
    show_updates,
    whole_updates,
)
from ds_hilore.report.maps import action_maps
from ds_hilore.report.picture import Picture, band, byte_unit, curve, shade_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def pictures(digest: Digest) -> Iterator[Picture]:
    """All of them, in the order of the page."""
    yield _memory(digest)
    yield from action_maps(digest)
    yield _savings(digest)
    yield _promises(digest)
    yield _exposure(digest)
    yield _audits(digest)
    yield _shortages(digest)


# ------------------------------------------------------------------------------------------------ memory


def _memory(digest: Digest) -> Picture:
    row = _fullest(digest)
    budget, level = digest.mean("budget_bytes")[row], digest.mean("level_bytes")[row]
    peak, promised = digest.highest("peak_bytes")[row], digest.highest("predicted_peak_bytes")[row]
    scale, unit = byte_unit(budget, level)

    def draw(figure: Figure) -> None:
        axes, x = figure.subplots(), digest.centres
        shade_stages(axes, digest)
        curve(axes, x, budget / scale, RED, "budget", linestyle="--")
        curve(axes, x, peak / scale, BLUE, "highest so far")
        curve(axes, x, promised / scale, PURPLE, "promised peak")
        curve(axes, x, level / scale, PALE, "held after the step")
        axes.set_ylabel(unit)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        whole_updates(axes)
        legend_above(axes)

    said = "The blue line, the highest peak so far, should stay below the dashed budget; the gap between is unused."
    if not np.isfinite(peak).any():
        said = (
            "The purple line, what plans promise to peak at, should be close below the dashed budget. Peaks were not "
            "measured: on CPU that takes a process that was started with MALLOC_MMAP_THRESHOLD_=65536, "
            "MALLOC_TRIM_THRESHOLD_=65536 and MALLOC_TOP_PAD_=0 (glibc)."
        )
    said += " Shaded: updates that measure (orange) or try plans out (violet)."
    if len(digest.ranks) > 1:
        said += f" Drawn is rank {digest.ranks[row].rank}, which came closest to its budget."
    return Picture("memory", "Memory against the budget", said, draw)


def _fullest(digest: Digest) -> int:
    """The row of the rank that came closest to its budget, by measured peaks where there are any."""
    budgets = digest.mean("budget_bytes")
    for column in ("peak_bytes", "predicted_peak_bytes"):
        shares = digest.highest(column) / budgets
        if np.isfinite(shares).any():
            return int(np.nanargmax(np.nanmax(np.where(np.isfinite(shares), shares, 0.0), axis=1)))
    return 0


# ------------------------------------------------------------------------------------------------ seconds


def _savings(digest: Digest) -> Picture:
    title = "Time saved, as plans promise it"
    saved = digest.total("saved_seconds")
    if not np.nansum(np.abs(saved)):
        return Picture("savings", title, "", None, _no_plan(digest))

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, sharex=True)
        # ranks wait for each other, so the one that saves least counts
        least, steps = lowest(saved), highest(digest.total("seconds"))
        shade_stages(above, digest)
        shade_stages(below, digest)
        curve(above, digest.centres, np.nancumsum(np.nan_to_num(least)), GREEN, "saved so far")
        above.set_ylabel("s")
        without = steps + least
        part = np.divide(100 * least, without, out=np.full_like(least, np.nan), where=without > 0)
        curve(below, digest.centres, part, BLUE, "share of the whole step")
        below.set_ylabel("% of step")
        whole_updates(below)
        legend_above(above)
        legend_above(below)

    several = " Ranks wait for each other, so the one that saves least is drawn." if len(digest.ranks) > 1 else ""
    return Picture(
        "savings",
        title,
        "The green line should rise steadily once plans are followed; what is on trial does not count. The share below "
        f"is of the whole step, sampling included.{several}",
        draw,
    )


def _no_plan(digest: Digest) -> str:
    if not any(rank.totals.followed for rank in digest.ranks):
        return "the run ended before plans were followed: the first updates only measure and try"
    return "plans promised nothing: no memory was free under the budget, or storing did not pay"


def _promises(digest: Digest) -> Picture:
    title = "Promised and measured"
    peaks = list(_peak_points(digest))
    times = [(100 * promised, 100 * measured) for promised, measured in _time_points(digest)]
    if not peaks and not times:
        why = "peaks are not measured in this process, and no trial of a plan was over; " + _no_plan(digest)
        if np.isfinite(digest.mean("predicted_peak_bytes")).any():
            why = "peaks are not measured in this process, and no trial of a plan was over"
        return Picture("promises", title, "", None, why)

    def draw(figure: Figure) -> None:
        panels = [each for each in (("peak", peaks), ("time", times)) if each[1]]
        for axes, (what, points) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels):
            scale, unit = byte_unit(np.array(points)) if what == "peak" else (1, "%")
            _against(axes, np.array(points) / scale)
            axes.set_title(f"{what}, {unit}", fontsize=10)
            axes.set_xlabel("promised")
            axes.set_ylabel("measured")

    return Picture(
        "promises",
        title,
        "Each point is a rank; on the line a promise came true, above it more was taken. Time is that of microbatches "
        "in the trial, in per cent of those that replayed everything; a peak is the run's highest, sampling in this "
        "process included.",
        draw,
    )


def _peak_points(digest: Digest) -> Iterator[tuple[float, float]]:
    for rank in digest.ranks:
        promised, measured = rank.column("predicted_peak_bytes"), rank.column("peak_bytes")
        if np.isfinite(promised).any() and np.isfinite(measured[np.isfinite(promised)]).any():
            yield float(np.nanmax(promised)), float(np.nanmax(measured[np.isfinite(promised)]))


def _time_points(digest: Digest) -> Iterator[tuple[float, float]]:
    for rank in digest.ranks:
        for trial in rank.trials:
            if trial.promised_s is not None and trial.replayed_s > 0:
                measured = trial.planned_s if trial.compressed_s is None else trial.compressed_s
                yield 1 - trial.promised_s / trial.replayed_s, measured / trial.replayed_s


def _against(axes: Axes, points: Any) -> None:
    least, most = float(points.min()), float(points.max())
    room = 0.1 * (most - least) or 0.05 * abs(most) or 1.0
    ends = least - room, most + room
    axes.plot(ends, ends, color=PALE, lw=1, ls="--")
    axes.plot(points[:, 0], points[:, 1], "o", color=BLUE, ms=5, alpha=0.7)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.locator_params(nbins=4)


# ------------------------------------------------------------------------------------------------ errors


def _exposure(digest: Digest) -> Picture:
    title = "Exposure: how much an error would matter"
    seen = digest.mean("exposure")
    if not np.isfinite(seen).any():
        return Picture("exposure", title, "", None, _exact(digest) or "no loss told its token coefficients")

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, sharex=True)
        x = digest.centres
        shade_stages(above, digest)
        shade_stages(below, digest)
        band(above, x, seen, BLUE, "as it came")
        curve(above, x, mean(digest.mean("foreseen_exposure")), ORANGE, "as plans foresaw it", linestyle="--")
        above.set_ylabel("exposure")
        above.set_ylim(bottom=0)
        curve(below, x, 100 * highest(digest.mean("allowed_risk")), RED, "error allowed", linestyle="--")
        curve(below, x, 100 * highest(digest.mean("risk")), PURPLE, "error planned")
        below.set_ylabel("% of update")
        below.set_ylim(bottom=0)
        whole_updates(below)
        legend_above(above)
        legend_above(below)

    return Picture(
        "exposure",
        title,
        "Above, both lines should run together: plans are made for the dashed one. Below, what was planned should stay "
        "under what each rank's part of an update allows; it falls to nothing where an update is too exposed.",
        draw,
    )


def _exact(digest: Digest) -> str:
    """Why nothing is known of errors; "" where compression was allowed."""
    settings = digest.run.block
    if not settings.get("max_gradient_error") or settings.get("mode") == "exact":
        return "gradients were exact (max_gradient_error is 0), so nothing depends on it"
    return ""


def _audits(digest: Digest) -> Picture:
    title = "Audits: the gradient's error, measured"
    audits = digest.run.audits
    if not audits:
        why = _exact(digest) or "no audit was due yet: they begin once plans may compress (profile.audit_interval)"
        return Picture("audits", title, "", None, why)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        limit = digest.run.block.get("max_gradient_error")
        x = [audit.update for audit in audits]
        if isinstance(limit, float | int):
            axes.axhline(100 * limit, color=RED, ls="--", label="allowed on average")
        axes.plot(x, [100 * audit.predicted for audit in audits], "o", color=ORANGE, mfc="none", label="predicted")
        axes.plot(x, [100 * audit.measured for audit in audits], "o", color=BLUE, ms=4, label="measured")
        axes.set_ylabel("% of the gradient")
        axes.set_ylim(bottom=0)
        show_updates(axes, digest.span)
        legend_above(axes)

    return Picture(
        "audits",
        title,
        "Blue points, measured errors of whole updates, should lie below the dashed line on average, and near the "
        "circles, which were predicted.",
        draw,
    )


# ------------------------------------------------------------------------------------------------ shortages


def _shortages(digest: Digest) -> Picture:
    title = "When memory ran short"
    events = [(rank.rank, event) for rank in digest.ranks for event in rank.shortages]
    if not events:
        return Picture("shortages", title, "", None, "it never did: the guard had nothing to do")
    inks = {"forward": ORANGE, "backward": BLUE, "allocation": PURPLE, "failure": RED}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for defence in sorted({event.defence for _, event in events}):
            found = [event for _, event in events if event.defence == defence]
            x, y = [event.update for event in found], [event.short_bytes / 1e6 for event in found]
            axes.plot(x, y, "o", color=inks.get(defence, INK), alpha=0.6, label=label(defence))
        axes.set_ylabel("MB short")
        axes.set_ylim(bottom=0)
        show_updates(axes, digest.span)
        legend_above(axes)

    return Picture(
        "shortages",
        title,
        "Points should become rare: after each, later plans leave more room. Gradients are not affected; a failure is "
        "an update that had to run again.",
        draw,
    )
