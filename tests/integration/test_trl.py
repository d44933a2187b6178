"""TRL's GRPOTrainer on two ranks, unchanged but for `install()` and the block: losses and norms stay what they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.word_model import grpo_trainer, save_word_model
from tests.ranks import run_ranks

pytest.importorskip("trl", reason="TRL is not installed")
HERE = "tests.integration.test_trl"
UPDATES = 4


def train(folder: str, stage: int, block: bool) -> dict[str, Any]:
    """Four updates; real sampling, rewards by length, checkpointing on, batch sizes by "auto"."""
    import os

    import ds_hilore
    from ds_hilore.core.types import Action

    if block:
        ds_hilore.install()
    trainer = _trainer(Path(folder), stage, block, rank=int(os.environ["RANK"]))
    trainer.train()
    controller = getattr(trainer.model_wrapped, "hilore", None)
    return {
        "logged": [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log],
        "stored": None if controller is None else controller.plan.count(Action.STORE),
    }


def _trainer(folder: Path, stage: int, block: bool, rank: int) -> Any:
    from trl import GRPOConfig

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    if block:
        settings["hilore"] = {"memory_budget": "2x", "planner": {"trial_microbatches": 0}}
    config = GRPOConfig(
        output_dir=str(folder / f"out{rank}"),
        use_cpu=True,
        bf16=False,
        deepspeed=settings,
        gradient_checkpointing=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=UPDATES,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    return grpo_trainer(folder / "model", config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl")
    save_word_model(path / "model")
    return path


@pytest.mark.parametrize("stage", [2, 3])
def test_losses_and_norms_are_those_of_trl_alone(folder: Path, stage: int) -> None:
    alone = run_ranks(f"{HERE}:train", folder=str(folder), stage=stage, block=False)
    ours = run_ranks(f"{HERE}:train", folder=str(folder), stage=stage, block=True)
    for rank in range(2):
        assert alone[rank]["stored"] is None
        assert ours[rank]["stored"] == 3, "the plan did not take effect"
        assert len(ours[rank]["logged"]) == UPDATES
        assert any(norm > 0 for _, norm in ours[rank]["logged"]), "nothing was learnt, so nothing was compared"
        for (loss, norm), (plain_loss, plain_norm) in zip(ours[rank]["logged"], alone[rank]["logged"], strict=True):
            assert math.isclose(loss, plain_loss, rel_tol=1e-6, abs_tol=1e-8)
            assert math.isclose(norm, plain_norm, rel_tol=2e-6, abs_tol=1e-8)
