"""`hilore doctor --script`: faults planted in a training script, each with its line and its cure; nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.cli.main import main
from ds_hilore.cli.script import check_script
from ds_hilore.core.config import HiLoReConfig
from tests.ranks import ROOT

OWN_LOOP = """\
import deepspeed
import ds_hilore
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("m")
engine, *_ = ds_hilore.initialize(model=model, config="ds.json")
engine.train()
for batch in []:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
"""
TRAINER = """\
import ds_hilore
from trl import GRPOConfig, GRPOTrainer

ds_hilore.install()
settings = GRPOConfig("out", deepspeed="ds.json", gradient_checkpointing=True)
trainer = GRPOTrainer("m", args=settings)
trainer.train()
"""


def faults(tmp_path: Path, source: str, ds: dict[str, Any] | None = None) -> list[Finding]:
    script = tmp_path / "train.py"
    script.write_text(source)
    settings = {"hilore": {}, "zero_optimization": {"stage": 2}} if ds is None else ds
    return check_script(script, settings, HiLoReConfig.from_ds_json(settings), "ds.json")


@pytest.mark.parametrize("source", [OWN_LOOP, TRAINER], ids=["own loop", "trainer"])
def test_a_sound_script_has_no_findings(tmp_path: Path, source: str) -> None:
    assert faults(tmp_path, source) == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_are_sound(example: Path) -> None:
    assert check_script(example, {"hilore": {}}, HiLoReConfig()) == []


class Planted(NamedTuple):
    """A fault: what is written in a sound script in place of what, and what is to be said of it, at which line."""

    script: str
    old: str
    new: str
    line: int
    what: str
    remedy: str
    severity: Severity = Severity.WRONG


COMPILED = "torch.compile around the model", "inside a decoder layer"
IGNORED = "without effect", "leave it out", Severity.NOTE

PLANTED = {
    "no install": Planted(TRAINER, "ds_hilore.install()", "", 0, "nothing in this script", "ds_hilore.install()"),
    "early import": Planted(
        TRAINER, "import ds", "from deepspeed import initialize\nimport ds", 1, "binds", "above it"
    ),
    "FSDP": Planted(TRAINER, 'deepspeed="ds.json"', 'fsdp="full_shard"', 5, "FSDP takes", "deepspeed="),
    "DDP": Planted(
        OWN_LOOP, "engine.train()", "engine.train(DistributedDataParallel(engine))", 7, "place", "initialize"
    ),
    "checkpointing=False": Planted(TRAINER, "checkpointing=True", "checkpointing=False", 5, *IGNORED),
    "disabled": Planted(TRAINER, "trainer.train()", "trainer.model.gradient_checkpointing_disable()", 7, *IGNORED),
    "eval mode": Planted(OWN_LOOP, "engine.train()", "", 5, "eval mode", "engine.train()"),
    "engine.compile": Planted(OWN_LOOP, "engine.train()", "engine.train(engine.compile())", 7, *COMPILED),
    "model.compile": Planted(OWN_LOOP, "engine.train()", "engine.train(model.compile())", 7, *COMPILED),
    "torch.compile": Planted(OWN_LOOP, "(model=model", "(torch.compile(model), model=model", 6, *COMPILED),
    "torch_compile": Planted(TRAINER, "args=settings", "args=settings, torch_compile=True", 6, *COMPILED),
    "no_sync": Planted(OWN_LOOP, "engine.step()", "engine.no_sync()", 11, "under ZeRO-2", "accumulation_steps"),
    "sampler": Planted(TRAINER, '"out", ', '"out", use_vllm=True, ', 5, "sampler", '"free"', Severity.NOTE),
    "another JSON": Planted(TRAINER, '"ds.json"', '"other.json"', 5, "other.json", "same file", Severity.NOTE),
    "missing": Planted(OWN_LOOP, "import deepspeed", "import no_such_thing", 1, "no_such_thing is not", "pip install"),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, planted: Planted) -> None:
    assert planted.script.count(planted.old) >= 1
    (finding,) = faults(tmp_path, planted.script.replace(planted.old, planted.new, 1))
    at = f":{planted.line}" if planted.line else ""
    assert finding.where == f"{tmp_path / 'train.py'}{at}"
    assert planted.what in finding.what and planted.remedy in finding.remedy
    assert finding.severity is planted.severity


def test_a_script_that_knows_nothing_of_us_may_be_started_by_our_module(tmp_path: Path) -> None:
    foreign = OWN_LOOP.replace("import ds_hilore\n", "").replace("ds_hilore", "deepspeed")
    (finding,) = faults(tmp_path, foreign)
    assert "deepspeed --module ds_hilore train.py" in finding.remedy and finding.severity is Severity.NOTE
    (finding,) = faults(tmp_path, foreign, {"hilore": {}, "zero_optimization": {"stage": 3}})
    assert "no leaf modules" in finding.what


def test_install_after_the_trainer_is_too_late(tmp_path: Path) -> None:
    late = TRAINER.replace("ds_hilore.install()\n", "").replace("trainer.train()", "ds_hilore.install()")
    (finding,) = faults(tmp_path, late)
    assert "after trl.GRPOTrainer in line 5" in finding.what and finding.where.endswith(":6")


def test_what_is_compiled_inside_a_layer_is_no_fault(tmp_path: Path) -> None:
    assert faults(tmp_path, OWN_LOOP.replace("import deepspeed\n", "import torch\nf = torch.compile(print)\n")) == []


def test_budgets_that_look_for_themselves_need_no_warning_of_samplers(tmp_path: Path) -> None:
    sampled = TRAINER.replace('"out", ', '"out", use_vllm=True, ')
    assert faults(tmp_path, sampled, {"hilore": {"memory_budget": "free"}}) == []
    assert faults(tmp_path, sampled.replace("=True, deep", '=True, vllm_mode="server", deep')) == []


def test_imports_that_may_fail_are_passed_by(tmp_path: Path) -> None:
    guarded = "try:\n    import no_such_thing\nexcept ImportError:\n    pass\n" + OWN_LOOP
    assert faults(tmp_path, guarded) == []
    (tmp_path / "beside.py").write_text("")
    assert faults(tmp_path, "import beside\n" + OWN_LOOP) == []


def test_the_command_reads_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER.replace('deepspeed="ds.json"', 'fsdp="full_shard"'))
    assert main(["doctor", "--script", str(script), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["where"] == f"{script}:5"
    script.write_text(TRAINER)
    assert main(["doctor", "--script", str(script)]) == 0
    assert "nothing is wrong with" in capsys.readouterr().out
    script.write_text("def broken(:\n")
    assert main(["doctor", "--script", str(script)]) == 2
    assert "is no Python" in capsys.readouterr().err
    assert main(["doctor", "--script", str(tmp_path / "none.py")]) == 2
    assert "name the file" in capsys.readouterr().err
