"""TRL's GRPOTrainer with the block, through its own chunked head: what it logs stays what it is without the block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ds_hilore
from ds_hilore.core.types import Action
from tests.integration import trl_runs
from tests.integration.word_model import save_word_model
from tests.ranks import RankPool

pytest.importorskip("trl", reason="TRL is not installed")
HERE = "tests.integration.test_trl"
UPDATES = 4
LIMIT = 0.05

#: Case -> ZeRO stage, whether LoRA, and settings of GRPOConfig. Two groups of four responses per rank and microbatch.
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "ZeRO-2, LoRA": (2, True, {}),
    "ZeRO-2, all weights, accumulation, reference model": (
        2,
        False,
        {"beta": 0.1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    ),
    "ZeRO-2, LoRA, responses used twice": (
        2,
        True,
        {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4, "loss_type": "grpo"},
    ),
    "ZeRO-2, LoRA, updates across generations": (
        2,
        True,
        {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "beta": 0.1},
    ),
    "ZeRO-3, LoRA": (3, True, {}),
    "ZeRO-3, all weights, no checkpointing asked for": (3, False, {"gradient_checkpointing": False, "beta": 0.1}),
}


def trainer_of(folder: str, case: str, block: dict[str, Any] | None, kind: Any = None, **more: Any) -> Any:
    """For four updates with real sampling. Half of the groups have equal rewards, so rows are dead."""
    stage, lora, settings = CASES[case]
    given = {"per_device_train_batch_size": 8, "max_steps": UPDATES, **settings, **more}
    return trl_runs.make_trainer(folder, trl_runs.ds_json(stage, block), lora=lora, kind=kind, **given)


def trained(folder: str, case: str, block: dict[str, Any] | None) -> dict[str, Any]:
    ds_hilore.install()
    trainer = trainer_of(folder, case, block)
    trainer.train()
    return {"logged": trl_runs.logged(trainer), **state_of(trainer)}


def state_of(trainer: Any) -> dict[str, Any]:
    controller = getattr(trainer.model_wrapped, "hilore", None)
    reference = getattr(trainer, "ref_model", None)
    if controller is None:
        return {"controller": False}
    batch = controller.microbatch
    return {
        "controller": True,
        "stored": controller.plan.count(Action.STORE),
        "pruned": batch.prunes,
        "live": batch.live_share,
        "observed": len(controller.coefficients),
        "announced": batch.facts is not None,
        "reference": hasattr(reference, "hilore"),
    }


def same(ours: dict[str, float], alone: dict[str, float], rel: float) -> list[str]:
    """What differs."""
    assert set(ours) == set(alone)
    return [
        f"{name}: {ours[name]!r} for {alone[name]!r}"
        for name in alone
        if not (math.isclose(ours[name], alone[name], rel_tol=rel, abs_tol=1e-8 if rel else 0.0))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl")
    save_word_model(path / "model")
    return path


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_log_what_trl_alone_logs(ranks: RankPool, folder: Path, case: str) -> None:
    alone = ranks.run(f"{HERE}:trained", folder=str(folder), case=case, block=None)
    ours = ranks.run(f"{HERE}:trained", folder=str(folder), case=case, block={})
    for rank in range(2):
        assert not alone[rank]["controller"]
        seen = ours[rank]
        assert (seen["observed"], seen["announced"], seen["reference"]) == (1, True, False)
        assert len(seen["logged"]) == UPDATES
        assert any(step["grad_norm"] > 0 for step in seen["logged"]), "nothing was learnt, so nothing was compared"
        for step, plain in zip(seen["logged"], alone[rank]["logged"], strict=True):
            assert not same(step, plain, rel=1e-6)
    if case == "ZeRO-2, LoRA":  # rows without an advantage have no gradient here
        assert any(seen["pruned"] and seen["live"] < 1 for seen in ours)


def resumed(folder: str, block: dict[str, Any] | None) -> list[dict[str, float]]:
    """Four updates, the last two of them in another trainer that takes up the checkpoint of the first."""
    ds_hilore.install()
    case, saving = "ZeRO-2, LoRA", {"save_strategy": "steps", "save_steps": 2}
    trainer_of(folder, case, block, max_steps=2, **saving).train()
    trainer = trainer_of(folder, case, block, **saving)
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
    return trl_runs.logged(trainer)


def test_resumed_run_logs_what_trl_alone_logs(ranks: RankPool, folder: Path) -> None:
    alone = ranks.run(f"{HERE}:resumed", folder=str(folder), block=None)
    ours = ranks.run(f"{HERE}:resumed", folder=str(folder), block={})
    for found, plain in zip(ours, alone, strict=True):
        assert [step["step"] for step in found] == [1, 2, 3, 4]
        for step, expected in zip(found, plain, strict=True):
            assert not same(step, expected, rel=1e-6)


def by_subclass(folder: str, case: str) -> dict[str, Any]:
    """HiLoReGRPOTrainer in the place of `install()`; and whether its engine's end is the end of our patches."""
    from trl import GRPOTrainer

    from ds_hilore.integration.trl import HiLoReGRPOTrainer

    ds_hilore.uninstall()
    methods = ("_compute_loss", "_get_per_token_logps_and_entropies")
    before = [GRPOTrainer.__dict__[name] for name in methods]
    trainer = trainer_of(folder, case, {"prune_zero_exposure": False}, kind=HiLoReGRPOTrainer)
    trainer.train()
    seen = {"logged": trl_runs.logged(trainer), **state_of(trainer)}
    led = [GRPOTrainer.__dict__[name] for name in methods]
    ds_hilore.detach(trainer.model_wrapped)
    after = [GRPOTrainer.__dict__[name] for name in methods]
    return seen | {"led": led != before, "given_back": after == before}


def test_one_rank_logs_the_same_bits(one_rank: RankPool, folder: Path) -> None:
    case = "ZeRO-2, LoRA"
    (alone,) = one_rank.run(f"{HERE}:trained", folder=str(folder), case=case, block=None)
    (ours,) = one_rank.run(f"{HERE}:by_subclass", folder=str(folder), case=case)
    assert not alone["controller"]
    assert (ours["stored"], ours["led"], ours["given_back"]) == (3, True, True)
    assert ours["logged"] == alone["logged"]


def within_an_error(folder: str, stage: int) -> dict[str, Any]:
    """Seven updates in which compressed state is calibrated through TRL's head, and every update is audited."""
    ds_hilore.install()
    checks = {"profile": {"calibration_microbatches": 4, "audit_interval": 1}}
    trainer = trl_runs.make_trainer(
        folder,
        trl_runs.ds_json(stage, {"max_gradient_error": LIMIT, **checks}),
        gradient_accumulation_steps=4,
        max_steps=7,
    )
    trainer.train()
    host = trainer.model_wrapped._hilore_host
    return {
        "audits": [audit.measured for audit in host.checks.audits],
        "lines": host.checks.calibration.lines(),
        "exposed": host.controller.learning.exposed is not None,
    }


def test_gradient_errors_are_calibrated_and_audited_through_trls_head(ranks: RankPool, folder: Path) -> None:
    for seen in ranks.run(f"{HERE}:within_an_error", folder=str(folder), stage=3):
        assert seen["exposed"]
        assert seen["audits"] and max(seen["audits"]) < LIMIT
        assert "observations" in seen["lines"][0] and "from 0 observations" not in seen["lines"][0]
