"""`hilore doctor --run`: an update is made and compared with the plain model, and the verdict is a finding."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hilore.cli import checked_run
from ds_hilore.cli.checked_run import Request, check_run, take
from ds_hilore.cli.findings import Severity
from ds_hilore.cli.main import main
from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.integration.selfcheck import SelfCheck
from ds_hilore.recovery.bundle import Derived, Kept

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
#: Without a trial, which on a model this small would measure noise.
BLOCK: dict[str, Any] = {"memory_budget": "2.0x", "planner": {"trial_microbatches": 0}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path / "model")
    (tmp_path / "ds.json").write_text(json.dumps(_ds(2)))
    return tmp_path


def _ds(stage: int, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}, "hilore": BLOCK | block}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sound_model_has_the_plain_gradients(here: Path, stage: int) -> None:
    found = take(Request(_ds(stage), "model", (2, 32)))
    assert found.severity is Severity.SOUND and found.where == "model", found
    assert f"ZeRO-{stage}" in found.what and "to the last bit" in found.what


def test_where_a_plan_replays_everything_a_unit_is_stored(here: Path) -> None:
    found = take(Request(_ds(2, memory_budget="2MiB"), "model", (2, 32)))
    assert found.severity is Severity.SOUND and "one was stored for the check" in found.what, found


def test_a_fault_is_a_finding(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored comes back a thousandth off; token ids as they are."""

    def off(value: Any, get: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        right = get(value)
        return right * 1.001 if right.is_floating_point() else right

    for kind in (Kept, Derived):
        monkeypatch.setattr(kind, "get", partialmethod(off, kind.get))
    found = take(Request(_ds(2), "model", (2, 32)))
    assert found.severity is Severity.WRONG
    assert "layers.2 (H" in found.what and "report" in found.remedy, found


@pytest.mark.parametrize("error", [MemoryExhausted("no bytes are left"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_memory_that_runs_short_is_a_finding(here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(SelfCheck, "forward", fails)
    found = take(Request(_ds(2), "model", (2, 32)))
    assert found.severity is Severity.WRONG and "does not fit" in found.what and "--tokens" in found.remedy


def test_what_cannot_be_checked_is_a_note(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelfCheck, "_reason", lambda *arguments: "for want of a reason")
    found = take(Request(_ds(2), "model", (2, 32)))
    assert found.severity is Severity.NOTE and "for want of a reason" in found.what


def test_the_command_runs_it_in_a_process_of_its_own(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "ds.json", "--model", "model", "--run", "--json"]) == 0
    findings = json.loads(capfd.readouterr().out)["findings"]
    (found,) = [finding for finding in findings if finding["severity"] == "sound"]
    assert "2 x 64" in found["what"], findings


def test_nothing_runs_while_something_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds.json").write_text(json.dumps({"hilore": {"units": ["Nobody"]}}))
    assert main(["doctor", "--config", "ds.json", "--model", "model", "--run", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any("no update was made" in finding["what"] for finding in findings)


def test_it_needs_a_model(here: Path) -> None:
    assert main(["doctor", "--config", "ds.json", "--run"]) == 2


def test_a_process_that_ends_or_does_not_is_a_finding(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(code: int) -> Any:
        return SimpleNamespace(run=lambda *a, **k: SimpleNamespace(returncode=code), TimeoutExpired=TimeoutError)

    request = Request(_ds(2), "model", (2, 32))
    monkeypatch.setattr(checked_run, "subprocess", ends(-9))
    assert "by signal 9; memory" in check_run(request).what
    monkeypatch.setattr(checked_run, "subprocess", ends(1))
    assert "with code 1" in check_run(request).what
    monkeypatch.setattr(checked_run, "subprocess", subprocess)
    found = check_run(request, time_limit_s=0.1)
    assert "not over" in found.what and found.severity is Severity.WRONG
