"""Reward and validation curves of paired training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.parity_run import Report

#: Updates over which shown rewards are averaged: those of a few responses jump.
WINDOW = 8


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Of each value and those before it, `window` at most."""
    spans = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(span) / len(span) for span in spans]


def draw(pairs: Mapping[int, tuple[Report, Report]], title: str, path: Path) -> None:
    """Writes a picture: exact runs as lines, the others dashed, one colour a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, scores = figure.subplots(1, 2)
    for order, (seed, pair) in enumerate(pairs.items()):
        for report, name, style in zip(pair, ("exact", "hilore"), ("-", "--"), strict=True):
            look = {"color": f"C{order}", "linestyle": style, "label": f"seed {seed}, {name}"}
            rewards.plot(range(1, len(report.rewards) + 1), running_mean(report.rewards), **look)
            scores.plot(list(report.scores), list(report.scores.values()), marker=".", **look)
    rewards.set(xlabel="update", ylabel=f"reward of sampled responses, mean of {WINDOW} updates")
    scores.set(xlabel="update", ylabel="score on fixed prompts, points")
    scores.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
