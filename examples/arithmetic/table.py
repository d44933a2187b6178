"""The comparison as tables for people: one row per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rich.table import Table

from .compare import Method, RankFigures

Columns = Mapping[str, Callable[[RankFigures], str]]


def comparison_tables(ranks: Sequence[RankFigures]) -> list[Table]:
    """Times, then memory and gradients."""
    return [
        _table("Seconds of one actor update, on the same recorded rollouts", _TIMES, ranks),
        _table("Physical peak of one actor update in GiB, and its gradients", _MEMORY, ranks),
    ]


def _table(title: str, columns: Columns, ranks: Sequence[RankFigures]) -> Table:
    table = Table(title=title)
    for header in columns:
        table.add_column(header, justify="right")
    for figures in ranks:
        table.add_row(*(show(figures) for show in columns.values()))
    return table


def _seconds(method: Method) -> Callable[[RankFigures], str]:
    return lambda figures: f"{median(figures.seconds[method]):.2f}"


def _peak(method: Method) -> Callable[[RankFigures], str]:
    return lambda figures: _gib(figures.peak_bytes[method])


def _ratio(method: Method, base: Method) -> Callable[[RankFigures], str]:
    return lambda figures: f"{figures.median_ratio(method, base):.3f} x"


def _peak_ratio(figures: RankFigures) -> str:
    return f"{figures.peak_bytes[Method.HILORE] / figures.peak_bytes[Method.CHECKPOINTING]:.3f} x"


def _actions(figures: RankFigures) -> str:
    return " ".join(f"{count} {letter}" for letter, count in figures.actions.items()) or "-"


def _recovered(figures: RankFigures) -> str:
    share = figures.recovered_share()
    return "-" if share is None else f"{share:.0%}"


def _gradients(figures: RankFigures) -> str:
    return ", ".join(f"{figures.gradient_error[method]:.1e}" for method in (Method.CHECKPOINTING, Method.HILORE))


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**30:.3f}"


_TIMES: Columns = {
    "rank": lambda figures: str(figures.rank),
    "no check-\npointing": _seconds(Method.NONE),
    "check-\npointing": _seconds(Method.CHECKPOINTING),
    "HiLoRe": _seconds(Method.HILORE),
    "HiLoRe /\ncheckpointing": _ratio(Method.HILORE, Method.CHECKPOINTING),
    "recovered\nshare": _recovered,
    "update's share\nof the step": lambda figures: f"{figures.update_share:.0%}",
}

_MEMORY: Columns = {
    "rank": lambda figures: str(figures.rank),
    "no check-\npointing": _peak(Method.NONE),
    "check-\npointing": _peak(Method.CHECKPOINTING),
    "HiLoRe": _peak(Method.HILORE),
    "budget": lambda figures: _gib(figures.budget_bytes),
    "HiLoRe /\ncheckp.": _peak_ratio,
    "layers'\nactions": _actions,
    "gradient difference\ncheckp., HiLoRe": _gradients,
}
