"""The covering array covers, the page holds all of it, and a sample of its cells still gives what the page says."""

from __future__ import annotations

import pytest

from tests.matrix import report, settings
from tests.ranks import RankPool

#: Every so many-th cell runs in CI: `python -m tests.matrix` runs all of them.
EVERY = 5

CELLS = settings.cells()


def test_every_pair_that_the_host_has_is_in_a_cell() -> None:
    covered = {pair for cell in CELLS for pair in settings.pairs(cell)}
    assert covered == set(settings.all_pairs())
    assert all(list(cell) == list(settings.AXES) for cell in CELLS)


def test_the_page_holds_every_cell_and_nothing_is_silently_wrong() -> None:
    rows = report.recorded(report.PAGE.read_text())
    assert [cell for cell, _ in rows] == CELLS, "python -m tests.matrix --write docs/compatibility.md"
    assert all(report.is_sound(result) for _, result in rows)


def test_the_page_names_what_no_row_proves() -> None:
    rows = report.recorded(report.PAGE.read_text())
    written = report.page({number: result for number, (_, result) in enumerate(rows)})
    assert written == report.PAGE.read_text()


@pytest.mark.parametrize("number", range(0, len(CELLS), EVERY), ids=lambda number: settings.name(CELLS[number]))
def test_a_cell_gives_what_the_page_says(ranks: RankPool, number: int) -> None:
    results = ranks.run("tests.matrix.cell:run_cell", **CELLS[number])
    _, written = report.recorded(report.PAGE.read_text())[number]
    assert [result.partition(":")[0] for result in results] == [written.partition(":")[0]] * 2, results
