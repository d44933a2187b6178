"""`hilore bench`: three ways in turn, from processes of their own; its verdict, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hilore.cli import bench, bench_process
from ds_hilore.cli.bench import result, verdict
from ds_hilore.cli.bench_process import Way, read, take
from ds_hilore.cli.main import main
from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
COMMAND = ["bench", "--config", "ds.json", "--model", "model", "--tokens", "2", "32", "--turns", "5"]
WAYS = [way.value for way in Way]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path / "model")
    ds = {"zero_optimization": {"stage": 2}, "hilore": {"memory_budget": "1.5x"}}
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    return tmp_path


def in_this_process(started: list[tuple[str, dict[str, str]]]) -> Any:
    """In place of `subprocess.run`: a process would take ten seconds to begin."""

    def run(worker: list[str], env: dict[str, str], **_: Any) -> Any:
        *_, module, what, spec, out = worker
        assert module == "ds_hilore.cli.bench_process"
        started.append((what, env))
        return SimpleNamespace(returncode=bench_process.main([what, spec, out]))

    return run


@pytest.mark.parametrize("checkpointing", ["torch", "deepspeed"])
def test_three_ways_are_measured(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpointing: str
) -> None:
    started: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=in_this_process(started)))
    code = main([*COMMAND, "--json", "--checkpointing", checkpointing])
    found = json.loads(capsys.readouterr().out)
    assert code == int(not found["faster"] or found["over_bytes"] > 0)
    # design fact 20: peaks from a process with the malloc variables, times from one without
    assert [what for what, _ in started] == ["peaks", "times"]
    assert started[0][1].items() >= TIGHT_ENVIRONMENT.items() and not started[1][1].keys() & TIGHT_ENVIRONMENT.keys()
    assert [way["way"] for way in found["ways"]] == WAYS == list(found["seconds"])
    for way in found["ways"]:
        assert len(found["seconds"][way["way"]]) == 5 and way["peak_bytes"] > 0 < way["seconds"]
        ratio = way["to_checkpointing"]
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert found["ways"][1]["to_checkpointing"]["median"] == 1
    assert sum(found["units"].values()) == 3 and found["update"]["device"] == "cpu"


def test_ways_really_differ(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers are recomputed under each way, by counting their forwards in one update."""
    spec = {"config": "ds.json", "model": "model", "tokens": [2, 32], "turns": 5, "checkpointing": "torch"}
    spec |= {"lora_rank": 16, "lora_targets": ["all-linear"], "lora_dropout": 0.0, "full_finetuning": False}
    spec |= {"dtype": "bf16", "accumulation": 1, "attention": None, "whole_logits": False, "random_weights": True}
    counts: dict[str, int] = {}
    original = bench_process._run

    def counting(rehearsal: Any, way: Way, function: Any) -> float:
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        # the query projection's module, which peft wraps, runs once per forward of its layer
        module = rehearsal.engine.module.get_base_model().model.layers[1].self_attn.q_proj
        handle = module.register_forward_hook(count)
        try:
            return original(rehearsal, way, function)
        finally:
            handle.remove()
            counts[way.value] = calls

    monkeypatch.setattr(bench_process, "_run", counting)
    take("times", read(json.dumps(spec)))
    assert counts[Way.NONE.value] == 1 and counts[Way.CHECKPOINTING.value] == 2
    assert counts[Way.HILORE.value] in (1, 2)


def test_a_process_that_fails_says_why(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The real process: its words come through, and its exit code."""
    assert main([*COMMAND, "--model", "nowhere"]) == 2
    said = capfd.readouterr()
    assert "name its folder" in said.err and "Traceback" not in said.err and not said.out


def test_a_process_that_is_killed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = SimpleNamespace(returncode=-9)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=lambda *_, **__: killed))
    assert main(COMMAND) == 3
    assert "ended by signal 9 (out of memory? give smaller --tokens)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--turns", "4"], "--turns 4"), (["--tokens", "0", "4"], "--tokens 0 4"), (["--config", "no.json"], "no.json")],
)
def test_a_wrong_request(here: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    assert main([*COMMAND, *options]) == 2
    assert says in capsys.readouterr().err


def test_bench_is_for_one_rank(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(COMMAND) == 2
    assert "without a launcher" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ verdicts


def reports(none: float | None, hilore: float, peak_bytes: int = 100) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of ways that take so much of checkpointing's time, with 1 % of noise."""
    factors = {Way.NONE: none, Way.CHECKPOINTING: 1.0, Way.HILORE: hilore}
    noise = [1.0, 1.01, 0.99, 1.0, 1.01]
    seconds = {way.value: [factor * more for more in noise] for way, factor in factors.items() if factor is not None}
    peaks = {Way.NONE.value: None if none is None else 200, Way.CHECKPOINTING.value: 90, Way.HILORE.value: peak_bytes}
    return (
        {"peaks": peaks, "budget_bytes": 100, "wander_bytes": 5},
        {"seconds": seconds, "actions": {"H": 2, "R": 1}, "said": "a model", "notes": [], "update": {}},
    )


def test_a_gain() -> None:
    found = result(*reports(none=0.7, hilore=0.8))
    assert found.faster and found.over_bytes == 0
    assert found.recovered_share == pytest.approx(2 / 3)
    assert "20.0% less time" in verdict(found) and "67%" in verdict(found) and "2 H, 1 R" in verdict(found)


def test_no_gain() -> None:
    found = result(*reports(none=0.7, hilore=1.0))
    assert not found.faster and found.recovered_share == 0
    assert "no gain beyond noise" in verdict(found) and "Troubleshooting" in verdict(found)


def test_a_peak_above_the_budget() -> None:
    assert result(*reports(none=0.7, hilore=0.8, peak_bytes=105)).over_bytes == 0  # peaks of equal updates wander
    found = result(*reports(none=0.7, hilore=0.8, peak_bytes=110))
    assert found.over_bytes == 5 and "above its budget" in verdict(found)


def test_what_does_not_fit_is_a_row_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    peaks, times = reports(none=None, hilore=0.9)
    found = result(peaks, times)
    assert found.of(Way.NONE).seconds is None and found.recovered_share is None and found.faster
    bench.show(Console(width=120), found, times)
    assert "does not fit" in capsys.readouterr().out
    assert json.dumps(bench.as_json(found, times))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryExhausted("no memory")])
def test_a_way_that_does_not_fit_is_left_out(error: Exception) -> None:
    def fails() -> float:
        raise error

    assert not bench_process._fits(fails) and bench_process._fits(lambda: 1.0)
