"""The parts of the update-step benchmark that compute: budgets, tuned methods, shares; and the whole of it, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure import PeakReport, TimeReport, budget_bytes
from benchmarks.methods import kept_layers
from benchmarks.records import Case, Peak
from benchmarks.update_step import counted_share, records
from tests import models

TIMES = TimeReport(
    seconds={
        "none": [6.0, 6.2],
        "torch": [10.0, 10.2],
        "hilore_exact @ 1.10x": [8.0, 8.2],
        "best_k_layers @ 1.10x": [9.0] * 2,
    },
    gradient_errors={"none": 0.0, "torch": 0.0, "hilore_exact @ 1.10x": 0.0, "best_k_layers @ 1.10x": 0.0},
    plans={"none": "HHHH", "torch": "RRRR", "hilore_exact @ 1.10x": "RHRH", "best_k_layers @ 1.10x": "RRRH"},
    torch_replay_seconds=[1.0, 1.0, 1.0, 1.0],
    hilore_replay_seconds=[0.7, 0.7, 0.7, 0.7],
)
CASES = (
    Case("none"),
    Case("torch"),
    Case("hilore_exact", "1.10x", 1100),
    Case("best_k_layers", "1.10x", 1100, (3,)),
)
PEAKS = PeakReport(CASES, {case.key: Peak(1000 + 500 * (case.method == "none"), 600, None, "") for case in CASES})


@pytest.mark.parametrize(
    "written, expected", [("1.10x", 1100), ("phi=0", 1000), ("phi=0.5", 1500), ("unlimited", 20000)]
)
def test_budgets(written: str, expected: int) -> None:
    assert budget_bytes(written, 1000, 2000) == expected


def test_a_budget_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"phi=0\.25"):
        budget_bytes("half", 1000, 2000)


def test_layers_that_tuned_methods_keep() -> None:
    assert kept_layers("best_k_layers", 2, 6) == [(0, 1), (4, 5)]
    assert kept_layers("every_n_layers", 3, 6) == [(1, 3, 5)]
    assert kept_layers("every_n_layers", 1, 6) == []  # no n leaves five of six layers checkpointed
    assert kept_layers("every_n_layers", 0, 6) == [()]


def test_counted_shares_come_from_replays_only() -> None:
    shares = {case.key: counted_share(case, TIMES) for case in CASES}
    assert shares["none"] == 1.0
    assert shares["torch"] == 0.0
    assert shares["best_k_layers @ 1.10x"] == pytest.approx(0.25)
    assert shares["hilore_exact @ 1.10x"] == pytest.approx(1 - 1.4 / 4)


def test_records_put_both_reports_together() -> None:
    found = {record.method: record for record in records(PEAKS, TIMES)}
    ours = found["hilore_exact"]
    assert ours.phi == pytest.approx(0.2)
    assert ours.time_ratio_to_checkpointing == pytest.approx((0.8 + 8.2 / 10.2) / 2)
    assert ours.recovered_share == pytest.approx((1 - (0.8 + 8.2 / 10.2) / 2) / (1 - (0.6 + 6.2 / 10.2) / 2))
    assert found["none"].recovered_share == pytest.approx(1.0)
    assert ours.pairs == 2


@pytest.mark.slow
def test_the_whole_benchmark_on_a_tiny_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    models.llama(layers=3).save_pretrained(model)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.update_step", "--model", model, "--turns", "2", "--threads", "1"]
    budgets = "phi=0,1.10x,unlimited"
    finished = subprocess.run(
        [*command, "--budgets", budgets, "--json", out],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(out.read_text())["records"]
    assert {record["method"] for record in found} >= {"none", "torch", "deepspeed", "best_k_layers", "hilore_exact"}
    assert all(record["gradient_error"] < 1e-6 for record in found)
    exact = {r["budget"]: r for r in found if r["method"] == "hilore_exact"}
    assert set(exact) == {"phi=0", "1.10x", "unlimited"}
    assert exact["unlimited"]["actions"] == {"H": 3}
    assert all(r["predicted_peak_bytes"] > r["floor_bytes"] for r in exact.values())
