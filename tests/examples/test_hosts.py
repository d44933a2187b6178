"""The examples for TRL, transformers' Trainer and a loop of one's own, as a user starts them but for the model."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration import trl_runs
from tests.integration.word_model import save_word_model
from tests.ranks import ROOT, RankPool

HERE = "tests.examples.test_hosts"
TRAINERS = {
    "trl_grpo": ["--deepspeed", "configs/trl_zero2.json", "--num_generations", "4", "--max_completion_length", "8"],
    "trainer_sft": ["--deepspeed", "configs/trainer_zero2.json"],
}
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


def trainer(name: str, folder: str) -> dict[str, Any]:
    trl_runs.forget_trainers()
    module = importlib.import_module(name)
    arguments = [*TRAINERS[name], *SHORT, "--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm", "True"]
    made = module.main(["--model", f"{folder}/model", "--output_dir", f"{folder}/{name}", *arguments])
    batch = made.model_wrapped.hilore.microbatch
    return {
        "losses": [log["loss"] for log in made.state.log_history if "grad_norm" in log],
        "announced": batch.facts is not None,
        "units": len(batch.ran),
    }


def loop(folder: str) -> list[float]:
    own_loop = importlib.import_module("own_loop")
    config = str(ROOT / "configs/zero2_exact.json")
    short = ["--rounds", "2", "--passes", "2", "--new_tokens", "6"]
    losses: list[float] = own_loop.main(["--model", f"{folder}/model", "--deepspeed_config", config, *short])
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples")
    save_word_model(path / "model")
    return path


def test_own_loop(ranks: RankPool, folder: Path) -> None:
    for losses in ranks.run(f"{HERE}:loop", folder=str(folder)):
        assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer(ranks: RankPool, folder: Path, name: str) -> None:
    if name.startswith("trl"):
        pytest.importorskip("trl", reason="TRL is not installed")
    for seen in ranks.run(f"{HERE}:trainer", name=name, folder=str(folder)):
        assert len(seen["losses"]) == 3 and all(math.isfinite(loss) for loss in seen["losses"])
        assert (seen["announced"], seen["units"]) == (True, 3)
