"""The examples for TRL, transformers' Trainer and a loop of one's own, as a user starts them but for the model."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration import trl_runs
from tests.integration.word_model import save_word_model
from tests.launch import jobs
from tests.ranks import ROOT, RankPool

HERE = "tests.examples.test_hosts"
SHORT = [
    "--use_cpu",
    "--bf16",
    "False",
    "--max_steps",
    "3",
    "--per_device_train_batch_size",
    "4",
    "--report_to",
    "none",
]
QUIET = ["--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm", "True"]


def sft(folder: str) -> dict[str, Any]:
    trl_runs.forget_trainers()
    example = importlib.import_module("trainer_sft")
    arguments = ["--deepspeed", str(ROOT / "configs/trainer_zero2.json"), *SHORT, *QUIET]
    made = example.main(["--model", f"{folder}/model", "--output_dir", f"{folder}/sft", *arguments])
    batch = made.model_wrapped.hilore.microbatch
    return {
        "losses": [log["loss"] for log in made.state.log_history if "grad_norm" in log],
        "announced": batch.facts is not None,
        "units": len(batch.ran),
    }


def loop(folder: str) -> tuple[list[float], int]:
    """Losses, and units that the last update's microbatches ran."""
    own_loop = importlib.import_module("own_loop")
    train_on, units = own_loop.train_on, []

    def watched(engine: Any, *arguments: Any) -> Any:
        losses = train_on(engine, *arguments)
        units.append(len(engine.hilore.microbatch.ran))
        return losses

    own_loop.train_on = watched
    config = str(ROOT / "configs/zero2_exact.json")
    short = ["--rounds", "2", "--passes", "2", "--new_tokens", "6"]
    losses: list[float] = own_loop.main(["--model", f"{folder}/model", "--deepspeed_config", config, *short])
    return losses, units[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples")
    save_word_model(path / "model")
    return path


def test_own_loop(ranks: RankPool, folder: Path) -> None:
    for losses, units in ranks.run(f"{HERE}:loop", folder=str(folder)):
        assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
        assert units == 3


def test_transformers_trainer(ranks: RankPool, folder: Path) -> None:
    for seen in ranks.run(f"{HERE}:sft", folder=str(folder)):
        assert len(seen["losses"]) == 3 and all(math.isfinite(loss) for loss in seen["losses"])
        assert (seen["announced"], seen["units"]) == (True, 3)


def test_trl_by_its_command(folder: Path) -> None:
    """Nothing has met before the trainer is made: under ZeRO-3 that is when the model is."""
    pytest.importorskip("trl", reason="TRL is not installed")
    env = jobs.environment(PYTHONPATH=str(ROOT))
    command = ["deepspeed", "--num_gpus", "2", "--master_port", env["MASTER_PORT"], "examples/trl_grpo.py"]
    arguments = ["--model", f"{folder}/model", "--output_dir", f"{folder}/trl", *SHORT, *QUIET]
    lengths = ["--num_generations", "4", "--max_completion_length", "8"]
    output = jobs.run([*command, *arguments, *lengths, "--deepspeed", "configs/trl_zero3.json"], env)
    assert output.count("'grad_norm'") == 3, output[-4000:]
