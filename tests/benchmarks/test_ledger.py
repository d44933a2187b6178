"""What the benchmark of the ledger reports, on made-up results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ledger import BEGIN, END, Result, Setting, row, settings, table, worst_ranks, write

SETTING = Setting(2, "none", True, 3, (256,))


def result(rank: int, predicted: int, update: str = "later") -> Result:
    return Result(
        SETTING, update, 256, rank, level=100_000_000, predicted=predicted, measured=200_000_000, moment="loss"
    )


def test_error_is_a_share_of_what_the_update_adds() -> None:
    assert result(0, 195_000_000).error == pytest.approx(-0.05)


def test_the_worse_rank_of_each_update_is_shown() -> None:
    first, second, other = result(0, 195_000_000), result(1, 220_000_000), result(0, 200_000_000, "first")
    assert worst_ranks([first, second, other]) == [second, other]
    assert table([second]).row_count == 1


def test_the_table_goes_between_its_marks_each_time(tmp_path: Path) -> None:
    document = tmp_path / "memory.md"
    document.write_text(f"before\n\n{BEGIN}\n{END}\n\nafter\n")
    write([result(0, 195_000_000)], document)
    once = document.read_text()
    write([result(0, 195_000_000)], document)
    assert document.read_text() == once
    assert once.startswith("before\n") and once.endswith("after\n")
    assert "| " + " | ".join(row(result(0, 195_000_000))) + " |" in once.splitlines()
    write([result(0, 195_000_000), result(1, 220_000_000)], document)
    assert "1 of 2 updates are within 5%" in document.read_text() and "| **+20.0%** |" in document.read_text()


def test_every_stage_with_what_it_can_offload() -> None:
    cases = settings([0, 1, 2, 3], (256,))
    assert {(c.stage, c.offload) for c in cases if c.stage in (0, 3)} == {
        (0, "none"),
        (3, "none"),
        (3, "optimizer"),
        (3, "optimizer + parameters"),
    }
    assert len(cases) == len(set(cases)) == 8 * 4
