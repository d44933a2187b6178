"""omega as this package sees it, for every loss of TRL: what autograd says of TRL's loss at its log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hilore
from ds_hilore.runtime.liveness import by_token
from tests.integration import trl_runs
from tests.integration.word_model import save_word_model
from tests.models import VOCAB
from tests.ranks import RankPool

pytest.importorskip("trl", reason="TRL is not installed")
HERE = "tests.integration.test_trl_coefficients"
ROWS, PROMPT, RESPONSE = 4, 3, 8
ACCUMULATION = 2

#: Case -> what is set on the trainer; "args." on its GRPOConfig, "old" is how far the old policy is away.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in LOSS_TYPES},
    **{
        f"{name}, sequences": {"loss_type": name, "importance_sampling_level": "sequence"}
        for name in ("grpo", "dapo", "luspo", "sapo")
    },
    "two-sided clip": {"loss_type": "dapo", "args.delta": 1.4},
    "off-policy mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    "entropy mask": {"loss_type": "dapo", "top_entropy_quantile": 0.5},
    "KL": {"loss_type": "grpo", "beta": 0.2, "args.use_bias_correction_kl": False},
    "KL by the ratio": {"loss_type": "grpo", "beta": 0.2, "args.use_bias_correction_kl": True},
    "KL by the ratio of sequences": {
        "loss_type": "dapo",
        "beta": 0.2,
        "args.use_bias_correction_kl": True,
        "importance_sampling_level": "sequence",
    },
    "weights of the rollout": {
        "loss_type": "dapo",
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
    },
    "weights of the rollout, VESPO": {
        "loss_type": "vespo",
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
    },
    "tools": {"loss_type": "dapo", "tools": True},
}


def microbatch(trainer: Any, old: float, tools: bool = False) -> dict[str, Any]:
    """One microbatch as TRL hands it to its loss. Row 1 has advantage 0, row 3 weight 0."""
    made = torch.Generator().manual_seed(7 + trainer.accelerator.process_index)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, RESPONSE, generator=made)

    lengths = torch.tensor([[8], [5], [3], [6]])
    mask = (torch.arange(RESPONSE) < lengths).long()
    inputs: dict[str, Any] = {
        "prompt_ids": torch.randint(2, VOCAB, (ROWS, PROMPT), generator=made),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(2, VOCAB, (ROWS, RESPONSE), generator=made),
        "completion_mask": mask,
        "advantages": torch.tensor([1.2, 0.0, -0.7, -0.5]),
        "num_items_in_batch": torch.tensor(2 * 40.0),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = torch.tensor([[1.0], [0.8], [1.3], [0.0]])
    if tools:
        inputs["tool_mask"] = torch.ones_like(mask).index_fill_(1, torch.tensor([1]), 0)
    logps = logps_of(trainer, inputs)
    inputs["ref_per_token_logps"] = logps + noise(0.3)
    inputs["sampling_per_token_logps"] = logps + noise(0.3)
    if old > 0:
        inputs["old_per_token_logps"] = logps + noise(old)
    return inputs


def logps_of(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logps: Tensor = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attended, RESPONSE)[0]
    return logps


def by_autograd(trainer: Any, engine: Any, inputs: dict[str, Any]) -> Tensor:
    """The gradient of TRL's loss at log-probabilities that are leaves, over the ranks that average it."""
    compute = type(trainer)._get_per_token_logps_and_entropies
    leaves = logps_of(trainer, inputs).requires_grad_()

    def given(model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            _, *rest = compute(trainer, trainer.model, *args, **kwargs)
        return (leaves, *rest)

    trainer._get_per_token_logps_and_entropies = given
    try:
        (gradient,) = torch.autograd.grad(trainer._compute_loss(None, inputs), leaves)
    finally:
        del trainer._get_per_token_logps_and_entropies
    return gradient / engine.dp_world_size


def setting(trainer: Any, name: str, value: Any) -> tuple[Any, str, Any]:
    owner = trainer.args if name.startswith("args.") else trainer
    return owner, name.removeprefix("args."), value


def seen_in(trainer: Any, engine: Any, changes: dict[str, Any], old: float) -> dict[str, Any]:
    """omega as observed, as autograd has it, and as foreseen."""
    tools = changes.get("tools", False)
    wanted = [setting(trainer, name, value) for name, value in changes.items() if name != "tools"]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    for owner, name, value in wanted:
        setattr(owner, name, value)
    inputs = microbatch(trainer, old, tools)
    controller = engine.hilore
    with torch.enable_grad():
        expected = by_autograd(trainer, engine, inputs)
        loss = trainer._compute_loss(engine, inputs)
        trainer.accelerator.backward(loss, scale_wrt_gas=False)  # as Trainer.training_step does
    batch = controller.microbatch
    (found,) = batch.coefficients
    for owner, name, value in before:
        setattr(owner, name, value)
    return {
        "omega": found.omega,
        "autograd": expected,
        "mask": found.mask,
        "exact_only": batch.exact_only,
        "foreseen": foreseen(batch.facts),
    }


def foreseen(facts: Any) -> Tensor:
    """[B, T] |omega| as announced."""
    weights = 1.0 if facts.weights is None else facts.weights
    return (facts.mask != 0) * by_token(facts.advantages.abs()) * weights / facts.num_tokens


def observed(folder: str, stage: int) -> dict[str, Any]:
    """Every case, on the engine that a first update has made."""
    ds_hilore.install()
    trainer = trl_runs.make_trainer(
        folder, trl_runs.ds_json(stage, {}), gradient_accumulation_steps=ACCUMULATION, max_steps=1
    )
    trainer.train()
    engine = trainer.model_wrapped
    engine.train()
    away = {name: seen_in(trainer, engine, changes, 0.3) for name, changes in CASES.items()}
    first = {name: seen_in(trainer, engine, CASES[name], 0.0) for name in FIRST_PASS}
    bonus = seen_in(trainer, engine, {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}, 0.3)
    return {"away": away, "first": first, "bonus": bonus}


FIRST_PASS = [*LOSS_TYPES, "luspo, sequences", "grpo, sequences", "weights of the rollout", "tools"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("coefficients")
    save_word_model(folder / "model")
    with RankPool(2) as pool:
        yield pool.run(f"{HERE}:observed", folder=str(folder), stage=2)


@pytest.mark.parametrize("name", CASES)
def test_omega_is_autograds(results: list[dict[str, Any]], name: str) -> None:
    for seen in (each["away"][name] for each in results):
        assert seen["autograd"].abs().sum() > 0
        assert not seen["autograd"][seen["mask"] == 0].any()
        torch.testing.assert_close(seen["omega"], seen["autograd"], rtol=1e-5, atol=1e-9)
        assert not seen["exact_only"]


@pytest.mark.parametrize("name", FIRST_PASS)
def test_omega_is_foreseen_where_ratios_are_one(results: list[dict[str, Any]], name: str) -> None:
    """So the announcement divides as TRL does, and knows rows that the rollout's weights put out."""
    for seen in (each["first"][name] for each in results):
        torch.testing.assert_close(seen["foreseen"], seen["omega"].abs(), rtol=1e-4, atol=1e-9)


def test_an_entropy_bonus_allows_exact_actions_only(results: list[dict[str, Any]]) -> None:
    for seen in (each["bonus"] for each in results):
        assert seen["exact_only"]
        torch.testing.assert_close(seen["omega"], seen["autograd"], rtol=1e-5, atol=1e-9)
