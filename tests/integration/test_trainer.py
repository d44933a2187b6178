"""transformers' Trainer with the block: gradients and logs stay; coefficients of its plain loss; what launchers set."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.runtime.update import Source
from tests.engines import before_each_step, difference
from tests.integration import trl_runs
from tests.models import VOCAB, llama, lora
from tests.ranks import RankPool

HERE = "tests.integration.test_trainer"
TOKENS = 24
UPDATES = 10


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Prompts without labels, answers of different lengths, padding on the right."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(index)
        ids = torch.randint(2, VOCAB, (TOKENS,), generator=made)
        end = int(torch.randint(6, TOKENS, (1,), generator=made))
        place = torch.arange(TOKENS)
        return {
            "input_ids": ids.masked_fill(place >= end, 0),
            "labels": ids.masked_fill((place < 4) | (place >= end), -100),
            "attention_mask": (place < end).long(),
        }


def make_trainer(folder: str, deepspeed: Any, kind: Any = None, model: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    trl_runs.forget_trainers()
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "max_steps": UPDATES,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        **arguments,
    }
    settings = TrainingArguments(
        output_dir=str(Path(folder) / "out"),
        use_cpu=True,
        bf16=False,
        deepspeed=deepspeed,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    return (kind or Trainer)(model=model or lora(llama()), args=settings, train_dataset=Rows())


# ------------------------------------------------------------------------------------------------ gradients and logs

#: ZeRO stage, and whether the script asks for checkpointing: under the block that makes no difference.
CASES = {"ZeRO-2": (2, True), "ZeRO-3, not asked to checkpoint": (3, False)}
BLOCK = {"memory_budget": ["1.0x", "1000x"], "prune_zero_exposure": False}


def watch(trainer: Any) -> Any:
    """Notes the reduced gradients of every update in `gradients`, and lets plans be solved between updates."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.gradients: list[dict[str, Tensor]] = []
            self._stack = ExitStack()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.gradients = self._stack.enter_context(before_each_step(trainer.model_wrapped))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            controller = getattr(trainer.model_wrapped, "hilore", None)
            if controller is not None:
                controller.parts.planner.wait(60)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._stack.close()

    watching = Watch()
    trainer.add_callback(watching)
    return watching


def trained(folder: str, case: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """Ten updates; without the block, of a model that checkpoints nothing."""
    ds_hilore.install()
    stage, checkpoints = CASES[case]
    trainer = make_trainer(
        folder,
        trl_runs.ds_json(stage, block),
        gradient_checkpointing=block is not None and checkpoints,
        learning_rate=1e-4,
    )
    watching = watch(trainer)
    trainer.train()
    controller = getattr(trainer.model_wrapped, "hilore", None)
    steps = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "gradients": watching.gradients,
        "logged": trl_runs.logged(trainer),
        "metrics": [{name: log[name] for name in log if name.startswith("hilore/")} for log in steps],
        "elsewhere": [
            name for log in trainer.state.log_history if log not in steps for name in log if "hilore" in name
        ],
        "stored": None if controller is None else list(controller.microbatch.ran.values()).count(Action.STORE),
        "announced": controller is not None and controller.microbatch.facts is not None,
    }


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_logs_are_those_of_the_trainer_without_checkpointing(
    ranks: RankPool, tmp_path: Path, case: str
) -> None:
    alone = ranks.run(f"{HERE}:trained", folder=str(tmp_path), case=case, block=None)
    ours = ranks.run(f"{HERE}:trained", folder=str(tmp_path), case=case, block=BLOCK)
    for seen, plain in zip(ours, alone, strict=True):
        assert (plain["stored"], seen["announced"]) == (None, True)
        assert len(seen["gradients"]) == len(plain["gradients"]) == UPDATES
        for found, expected in zip(seen["gradients"], plain["gradients"], strict=True):
            assert difference(found, expected) < 1e-6
            assert any(value.abs().sum() > 0 for value in expected.values())
        for step, expected in zip(seen["logged"], plain["logged"], strict=True):
            assert set(step) == set(expected)
            assert all(math.isclose(step[name], expected[name], rel_tol=1e-6) for name in expected), (step, expected)
        metrics = seen["metrics"]
        assert [step["hilore/stored_units"] + step["hilore/replayed_units"] for step in metrics] == [3] * UPDATES
        assert metrics[-1]["hilore/stored_units"] == seen["stored"] and metrics[-1]["hilore/budget_bytes"] > 0
        assert not any(plain["metrics"]) and seen["elsewhere"] == []
    tight, roomy = ours  # every rank plans for itself
    assert tight["stored"] < roomy["stored"] == 3


# ------------------------------------------------------------------------------------------------ coefficients


def plain_losses(folder: str, average: bool) -> dict[str, list[Any]]:
    """The loss of each microbatch as the Trainer differentiates it, and as omega and log-probabilities make it."""
    ds_hilore.install()
    block = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 4, "audit_interval": 0}}
    trainer = make_trainer(
        folder, trl_runs.ds_json(2, block), max_steps=2, average_tokens_across_devices=average, logging_steps=1
    )
    seen: dict[str, list[Any]] = {"loss": [], "by_omega": [], "sources": [], "exposed": []}
    batches: list[dict[str, Tensor]] = []
    backward, prepare = trainer.accelerator.backward, trainer._prepare_inputs

    def prepared(inputs: Any) -> Any:
        batches.append(prepare(inputs))
        return batches[-1]

    def noted(loss: Tensor, **kwargs: Any) -> None:
        controller = trainer.model_wrapped.hilore
        (found,) = controller.coefficients
        ids = batches[-1]["input_ids"]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=batches[-1]["attention_mask"]).logits
        logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        seen["loss"].append(float(loss.detach()))
        seen["by_omega"].append(float((found.omega * logps).sum()) * trainer.accelerator.num_processes)
        seen["sources"].append(found.source)
        backward(loss, **kwargs)
        seen["exposed"].append(controller.learning.exposed is not None)

    trainer.accelerator.backward, trainer._prepare_inputs = noted, prepared
    trainer.train()
    return seen


@pytest.mark.parametrize("average", [True, False])
def test_coefficients_make_the_loss(ranks: RankPool, tmp_path: Path, average: bool) -> None:
    """loss = ranks * sum of omega * logp: divided as the Trainer divides, over the update and over ranks."""
    for seen in ranks.run(f"{HERE}:plain_losses", folder=str(tmp_path), average=average):
        assert len(seen["loss"]) == 4
        assert seen["sources"] == [Source.FORMULA] * 4
        assert all(seen["exposed"])
        assert seen["by_omega"] == pytest.approx(seen["loss"], rel=1e-5)


def other_losses(folder: str) -> dict[str, tuple[bool, int]]:
    """Losses that omega is not known of: whether plans are kept exact, and how many coefficients were told."""
    from transformers import Trainer

    class Penalised(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    def own(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.float().square().mean()

    ds_hilore.install()
    kinds: dict[str, dict[str, Any]] = {
        "subclass": {"kind": Penalised},
        "smoothing": {"label_smoothing_factor": 0.1},
        "router": {"model": mixtral()},
    }
    found = {}
    for name, given in kinds.items():
        trainer = make_trainer(folder, trl_runs.ds_json(2, {"max_gradient_error": 0.01}), max_steps=1, **given)
        trainer.train()
        batch = trainer.model_wrapped.hilore.microbatch
        found[name] = batch.exact_only, len(batch.coefficients)
    trainer = make_trainer(folder, trl_runs.ds_json(2, {"max_gradient_error": 0.01}), max_steps=1)
    trainer.compute_loss_func = own
    trainer.train()
    batch = trainer.model_wrapped.hilore.microbatch
    return found | {"function": (batch.exact_only, len(batch.coefficients))}


def mixtral() -> Any:
    from tests import models

    return models.mixtral()


def test_losses_that_are_not_plain_run_exactly(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(f"{HERE}:other_losses", folder=str(tmp_path)):
        assert found == dict.fromkeys(["subclass", "smoothing", "router", "function"], (True, 0))


# ------------------------------------------------------------------------------------------------ accumulation


@contextmanager
def accelerate_launch(config: Path) -> Iterator[None]:
    """What `accelerate launch --use_deepspeed --deepspeed_config_file` leaves in the environment."""
    given = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


@contextmanager
def lines_of(name: str) -> Iterator[list[str]]:
    """What is logged inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)


def launched(folder: str, json_steps: int, script_steps: int) -> dict[str, Any]:
    """A run whose JSON comes from accelerate's launcher, with explicit sizes; the script then changes its mind."""
    ds_hilore.install()
    config = Path(folder) / f"ds{os.environ['RANK']}.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": json_steps}
    settings = trl_runs.ds_json(2, {}, **sizes)
    settings["optimizer"]["params"]["lr"] = 1e-3
    config.write_text(json.dumps(settings))
    trl_runs.forget_trainers()
    with accelerate_launch(config), lines_of("ds_hilore") as lines:
        trainer = make_trainer(folder, None, gradient_accumulation_steps=json_steps, max_steps=2)
        trainer.args.gradient_accumulation_steps = script_steps
        trainer.train()
    controller = trainer.model_wrapped.hilore
    return {
        "lines": [line for line in lines if "accumulation" in line],
        "updates": controller.update,
        "expected": controller.learning.risk.rules.microbatches,
    }


@pytest.mark.parametrize(("json_steps", "script_steps"), [(1, 2), (2, 2)])
def test_accumulation_of_script_and_json(ranks: RankPool, tmp_path: Path, json_steps: int, script_steps: int) -> None:
    """transformers refuses numbers that differ when arguments are made; later it counts by the script's."""
    given = {"folder": str(tmp_path), "json_steps": json_steps, "script_steps": script_steps}
    first, second = ranks.run(f"{HERE}:launched", **given)
    said = f"is {json_steps} in the DeepSpeed JSON and {script_steps} in the script; the script's is in force"
    differ = json_steps != script_steps
    assert (first["lines"], second["lines"]) == ([f"hilore: gradient accumulation {said}"] if differ else [], [])
    for seen in (first, second):
        assert (seen["updates"], seen["expected"]) == (2, script_steps)
