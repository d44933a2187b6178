"""Every JSON of configs/ starts a job of two ranks and is in force in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hilore.core.budget import RankBudgets, parse_budget
from tests.integration import pipelines
from tests.integration.word_model import grpo_trainer, save_word_model
from tests.models import batch, llama, lora, plain_loss
from tests.ranks import ROOT, RankPool, run_ranks

HERE = "tests.integration.test_configs"
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.json"))}

#: JSONs with "auto" values, by what fills them.
BY_TRAINER = [name for name in CONFIGS if name.startswith("trainer_")]
BY_TRL = [name for name in CONFIGS if name.startswith("trl_")]
FOR_PIPELINES = [name for name in CONFIGS if name.startswith("pipeline_")]
FOR_MEGATRON = [name for name in CONFIGS if name.startswith("megatron_")]  # started by test_megatron.py
FOR_ENGINES = [name for name in CONFIGS if name not in (*BY_TRAINER, *BY_TRL, *FOR_PIPELINES, *FOR_MEGATRON)]


def test_only_those_of_trainers_leave_values_open() -> None:
    assert BY_TRAINER and BY_TRL and FOR_ENGINES and FOR_PIPELINES
    for name, path in CONFIGS.items():
        assert ('"auto"' in path.read_text(encoding="utf-8")) == (name in (*BY_TRAINER, *BY_TRL))


def given_budget(name: str, rank: int) -> Any:
    """What the JSON gives this rank, as a report would write it."""
    budget = parse_budget(json.loads(CONFIGS[name].read_text(encoding="utf-8"))["hilore"]["memory_budget"])
    return (budget.for_rank(rank, 2) if isinstance(budget, RankBudgets) else budget).as_json()


# ------------------------------------------------------------------------------------------ engines


def run_engine(name: str) -> dict[str, Any]:
    """Two updates, the second of which measures what "1.0x" means."""
    import ds_hilore

    model = lora(llama())
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=trainable, config=str(CONFIGS[name]))
    before = trainable[0].detach().clone()
    losses = []
    for number in range(2 * engine.gradient_accumulation_steps()):
        loss = plain_loss(engine, *batch(seed=number, rows=engine.train_micro_batch_size_per_gpu()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    seen = {
        "losses": losses,
        "stage": engine.zero_optimization_stage(),
        "measured": engine.hilore.stage.value,
        "units": len(engine.hilore.microbatch.ran),
        "budget": engine.hilore.parts.planner.budget.as_json(),
        "moved": before.numel() != trainable[0].numel() or not before.equal(trainable[0].detach()),
    }
    ds_hilore.detach(engine)
    return seen


@pytest.mark.parametrize("name", FOR_ENGINES)
def test_engine(ranks: RankPool, name: str) -> None:
    ds = json.loads(CONFIGS[name].read_text(encoding="utf-8"))
    for rank, seen in enumerate(ranks.run(f"{HERE}:run_engine", name=name)):
        assert all(math.isfinite(loss) for loss in seen["losses"]) and len(seen["losses"]) == 4
        assert seen["stage"] == ds["zero_optimization"]["stage"]
        assert (seen["units"], seen["measured"], seen["moved"]) == (3, "measure_h", True)
        assert seen["budget"] == given_budget(name, rank)


def run_pipeline(name: str) -> dict[str, Any]:
    """Two updates of a pipeline of two stages."""
    module = pipelines.build(2)
    engine = pipelines.start(module, json.loads(CONFIGS[name].read_text(encoding="utf-8")))
    rows = engine.train_micro_batch_size_per_gpu()
    losses = [pipelines.update(engine, number, rows=rows)[1] for number in range(2)]
    return {
        "losses": losses,
        "stage": engine.zero_optimization_stage(),
        "measured": engine.hilore.stage.value,
        "units": len(engine.hilore.microbatch.ran),
        "microbatches": engine.micro_batches,
        "budget": engine.hilore.parts.planner.budget.as_json(),
    }


@pytest.mark.parametrize("name", FOR_PIPELINES)
def test_pipeline(ranks: RankPool, name: str) -> None:
    ds = json.loads(CONFIGS[name].read_text(encoding="utf-8"))
    for rank, seen in enumerate(ranks.run(f"{HERE}:run_pipeline", name=name)):
        assert all(math.isfinite(loss) for loss in seen["losses"])
        assert seen["stage"] == ds["zero_optimization"]["stage"]
        assert (seen["measured"], seen["microbatches"]) == ("measure_h", ds["gradient_accumulation_steps"])
        assert seen["units"] == (4 if rank == 0 else 2)  # the embedding is one, the tied head is no module of its stage
        assert seen["budget"] == given_budget(name, rank)


# ------------------------------------------------------------------------------------------ trainers


def run_trainer(name: str, folder: str) -> dict[str, Any]:
    import os

    import ds_hilore

    ds_hilore.install()
    make: Callable[..., Any] = _sft if name in BY_TRAINER else _grpo
    trainer = make(Path(folder), str(CONFIGS[name]), f"out-{name}-{os.environ['RANK']}")
    trainer.train()
    engine = trainer.model_wrapped
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "grad_norm" in log],
        "stage": engine.zero_optimization_stage(),
        "units": len(engine.hilore.microbatch.ran),
        "budget": engine.hilore.parts.planner.budget.as_json(),
    }


_COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def _sft(folder: Path, config: str, out: str) -> Any:
    """transformers' Trainer on next tokens."""
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = batch(seed=index, rows=1)[0][0]
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(output_dir=str(folder / out), deepspeed=config, **_COMMON)
    return Trainer(model=lora(llama()), args=arguments, train_dataset=Rows())


def _grpo(folder: Path, config: str, out: str) -> Any:
    from trl import GRPOConfig

    lengths = {"num_generations": 4, "max_completion_length": 8}
    arguments = GRPOConfig(output_dir=str(folder / out), deepspeed=config, **lengths, **_COMMON)
    return grpo_trainer(folder / "model", arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainers")
    save_word_model(path / "model")
    return path


@pytest.mark.parametrize("name", [*BY_TRAINER, *BY_TRL])
def test_trainer(folder: Path, name: str) -> None:
    if name in BY_TRL:
        pytest.importorskip("trl", reason="TRL is not installed")
    ds = json.loads(CONFIGS[name].read_text(encoding="utf-8"))
    # Processes of its own: a trainer's state is the process's.
    for rank, seen in enumerate(run_ranks(f"{HERE}:run_trainer", name=name, folder=str(folder))):
        assert len(seen["losses"]) == 2 and all(math.isfinite(loss) for loss in seen["losses"])
        assert (seen["stage"], seen["units"]) == (ds["zero_optimization"]["stage"], 3)
        assert seen["budget"] == given_budget(name, rank)
