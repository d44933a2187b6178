"""The last line of a run, and figures as people read them."""

from __future__ import annotations

import pytest

from ds_hilore.report import words
from ds_hilore.report.records import AuditRecord, UpdateRecord
from ds_hilore.report.totals import Totals

GB = 10**9


def totals(**more: int) -> Totals:
    """Eleven updates of 9 s, each promising to save 1 s of 10."""
    found = Totals()
    for number in range(11):
        seconds = None if number == 0 else 9.0
        facts = {"budget_bytes": 12 * GB if number > 1 else 0, "peak_bytes": (20 if number < 2 else 11) * GB} | more
        found.add(UpdateRecord(update=number, stage="planned", seconds=seconds, saved_seconds=1.0, **facts))
    return found


def test_the_last_line() -> None:
    assert totals().line(0.0) == (
        "the run ends after 11 updates. Plans promised to save 10 s, 10.0% of what the updates would have taken "
        "without them; highest peak 11.00 GB of the budget of 12.00 GB; gradients exact"
    ), "neither the first update, of which nobody saw the beginning, nor peaks before there was a budget"


def test_the_last_line_where_an_error_was_allowed() -> None:
    found = totals(shortages=3)
    assert "; gradient error up to 1.0% allowed, and no audit; memory ran short 3 x" in found.line(0.01)
    for measured in (0.002, 0.008):
        found.add_audit(AuditRecord(update=0, predicted=0.005, measured=measured))
    assert "; audited gradient error 0.5% on average, 0.8% at most (2 audits, 1.0% allowed); memory" in found.line(0.01)


def test_the_last_line_of_runs_that_told_little() -> None:
    tried = Totals()
    tried.add(UpdateRecord(update=0, stage="trial", seconds=1.0, saved_seconds=0.5, budget_bytes=12 * GB))
    assert (
        tried.line(0.0) == "the run ends after 1 update, before plans are followed: the first updates measure and try"
    )
    assert tried.saved_seconds == 0, "what is on trial may not hold"
    blind = Totals()
    blind.add(UpdateRecord(update=0, stage="planned", budget_bytes=12 * GB))
    assert "; peaks were not measured against the budget of 12.00 GB; " in blind.line(0.0)
    assert "save 0 s, 0.0% of" in blind.line(0.0), "no time has been seen"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.size(1_500_000), "1.5 MB"),
        (words.size(12 * GB), "12.00 GB"),
        (words.span(0.01234), "0.0123 s"),
        (words.span(1200), "20 min"),
        (words.span(3600 * 30 + 120), "30 h 2 min"),
        (words.share(0.119), "11.9%"),
        (words.share(0.00234), "0.23%"),
        (words.share(0.0), "0.0%"),
        (words.count_of(1, "rank"), "1 rank"),
        (words.count_of(12_000, "update"), "12,000 updates"),
        (words.plain("a\nb\x1b[0m\u202e"), "a?b?[0m?"),
        (words.plain("x" * 500, 10), "xxxxxxx..."),
    ],
)
def test_figures(said: str, expected: str) -> None:
    assert said == expected
