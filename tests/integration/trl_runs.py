"""Runs of TRL's GRPOTrainer inside a rank, one after another in one process, and what they log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.word_model import grpo_trainer

#: Of time and memory: what two runs of the same thing do not share.
#: Times, and what only a run with the block has.
NOT_COMPARED = ("time", "runtime", "per_second", "flos", "hilore/")


def forget_trainers() -> None:
    """Accelerate and transformers keep a trainer's settings for the whole process: back to none."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def ds_json(stage: int, block: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Batch sizes and learning rate are left to the trainer."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    if block is not None:
        settings["hilore"] = {"memory_budget": "2x", "planner": {"trial_microbatches": 0}, **block}
    return settings | more


def make_trainer(folder: str, settings: dict[str, Any], lora: bool = True, kind: Any = None, **config: Any) -> Any:
    """A trainer of tiny responses on the word model in `folder`, after forgetting those before it."""
    from trl import GRPOConfig

    forget_trainers()
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": True,
        "learning_rate": 1e-3,
        "seed": 1,
        **config,
    }
    arguments = GRPOConfig(
        output_dir=str(Path(folder) / "out"),
        use_cpu=True,
        bf16=False,
        deepspeed=settings,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    return grpo_trainer(Path(folder) / "model", arguments, lora, kind)


def logged(trainer: Any) -> list[dict[str, float]]:
    """Every figure that each update logged, but for times."""
    steps = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [{k: v for k, v in log.items() if not any(part in k for part in NOT_COMPARED)} for log in steps]
