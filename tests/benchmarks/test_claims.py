"""Claims hold, fail and stay open as made-up records say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.claims import Claim, judged
from benchmarks.curve_rows import Row, write_rows
from benchmarks.records import Record
from tests.benchmarks.curve_records import record, references

AT = ("1.10x+logits", 2_000_000_000)


def plain(ours: Record | None = None, best_k: Record | None = None) -> list[Record]:
    return [
        *references(),
        ours or record("hilore_exact", *AT, time=0.72, counted=0.95),
        best_k or record("best_k_layers", *AT, time=0.85, counted=0.55),
    ]


def holds(family: str, records: list[Record]) -> list[bool | None]:
    return [claim.holds for claim in judged(Row(family, each) for each in records)]


def test_all_that_was_measured_holds() -> None:
    assert holds("plain", plain()) == [True, True, None, None, True]


@pytest.mark.parametrize(
    "ours",
    [
        record("hilore_exact", *AT, time=0.72, counted=0.89),
        record("hilore_exact", *AT, time=0.80, counted=0.95),  # the clock contradicts
        record("hilore_exact", *AT, time=0.72, counted=0.95, gradient_error=1e-7),
        record("hilore_exact", *AT, time=0.72, counted=0.95, peak_bytes=2_100_000_000),
    ],
)
def test_nearly_all_recomputation_must_be_gone_exactly_and_within_the_budget(ours: Record) -> None:
    assert holds("plain", plain(ours))[0] is False


def test_whole_layers_may_not_come_near() -> None:
    assert holds("plain", plain(best_k=record("best_k_layers", *AT, time=0.8, counted=0.74)))[1] is False


def test_where_nearly_everything_fits_there_is_nothing_to_multiply() -> None:
    assert holds("plain", plain(best_k=record("best_k_layers", *AT, time=0.72, counted=0.95)))[:2] == [True, None]


@pytest.mark.parametrize(
    ("other", "holding"),
    [
        (record("torch_sac", *AT, time=0.72, counted=0.97), False),  # counted is more
        (record("torch_sac", *AT, time=0.60, counted=0.90), False),  # faster beyond both intervals
        (record("torch_sac", *AT, time=0.71, counted=0.95), True),
        (record("torch_sac", *AT, time=0.60, counted=0.97, peak_bytes=2_100_000_000), True),  # over its budget
        (record("deepspeed", time=0.65), False),  # without a budget, and fits
        (record("hilore_all_H", time=0.65, counted=1.0), True),  # ours as well
    ],
)
def test_no_other_method_may_be_below_the_curve(other: Record, holding: bool) -> None:
    found = judged(Row("plain", each) for each in [*plain(), other])[-1]
    assert found.holds is holding
    assert holding or f"{AT[0]}: {other.method}" in found.seen


def test_the_better_of_our_ways_to_skip_dead_rows_counts() -> None:
    ours = record("hilore_exact+prune", *AT, time=0.65)
    others = [*references(), record("best_k_layers+prune", *AT, time=0.5)]
    assert holds("prune", [*others, ours]) == [None, None, True, True, False]
    assert holds("prune", [*others, ours, record("hilore_exact+cut", *AT, time=0.49)])[-1] is True
    assert holds("prune", [*references(), record("hilore_exact+prune", *AT, time=0.8)])[2:4] == [False, False]


def test_nothing_measured_is_no_claim() -> None:
    assert judged([]) and all(claim == Claim(claim.text, None) for claim in judged([]))


@pytest.mark.parametrize("counted", [0.95, 0.5])
def test_the_command_ends_as_the_claims_do(tmp_path: Path, counted: float) -> None:
    file = tmp_path / "quick.csv"
    write_rows([Row("plain", each) for each in plain(record("hilore_exact", *AT, time=0.72, counted=counted))], file)
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.claims", file],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert finished.returncode == (0 if counted > 0.9 else 1), finished.stderr
    assert ("FAIL" in finished.stdout) is (counted < 0.9)
