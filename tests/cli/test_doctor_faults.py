"""Planted faults, each with the words that explain it and the words that cure it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_hilore.cli.checks import check_json, check_model
from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.cli.main import main
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.host_rules import REFUSALS, Refusal
from tests.published import write_config


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


@pytest.mark.parametrize(
    ("ds", "what", "where", "remedy"),
    [
        ({}, "no", "top level", "memory_budget"),
        ({"zero_optimization": {"hilore": {}}}, "inside", "zero_optimization.hilore", "top level"),
        ({"hilore": {"enabled": False}}, "switched off", "hilore.enabled", "remove"),
        ({"hi_lore": {}}, "did you mean", "hilore", "configuration"),
        ({"hilore": {"memory_budgt": "1.1x"}}, "unknown key", "hilore", "configuration"),
        ({"hilore": {}, "compile": {"deepcompile": True}}, "DeepCompile", "compile.deepcompile", "false"),
        ({"hilore": {}, "tensor_parallel": {"autotp_size": 2}}, "tensor par", "tensor_parallel.autotp_size", "ZeRO-3"),
    ],
)
def test_faults_of_a_json(ds: dict[str, Any], what: str, where: str, remedy: str) -> None:
    found = only(check_json(ds))
    assert what in found.what and where in found.where and remedy in found.remedy
    assert found.severity is Severity.WRONG


@pytest.mark.parametrize(
    ("ds", "what"),
    [
        ({"hilore": {}, "activation_checkpointing": {"partition_activations": True}}, "partition_activations"),
        ({"hilore": {}, "activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing"),
        ({"hilore": {"max_gradient_error": 0.01, "mode": "exact"}}, "nothing may be compressed"),
    ],
)
def test_what_has_no_effect_is_a_note(ds: dict[str, Any], what: str) -> None:
    found = only(check_json(ds))
    assert what in found.what and found.remedy and found.severity is Severity.NOTE


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.feature)
def test_every_refusal_of_a_json_has_the_way_out_as_its_remedy(rule: Refusal) -> None:
    ds: dict[str, Any] = {"hilore": {}}
    node = ds
    for name in rule.path[:-1]:
        node = node.setdefault(name, {})
    node[rule.path[-1]] = 2
    (found,) = check_json(ds)
    assert (found.where, found.remedy) == (".".join(rule.path), rule.way_out)
    assert rule.reason in found.what


def test_a_sound_json_has_no_findings() -> None:
    assert check_json({"hilore": {"memory_budget": "1.2x"}, "zero_optimization": {"stage": 2}}) == []


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(4, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def layers() -> Layers:
    with torch.device("meta"):
        return Layers()


NAMED = HiLoReConfig(units=["Linear"])


def test_faults_of_a_model() -> None:
    assert check_model(layers(), NAMED, 3) == []
    assert "no units" in only(check_model(layers(), HiLoReConfig(), 2)).what
    assert "matches no module" in only(check_model(layers(), HiLoReConfig(units=["Nobody"]), 2)).what
    untrained = layers().requires_grad_(False)
    assert "no parameter is trained" in only(check_model(untrained, NAMED, 2)).what
    frozen = layers()
    frozen.embedding.requires_grad_(False)
    assert check_model(frozen, NAMED, 2) == []
    assert "enable_input_require_grads" in only(check_model(frozen, NAMED, 3)).remedy
    compiled = layers()
    compiled.compile()
    found = only(check_model(compiled, NAMED, 2))
    assert "torch.compile" in found.what and "inside a decoder layer" in found.remedy


def test_the_command_says_it_to_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path)
    file = tmp_path / "ds.json"
    command = ["doctor", "--config", str(file), "--model", str(tmp_path), "--json"]
    file.write_text(json.dumps({"hilore": {}}))
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"findings": []}
    file.write_text(json.dumps({"hilore": {"units": ["Nobody"]}}))
    assert main(command) == 1
    found, note = json.loads(capsys.readouterr().out)["findings"]
    assert found["severity"] == "wrong" and "LlamaDecoderLayer" in found["what"]
    assert note["severity"] == "note" and "not looked at" in note["what"]


def test_the_command_says_it_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"hilore": {}}}))
    assert main(["doctor", "--config", str(file)]) == 1
    assert "remedy: move it to the top level" in capsys.readouterr().out


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["findings"]
    return found


def test_a_budget_below_the_minimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config("Qwen2.5-3B", tmp_path)
    file = tmp_path / "ds.json"
    command = ["doctor", "--config", str(file), "--model", str(tmp_path / "Qwen2.5-3B"), "--json"]
    file.write_text(json.dumps({"hilore": {"memory_budget": "8GB"}, "bf16": {"enabled": True}}))
    assert main(command) == 0  # for one token
    assert said(capsys) == []
    assert main([*command, "--tokens", "8", "4096"]) == 1
    (finding,) = said(capsys)
    assert finding["where"] == "hilore.memory_budget" and "8 x 4096 tokens" in finding["what"]
    least = int(finding["remedy"].split()[3].rstrip(","))
    file.write_text(json.dumps({"hilore": {"memory_budget": least}, "bf16": {"enabled": True}}))
    assert main([*command, "--tokens", "8", "4096"]) == 0
    assert said(capsys) == []


def test_budgets_of_another_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config("Qwen2.5-3B", tmp_path)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"hilore": {"memory_budget": ["1.1x", "1.2x"]}, "bf16": {"enabled": True}}))
    command = ["doctor", "--config", str(file), "--model", str(tmp_path / "Qwen2.5-3B"), "--json"]
    assert main(command) == 0
    assert "--world" in said(capsys)[0]["remedy"]
    assert main([*command, "--world", "2"]) == 0
    assert said(capsys) == []


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model that is no decoder."""
    from transformers import T5Config

    T5Config(d_model=8, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_that_is_not_supported(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = foreign / "ds.json"
    file.write_text(json.dumps({"hilore": {}}))
    assert main(["doctor", "--config", str(file), "--model", str(foreign), "--json"]) == 1
    wrong, note = said(capsys)
    assert "not a causal language model" in wrong["what"] and "name the units" in wrong["remedy"]
    assert "not looked at" in note["what"]


def test_a_wrong_json_does_not_hide_the_model(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is looked at all the same, and what is not looked at is said."""
    file = foreign / "ds.json"
    file.write_text(json.dumps({"hilore": {"memory_budgt": "1.1x"}}))
    assert main(["doctor", "--config", str(file), "--model", str(foreign), "--json"]) == 1
    of_json, note, of_model = said(capsys)
    assert "unknown key" in of_json["what"] and "not a causal" in of_model["what"]
    assert "block of defaults" in note["what"] and note["severity"] == "note"


@pytest.mark.parametrize(
    "options", [["--model", "."], ["--config", "/no/such.json"], ["--tokens", "0", "4", "--config", "x"]]
)
def test_a_request_without_sense_gives_two(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    assert options[0] in capsys.readouterr().err
