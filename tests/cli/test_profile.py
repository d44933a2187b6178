"""`hilore profile`: what it measures is stored, said, and taken over by a run of the user's own."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hilore.cli.main import main
from ds_hilore.core.types import Shape
from ds_hilore.integration.outlook import Training
from ds_hilore.integration.rehearsal import Rehearsal, Subject, rehearsed_json
from tests.ranks import RankPool

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
DS: dict[str, Any] = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "csv_monitor": {"enabled": True, "output_path": "csv"},
    "hilore": {"memory_budget": "1.5x", "profile": {"path": "profiles"}},
}
COMMAND = ["profile", "--config", "ds.json", "--model", "model", "--tokens", "2", "32"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path / "model")
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    return tmp_path


def users_engine(folder: Path) -> Any:
    """As a user's script has it, with adapters like those that are the command's default."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_hilore

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    model.config.use_cache = False
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = {**DS, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    settings["optimizer"]["params"]["torch_adam"] = True
    for name in ("train_batch_size", "gradient_clipping", "scheduler", "csv_monitor"):
        del settings[name]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=trained, config=settings)
    return engine


def test_what_is_measured_is_stored_and_taken_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (stored,) = found["stored"]
    assert Path(stored).parent == Path("profiles") and Path(stored).is_file()
    assert [path.name for path in (here / "profiles").iterdir()] == [Path(stored).name]
    assert not (here / "csv").exists()
    variants = {row["variant"]: row for row in found["units"]}
    assert {"R", "H"} <= set(variants) | {strike["variant"] for strike in found["struck_out"]}
    assert variants["R"]["count"] == 3 and variants["R"]["unit_class"] == "LlamaDecoderLayer"
    assert variants["R"]["saved_seconds"] == 0 < variants["R"]["replay_seconds"] < found["update_seconds"]
    if "H" in variants:
        assert variants["H"]["held_bytes"] > variants["R"]["held_bytes"] == 2 * 32 * 32 * 4
    assert found["budget_bytes"] == int(1.5 * found["replayed_peak_bytes"])
    assert found["update"] == {
        "model": "model",
        "segments": 2,
        "length": 32,
        "microbatches": 1,
        "zero_stage": 2,
        "world_size": 1,
        "device": "cpu",
        "trained": "adapters",
    }
    engine = users_engine(here)
    assert engine.hilore.learning.known
    of_layers = engine.hilore.measurements.classes["LlamaDecoderLayer"]
    assert of_layers.state.count > 0 and len(engine.hilore.measurements.roster) == 3


def on_every_rank(folder: str) -> tuple[int, str]:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*COMMAND, "--json"])
    return code, printed.getvalue()


def test_ranks_measure_together(here: Path, ranks: RankPool) -> None:
    """Under a launcher: one profile for all, a calibration of each, and the first rank speaks."""
    calibrated = {"path": "profiles", "calibration_microbatches": 2}
    (here / "ds.json").write_text(json.dumps({**DS, "hilore": {"max_gradient_error": 0.02, "profile": calibrated}}))
    (first, printed), (second, silence) = ranks.run("tests.cli.test_profile:on_every_rank", folder=str(here))
    assert (first, second, silence) == (0, 0, "")
    found = json.loads(printed)
    assert found["update"]["world_size"] == 2
    names = {path.name.split("-", 2)[2] for path in (here / "profiles").iterdir()}
    assert names == {f"bf16__int8-{part}.json" for part in ("all", "calibration-rank0", "calibration-rank1")}
    assert sorted(found["stored"]) == [f"profiles/{path.name}" for path in sorted((here / "profiles").iterdir())]


def test_people_are_told_where_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**DS, "hilore": {}, "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}
    (here / "ds.json").write_text(json.dumps(settings))
    assert main([*COMMAND, "--full-finetuning", "--whole-logits"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("3 LlamaDecoderLayer", "ZeRO-3 on 1 rank; 2 x (2 x 32)", "weights are random", "not stored: add"):
        assert words in printed
    assert not (here / "profiles").exists()


@pytest.mark.parametrize(
    ("options", "ds", "code", "says"),
    [
        (["--tokens", "0", "32"], {}, 2, "--tokens 0 32"),
        (["--model", "nowhere"], {}, 2, "name its folder"),
        (["--lora-targets", "no_such_layer"], {}, 2, "no_such_layer"),
        ([], {"hilore": {"profile": {"path": "model/config.json"}}}, 2, "name a folder that can be written to"),
        ([], {"hilore": {"memory_budgt": 1}}, 2, "did you mean"),
        ([], {"fp16": {"enabled": True}}, 2, "fp16 does not run on CPU"),
        ([], {"optimizer": {"type": "NoSuchOptimizer"}}, 2, "DeepSpeed makes no engine of this JSON"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    here: Path, capsys: pytest.CaptureFixture[str], options: list[str], ds: dict[str, Any], code: int, says: str
) -> None:
    (here / "ds.json").write_text(json.dumps({**DS, **ds}))
    assert main([*COMMAND, *options]) == code
    said = capsys.readouterr()
    assert says in " ".join(said.err.split()) and not said.out


def test_a_microbatch_that_does_not_fit(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Rehearsal) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(Rehearsal, "update", fails)
    assert main(COMMAND) == 3
    said = capsys.readouterr().err
    assert "does not fit on this device" in said and "smaller --tokens" in said and "Traceback" not in said
    assert list((here / "profiles").iterdir()) == []


@pytest.mark.parametrize("random_weights", [False, True])
def test_weights_are_read_where_they_are(here: Path, random_weights: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    model.save_pretrained("model")
    training = Training(Shape(2, 8), lora=None)
    rehearsal = Rehearsal(Subject("model/config.json", {"hilore": {}}, training, random_weights=random_weights))
    found = dict(rehearsal.engine.module.named_parameters())
    same = all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
    assert same is not random_weights
    assert ("weights are random" if random_weights else "weights are the model's own") in rehearsal.notes
    before = {name: parameter.clone() for name, parameter in found.items()}
    for _ in range(2):
        rehearsal.update()
    assert all(torch.equal(before[name], parameter) for name, parameter in found.items())


def test_the_json_that_is_rehearsed() -> None:
    ds = {**DS, "hilore": {"enabled": False, "memory_budget": ["1.2x", "1.3x"], "profile": {"audit_interval": 7}}}
    before = json.dumps(ds)
    training = Training(Shape(4, 8))
    found, notes = rehearsed_json(Subject("m", ds, training, profile_folder=Path("p")), 32, torch.device("cpu"))
    assert json.dumps(ds) == before
    assert "auto" not in json.dumps(found)
    assert not {"csv_monitor", "scheduler", "train_batch_size", "gradient_clipping"} & set(found)
    assert found["optimizer"]["params"] == {"lr": 0.0, "weight_decay": 0.1, "torch_adam": True}
    assert found["train_micro_batch_size_per_gpu"] == 4
    profile = {"audit_interval": 7, "path": "p"}
    assert found["hilore"] == {"memory_budget": "1.2x", "profile": profile, "selfcheck": {"updates": 0}}
    assert any('no "hilore" block that is enabled' in note for note in notes)
    assert any("rank 0's is rehearsed" in note for note in notes)
