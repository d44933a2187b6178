"""Bare `hilore`: what lies here, what could be saved, what to type next; with and without a JSON, a model, a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hilore.cli import summary
from ds_hilore.cli.main import COMMANDS, main
from ds_hilore.cli.surroundings import Held
from ds_hilore.core import deps
from tests.published import write_config

SOUND = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "hilore": {"memory_budget": "1.2x"}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_an_empty_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys)
    assert found["config"] is found["model"] is found["prospect"] is None and found["versions"]["torch"]
    assert '"hilore"' in found["next"][0]
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "JSON: none here" in printed and "free" in printed and "next:" in printed


def test_a_json_and_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds.json").write_text(json.dumps(SOUND))
    found = told(capsys)
    assert found["config"] == "ds.json" and found["block"] and found["prospect"] is None
    assert found["next"][0] == "hilore plan --config ds.json --model PATH --tokens B T"
    write_config("Qwen2.5-3B", here)
    found = told(capsys)
    prospect = found["prospect"]
    assert prospect["units"] == "36 Qwen2DecoderLayer" and prospect["budget"] == "1.2x"
    assert 0 < prospect["saved_share"] < prospect["possible_share"] < 0.5
    assert prospect["least_bytes"] > 6e9 < prospect["storing_bytes"]
    assert found["next"][0] == "hilore plan --config ds.json --model Qwen2.5-3B --tokens 4 2048"
    # what is said is what `hilore plan` says
    assert main([*found["next"][0].split()[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["all_replayed"]["peak_bytes"] == prospect["least_bytes"]
    left = plan["own"]["outcome"]["seconds"] / plan["checkpointing"]["seconds"]
    assert prospect["saved_share"] == pytest.approx(1 - left)
    assert main([]) == 0
    assert "smallest budget:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ds", "found", "block"),
    [
        ({"zero_optimization": {"stage": 2}, "train_batch_size": 8}, True, False),
        ({"hilore": {"memory_budgt": "1.1x"}}, True, False),
        ({"hilore": {"enabled": False}}, True, False),
        ({"hilore": {}, "tensor_parallel": {"autotp_size": 2}}, True, False),
        ({"name": "package", "optimizer": 1}, False, False),
        ([1, 2], False, False),
    ],
)
def test_jsons_that_need_a_doctor_and_jsons_of_others(
    here: Path, capsys: pytest.CaptureFixture[str], ds: Any, found: bool, block: bool
) -> None:
    (here / "some file.json").write_text(json.dumps(ds))
    (here / "broken.json").write_text("{")
    said = told(capsys)
    assert said["config"] == ("some file.json" if found else None) and said["block"] is block
    if found:
        assert said["next"] == ["hilore doctor --config 'some file.json'"]


def test_a_json_with_a_block_comes_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 8}))
    (here / "b.json").write_text(json.dumps(SOUND))
    assert told(capsys)["config"] == "b.json"


def test_a_gpu_is_for_measuring(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary, "device_now", lambda: Held("H100", 80 * 10**9, 10**9))
    (here / "ds.json").write_text(json.dumps(SOUND))
    assert any(line.startswith("hilore bench") for line in told(capsys)["next"])
    assert main([]) == 0
    assert "device: H100, 79.00 GB of 80.00 GB free" in capsys.readouterr().out


def test_a_missing_package_comes_before_everything(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = deps.installed_version
    monkeypatch.setattr(deps, "installed_version", lambda name: None if name == "peft" else real(name))
    (here / "ds.json").write_text(json.dumps(SOUND))
    assert told(capsys, code=1)["next"] == ["pip install -U 'peft>=0.19'"]
    assert main([]) == 1
    assert "peft is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words) or "bare")
def test_help_has_examples_exit_codes_and_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:\n  hilore" in printed and "exit codes" in printed and "--json" in printed


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plans"])
    assert done.value.code == 2 and "plan" in capsys.readouterr().err


def test_an_interrupted_command_has_the_shells_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["doctor"], "run", interrupted)
    assert main(["doctor"]) == 130
