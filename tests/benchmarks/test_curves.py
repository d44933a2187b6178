"""Curves from made-up runs: what is measured, the CSV, the picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import curves
from benchmarks.curve_plot import lines
from benchmarks.curve_rows import Row, read_rows, replaced, write_rows
from benchmarks.curves import FAMILIES, specs
from benchmarks.measure import budget_bytes
from benchmarks.methods import check_method
from benchmarks.records import Record
from benchmarks.spec import Spec
from tests.benchmarks.curve_records import TORCH_BYTES, record, references


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        Row("plain", record("torch_sac", "phi=0.1", 1_500_000_000, counted=0.1, policy="down", actions={})),
        Row("prune", record("hilore_exact+prune", "1.10x", TORCH_BYTES, predicted_peak_bytes=7, gradient_error=1e-7)),
        *(Row("plain", each) for each in references()),
    ]
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("family,method\nplain,torch\n")
    with pytest.raises(ValueError, match="columns"):
        read_rows(tmp_path / "rows.csv")


def test_a_family_takes_the_place_of_its_earlier_rows_only() -> None:
    old = [Row("plain", record("torch")), Row("logits", record("torch"))]
    new = [Row("logits", record("none"))]
    assert replaced(old, new) == [old[0], new[0]]


@pytest.mark.parametrize("preset, least", [("quick", 8), ("full", 3), ("gpu", 3)])
def test_every_family_can_be_measured(preset: str, least: int) -> None:
    for name, spec in specs(list(FAMILIES), Spec(preset, threads=2, turns=5)).items():
        assert len(set(spec.budgets)) == len(spec.budgets) >= least
        assert all(budget_bytes(written, 1000, 2000, 1500) >= 1000 for written in spec.budgets)
        for method in spec.methods:
            check_method(method)
        assert (spec.dead_rows > 0) is (name == "prune") and (spec.preset, spec.turns) == (preset, 5)


def test_methods_and_budgets_may_be_fewer() -> None:
    few = Spec("full", methods=("best_k_layers", "hilore_exact"), budgets=("1.10x",))
    found = specs(["plain", "prune"], few)
    assert found["plain"].methods == few.methods and found["prune"].budgets == few.budgets
    assert found["prune"].methods == ("best_k_layers+prune", "hilore_exact+prune", "hilore_exact+cut")


def test_a_method_that_is_not_compared_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["curves", "--out", str(tmp_path / "results"), "--methods", "best_k,torch"])
    with pytest.raises(SystemExit, match="2"):
        curves.main()
    assert "best_k not known" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_what_breaks_its_budget_has_no_place_on_a_curve() -> None:
    fits = record("best_k_layers", "phi=0.5", 1_900_000_000)
    breaks = record("best_k_layers", "1.10x", 1_540_000_000, peak_bytes=1_600_000_000)
    unlimited = record("best_k_layers", "unlimited", 10**11, peak_bytes=2_000_000_000)
    found = lines([*references(), unlimited, fits, breaks])
    assert found["best_k_layers"] == [(1900.0, fits), (2000.0, unlimited)]
    assert [megabytes for megabytes, _ in found["torch"]] == [TORCH_BYTES / 1e6]


def test_the_command_writes_both_files_and_keeps_other_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(spec: Spec) -> list[Record]:
        suffix = "+prune" if spec.dead_rows else ""
        return [*references(), record(f"hilore_exact{suffix}", "1.10x", 1_540_000_000, time=0.5)]

    monkeypatch.setattr(curves, "measured", measured)
    for families in (["plain", "logits"], ["prune"]):
        command = ["curves", "--out", str(tmp_path / "results"), "--families", *families, "--turns", "1"]
        monkeypatch.setattr(sys, "argv", command)
        curves.main()
    rows = read_rows(tmp_path / "results" / "quick.csv")
    assert list(dict.fromkeys(row.family for row in rows)) == ["plain", "logits", "prune"]
    assert (tmp_path / "results" / "quick.png").read_bytes().startswith(b"\x89PNG")
    assert "faster than no checkpointing" in capsys.readouterr().out
