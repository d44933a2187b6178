"""The parts of the update-step benchmark that compute: budgets, tuned methods, shares; and the whole of it, small."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from benchmarks.bench import Bench, relative_error
from benchmarks.measure import PeakReport, TimeReport, budget_bytes
from benchmarks.methods import (
    LOSSY,
    METHODS,
    NONE,
    TORCH,
    actions,
    announces,
    check_method,
    kept_layers,
    like,
    plainest,
    planned_mode,
    runs_live_rows_only,
)
from benchmarks.records import Case, Peak, table
from benchmarks.selective import POLICIES
from benchmarks.spec import Spec
from benchmarks.update_step import apart, counted_share, records
from ds_hilore.core.config import Mode
from tests import models

TIMES = TimeReport(
    seconds={
        "none": [6.0, 6.2],
        "torch": [10.0, 10.2],
        "hilore_exact @ 1.10x": [8.0, 8.2],
        "best_k_layers @ 1.10x": [9.0] * 2,
        "torch_sac @ 1.10x": [9.5] * 2,
    },
    gradient_errors=dict.fromkeys(
        ("none", "torch", "hilore_exact @ 1.10x", "best_k_layers @ 1.10x", "torch_sac @ 1.10x"), 0.0
    ),
    plans={
        "none": "HHHH",
        "torch": "RRRR",
        "hilore_exact @ 1.10x": "RHRH",
        "best_k_layers @ 1.10x": "RRRH",
        "torch_sac @ 1.10x": "RRSS",
    },
    replay_seconds={"torch": [1.0] * 4, "hilore": [0.7] * 4, "down": [0.8, 0.8, 0.8, 0.9]},
)
CASES = (
    Case("none"),
    Case("torch"),
    Case("hilore_exact", "1.10x", 1100),
    Case("best_k_layers", "1.10x", 1100, (3,)),
    Case("torch_sac", "1.10x", 1100, (2, 3), "down"),
)
PEAKS = PeakReport(
    CASES,
    {case.key: Peak(1000 + 500 * (case.method == "none"), 600, None, TIMES.plans[case.key]) for case in CASES},
)


def test_the_paper_has_an_engine_of_its_own() -> None:
    spec = Spec("quick", max_gradient_error=0.01, methods=("torch", "hilore_paper", "hilore_exact"))
    ours, papers = apart(spec)
    assert ours.methods == ("torch", "hilore_exact") and not ours.paper and ours.error == 0
    assert papers.methods == ("hilore_paper",) and papers.paper and papers.error == 0.01
    assert apart(ours) == [ours] and apart(papers) == [papers]


def test_plans_with_whole_logits_have_an_engine_that_has_learnt_with_them() -> None:
    spec = Spec("quick", methods=("torch+logits", "hilore_exact+logits", "hilore_exact", "hilore_exact+prune"))
    plain, logits = apart(spec)
    assert logits.methods == ("hilore_exact+logits",) and logits.learns_whole_logits
    assert "hilore_exact+prune" in plain.methods and not plain.learns_whole_logits
    assert apart(Spec("quick")) == [Spec("quick")]


def test_what_suffixes_mean() -> None:
    assert announces("hilore_exact+prune") and not runs_live_rows_only("hilore_exact+prune")
    assert runs_live_rows_only("torch+prune") and runs_live_rows_only("hilore_exact+cut")
    assert not runs_live_rows_only("torch+logits") and not announces("torch+prune")
    assert like("torch", "best_k_layers+logits+cut") == Case("torch+logits+cut")
    assert plainest(Case("best_k_layers+logits", "b", 1), 3) == Case("torch+logits")
    assert actions(Case("none+cut"), 2) == "HH"
    assert counted_share(Case("torch+prune"), TIMES) is None


@pytest.mark.parametrize("method", ["torhc", "torch+logit", "torch+"])
def test_an_unknown_method_or_suffix_is_named(method: str) -> None:
    check_method("torch+logits+prune")
    with pytest.raises(ValueError, match=r"hilore_exact.*\+logits"):
        check_method(method)


def test_a_budget_may_refer_to_whole_logits() -> None:
    assert budget_bytes("1.10x+logits", 1000, 2000, 1600) == 1760
    with pytest.raises(ValueError):
        budget_bytes("1.10x+logits", 1000, 2000)


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
    assert shares["torch_sac @ 1.10x"] == pytest.approx(0.3 / 4)


def test_records_put_both_reports_together() -> None:
    found = {record.method: record for record in records(PEAKS, TIMES)}
    ours = found["hilore_exact"]
    assert ours.phi == pytest.approx(0.2)
    assert ours.time_ratio_to_checkpointing == pytest.approx((0.8 + 8.2 / 10.2) / 2)
    assert ours.recovered_share == pytest.approx((1 - (0.8 + 8.2 / 10.2) / 2) / (1 - (0.6 + 6.2 / 10.2) / 2))
    assert found["none"].recovered_share == pytest.approx(1.0)
    assert ours.pairs == 2
    assert found["torch_sac"].policy == "down"


def test_the_table_says_the_policy() -> None:
    shown = Console(file=io.StringIO(), width=200)
    shown.print(table(records(PEAKS, TIMES), "title"))
    lines = cast(io.StringIO, shown.file).getvalue().splitlines()
    assert ["2R 2S (down)" in line for line in lines if "torch_sac" in line] == [True]


def test_methods_that_are_tuned_to_nothing_or_everything_are_others_by_another_name() -> None:
    everything = (0, 1, 2)
    assert plainest(Case("torch_sac", "1.10x", 1100), 3) == plainest(Case("every_n_layers", "b", 1), 3) == TORCH
    assert plainest(Case("best_k_layers", "1.10x", 1100, everything), 3) == NONE
    kept = Case("torch_sac", "1.10x", 1100, everything, "down")
    assert plainest(kept, 3) == Case("torch_sac", kept=everything, policy="down")
    assert actions(kept, 3) == "SSS"
    assert plainest(CASES[2], 4) == CASES[2]  # hilore's plans differ by budget


def test_planned_methods_say_their_mode() -> None:
    assert planned_mode("hilore_exact") is planned_mode("hilore_exact+prune") is Mode.EXACT
    assert planned_mode("hilore_all_R") is planned_mode("torch_sac") is None


def test_updates_with_a_selective_policy_are_exact(tmp_path: Path) -> None:
    model = tmp_path / "model"
    models.llama(layers=3).save_pretrained(model)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # an engine leaves its process group behind
        errors, replays = pool.apply(_selective_updates, (model,))
    assert errors == dict.fromkeys(POLICIES, 0.0)
    assert {kind: len(seconds) for kind, seconds in replays.items()} == {"torch": 3, "hilore": 3, "products": 3}
    assert all(second > 0 for seconds in replays.values() for second in seconds)


def _selective_updates(model: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    bench = Bench(Spec("quick", model=str(model), layers=3))
    bench.learn()
    exact = bench.gradients(NONE)
    errors = {}
    for policy in POLICIES:
        case = Case("torch_sac", kept=(1, 2), policy=policy)
        errors[policy] = relative_error(bench.gradients(case), exact)
        assert bench.actions(case) == "RSS"
    return errors, bench.replay_seconds(("torch", "hilore", "products"), updates=1)


def run_benchmark(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records of a whole benchmark on a tiny model."""
    model, out = folder / "model", folder / "out.json"
    models.llama(layers=3).save_pretrained(model)
    command = [sys.executable, "-m", "benchmarks.update_step", "--model", model, "--turns", "2", "--threads", "1"]
    finished = subprocess.run(
        [*command, *arguments, "--json", out],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    records: list[dict[str, Any]] = json.loads(out.read_text())["records"]
    return records


@pytest.mark.slow
def test_compressing_methods_are_calibrated_and_measured(tmp_path: Path) -> None:
    found = run_benchmark(tmp_path, "--methods", ",".join(("hilore_exact", *LOSSY)), "--budgets", "unlimited")
    errors = {record["method"]: record["gradient_error"] for record in found}
    assert errors.keys() == {"none", "torch", "hilore_exact", *LOSSY}
    # with memory for everything nothing is gained by compressing
    assert all(error < 1e-6 for error in errors.values())


@pytest.mark.slow
def test_the_whole_benchmark_on_a_tiny_model(tmp_path: Path) -> None:
    plain = set(METHODS) - set(LOSSY)
    suffixed = {"torch+logits", "best_k_layers+logits", "hilore_exact+logits", "none+prune", "hilore_all_R+prune"}
    suffixed |= {"hilore_exact+prune", "hilore_exact+cut"}
    arguments = ("--methods", ",".join([*plain, *suffixed]), "--budgets", "phi=0,1.10x+logits,unlimited")
    found = run_benchmark(tmp_path, *arguments, "--dead-rows", "0.5")
    assert {record["method"] for record in found} == plain | suffixed
    for record in found:  # other shapes of products, other last bits
        assert record["gradient_error"] < (1e-5 if record["method"] in suffixed else 1e-6)
    exact = {r["budget"]: r for r in found if r["method"] == "hilore_exact"}
    assert set(exact) == {"phi=0", "1.10x+logits", "unlimited"}
    assert exact["unlimited"]["actions"] == {"H": 3}
    assert exact["phi=0"]["budget_bytes"] < exact["1.10x+logits"]["budget_bytes"]
    selective = [r for r in found if r["method"] == "torch_sac"]
    assert len(selective) == 3
    for record in selective:  # on so small a model a policy may well save nothing
        assert record["policy"] in POLICIES if "S" in record["actions"] else record["policy"] == ""
        assert record["counted_share"] is not None
    assert all(r["predicted_peak_bytes"] > r["floor_bytes"] for r in exact.values())
