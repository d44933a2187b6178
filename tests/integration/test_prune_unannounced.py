"""Pruned replays on two ranks where the loss, or the loop, is not what was announced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.objective.grpo import GRPOLossConfig
from tests.engines import config, difference
from tests.integration import updates
from tests.integration.test_prune import Sample, Watch, logps_of, policy_loss, sample, update
from tests.models import FAMILIES, decoder_layers, lora
from tests.ranks import RankPool

HERE = "tests.integration.test_prune_unannounced"


def kl_loss(made: Any, batch: Sample) -> Tensor:
    """grpo_loss with beta > 0: a row without an advantage carries a KL gradient."""
    logps, _ = logps_of(made, batch)
    old, reference = logps.detach() + 0.1, logps.detach() - 0.2
    settings = GRPOLossConfig(beta=0.1)
    return ds_hilore.grpo_loss(
        logps, old, batch.advantages, batch.mask, 50, config=settings, ref_logps=reference, engine=made
    )


def entropy_loss(made: Any, batch: Sample) -> Tensor:
    """A bonus on the entropy of all positions, padding included."""
    logps, output = logps_of(made, batch)
    probabilities = output.logits.float().softmax(-1)
    entropy = -(probabilities * (probabilities + 1e-9).log()).sum(-1)
    return -(logps * batch.advantages * batch.mask).sum() / 50 - 0.01 * entropy.mean()


def hidden_loss(made: Any, batch: Sample) -> Tensor:
    """A term on the hidden states between two units, in row 1 only: announced as dead on rank 0."""
    output = made(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
    logps = output.logits[:, :-1].float().log_softmax(-1).gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    return -(logps * batch.advantages * batch.mask).sum() / 50 + output.hidden_states[2][1].square().mean()


def wrong_loss(made: Any, batch: Sample) -> Tensor:
    """Optimises the rows that were announced as dead, and no others."""
    logps, _ = logps_of(made, batch)
    return -(logps * (batch.advantages == 0) * batch.mask).sum() / 50


LOSSES = {"beta": kl_loss, "entropy": entropy_loss, "hidden": hidden_loss, "wrong": wrong_loss}


def unannounced(stage: int, loss: str) -> Any:
    reference, ours = updates.pair(updates.build, config(stage, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch.on(patch)
        for number in range(3):
            expected = update(reference, number, LOSSES[loss])
            errors.append(difference(expected, update(ours, number, LOSSES[loss])))
    return {
        "errors": errors,
        "shares": watch.shares,
        "spares": ours.hilore.pruner.spares_zero_advantages,
        "reads": ours.hilore.pruner.reads,
    }


@pytest.mark.parametrize(("loss", "stage"), [("beta", 2), ("entropy", 3), ("hidden", 2), ("hidden", 3), ("wrong", 3)])
def test_gradients_that_nobody_announced(ranks: RankPool, loss: str, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:unannounced", stage=stage, loss=loss):
        assert max(seen["errors"]) < 1e-6
        assert seen["shares"]  # at least the first update pruned, on what was announced
        if loss in ("beta", "entropy"):  # seen once: such rows are live, whatever their advantage
            assert not seen["spares"]
            assert min(seen["shares"]) > 0.75


def mixture(stage: int) -> Any:
    """A mixture of experts whose router is part of the loss."""
    reference, ours = updates.pair(lambda: updates.build("mixtral"), config(stage, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)

    def loss(made: Any, batch: Sample) -> Tensor:
        logps, output = logps_of(made, batch)
        routers = sum(logits.float().square().mean() for logits in output.router_logits)
        return -(logps * batch.advantages * batch.mask).sum() / 50 + 0.01 * routers

    errors = [difference(update(reference, n, loss), update(ours, n, loss)) for n in range(2)]
    return {"errors": errors, "refused": [refusal.reason.name for refusal in ours.hilore.pruner.refused.values()]}


@pytest.mark.parametrize("stage", [3])
def test_a_router_is_not_pruned(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:mixture", stage=stage):
        assert max(seen["errors"]) < 1e-6
        assert seen["refused"] == ["ROUTER"]


# -- what a loop does besides ----------------------------------------------------------------------------------------


class Broken(Exception):
    """What the fault raises."""


def interrupted(stage: int) -> Any:
    """Each update is broken off in the backward of its first layer's replay, then done."""
    reference, ours = updates.pair(updates.build, config(stage, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)
    layer = decoder_layers(ours.module)[0]
    armed, raised, errors = [False], 0, []

    def fault(*_: Any) -> None:
        if armed[0] and torch._C._current_graph_task_id() != -1:
            raise Broken

    layer.mlp.register_forward_pre_hook(fault)  # type: ignore[union-attr]
    for number in range(3):
        expected = update(reference, number)
        armed[0] = number > 0
        try:
            update(ours, number)
        except Broken:
            raised += 1
            armed[0] = False
            found = update(ours, number)
            errors.append(difference(expected, found))
    return {"errors": errors, "raised": raised}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_good_update_after_an_exception(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:interrupted", stage=stage):
        assert seen["raised"] == 2
        assert max(seen["errors"]) < 1e-6


def between(stage: int) -> Any:
    """Forwards without grad between forward and backward, and an exact gradient beside the engine after it."""
    reference, ours = updates.pair(updates.build, config(stage, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)

    def loss(made: Any, batch: Sample) -> Tensor:
        value = policy_loss(made, batch)
        with torch.no_grad():
            policy_loss(made, sample(77))
        return value

    errors = [difference(update(reference, n, loss), update(ours, n, loss)) for n in range(2)]
    return {"errors": errors, "share": ours.hilore.microbatch.live_share}


@pytest.mark.parametrize("stage", [3])
def test_forwards_without_grad_between(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:between", stage=stage):
        assert max(seen["errors"]) < 1e-6
        assert seen["share"] < 0.9


def twice(stage: int) -> Any:
    """Two forwards with grad before one backward: each parameter gets one gradient, the sum."""
    reference, ours = updates.pair(updates.build, config(stage, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)

    def loss(made: Any, batch: Sample) -> Tensor:
        return policy_loss(made, batch) + 0.5 * policy_loss(made, sample(78, [32, 9, 0, 32]))

    errors = []
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch.on(patch)
        for number in range(2):
            expected = update(reference, number, loss)
            errors.append(difference(expected, update(ours, number, loss)))
    return {"errors": errors, "calls": len(watch.shares)}


@pytest.mark.parametrize("stage", [2, 3])
def test_two_forwards_before_one_backward(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:twice", stage=stage):
        assert max(seen["errors"]) < 1e-6
        assert seen["calls"] == 2 * 2 * 3 - 1


def dropout() -> Any:
    """LoRA dropout: the same random numbers as without pruning, hence the same gradients."""
    build = lambda: lora(FAMILIES["llama"](), lora_dropout=0.2)  # noqa: E731
    reference, ours = updates.pair(build, config(2, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)
    errors = [difference(update(reference, n), update(ours, n)) for n in range(2)]
    return {"errors": errors, "refused": [refusal.reason.name for refusal in ours.hilore.pruner.refused.values()]}


def test_dropout_is_not_pruned(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:dropout"):
        assert max(seen["errors"]) < 1e-6
        assert seen["refused"] == ["RANDOM"]


def nothing(block: dict[str, Any], announce: bool) -> int:
    """Pruned calls of two updates."""
    made = updates.hilore_engine(updates.build(), config(2), **block)
    made.hilore.force(Action.RECOMPUTE)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch.on(patch)
        for number in range(2):
            update(made, number, announce=announce)
    return len(watch.shares)


@pytest.mark.parametrize(
    ("block", "announce"), [({"prune_zero_exposure": False}, True), ({}, False)], ids=["switched off", "unannounced"]
)
def test_nothing_is_pruned(ranks: RankPool, block: dict[str, Any], announce: bool) -> None:
    assert ranks.run(f"{HERE}:nothing", block=block, announce=announce) == [0, 0]
