"""Calibration and audits in the running job: on whole updates, on all ranks in step, without any effect on training."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.integration.gradient_checks import FIRST_UPDATE
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.profiling.held_out import HeldOut, Outcome
from tests.engines import config
from tests.integration import updates
from tests.integration.test_compress import grpo
from tests.models import llama, lora
from tests.ranks import RankPool

HERE = "tests.integration.test_gradient_checks"


@patch.object(HeldOut, "close", lambda self, *squares: Outcome.HOLDS)  # no matter how good so few predictions are
def undisturbed(stage: int, accumulation: int) -> dict[str, Any]:
    """The same updates with and without calibration and audits, in a budget in which nothing is compressed."""
    settings = config(stage, accumulation)
    blocks = ({}, {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 2, "audit_interval": 1}})
    found, audits = [], []
    for block in blocks:
        engine = updates.hilore_engine(lora(llama(layers=3)), settings, memory_budget="1.0x", **block)
        found.append([updates.run_update(engine, number, _loss(number)) for number in range(8)])
        checks = engine._hilore_host.checks
        audits = [] if checks is None else [audit.measured for audit in checks.audits]
    unequal = [name for one, other in zip(*found) for name in updates.unequal_bits(one, other)]
    return {"unequal": unequal, "audits": audits, "observations": len(checks.calibration.observations)}


def late() -> int:
    """Observations where units were not measured before the updates that calibrate: those were forced."""
    settings = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 2, "audit_interval": 0}}
    engine = updates.hilore_engine(lora(llama(layers=2)), config(0), memory_budget="1.0x", **settings)
    checks = engine._hilore_host.checks
    engine.hilore.force(Action.RECOMPUTE)
    for number in range(FIRST_UPDATE + 2):
        updates.run_update(engine, number, _loss(number))
    assert not checks.calibrated and not checks.calibration.observations
    engine.hilore.force(None)
    while not checks.calibrated and number < 20:
        number += 1
        updates.run_update(engine, number, _loss(number))
    return len(checks.calibration.observations)


def calm() -> list[float]:
    """Exposures of the microbatches that calibrated: of three in turn, one has some on both ranks, one on the second
    alone, one on none."""
    settings = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 4, "audit_interval": 0}}
    engine = updates.hilore_engine(lora(llama(layers=2)), config(0), memory_budget="1.0x", **settings)
    checks, number = engine._hilore_host.checks, 0
    while len(checks.calibration.exposures()) < 4 and number < 30:
        exposed = number % 3 == 0 or (number % 3 == 1 and dist.get_rank() == 1)
        updates.run_update(engine, number, _of_advantages(float(exposed)))
        number += 1
    exposures: list[float] = checks.calibration.exposures()
    return exposures


def _of_advantages(advantage: float) -> updates.Loss:
    def loss(engine: Any, ids: Tensor, _: Tensor) -> Tensor:
        logps = engine(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        advantages, mask = torch.full((len(ids),), advantage), torch.ones_like(logps)
        return ds_hilore.grpo_loss(logps, logps.detach(), advantages, mask, mask.sum(), config=GRPOLossConfig())

    return loss


def _loss(number: int) -> updates.Loss:
    return lambda engine, ids, advantages: grpo(engine, 10 * number + dist.get_rank())


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (2, 2), (3, 2)])
def test_calibration_and_audits_leave_the_engine_alone(ranks: RankPool, stage: int, accumulation: int) -> None:
    for found in ranks.run(f"{HERE}:undisturbed", stage=stage, accumulation=accumulation, timeout=150.0):
        assert found["unequal"] == []
        assert found["observations"] > 0, "nothing was calibrated"
        assert found["audits"] and max(found["audits"]) < 1e-6


def test_calibration_waits_for_units_to_be_measured(ranks: RankPool) -> None:
    assert all(observations > 0 for observations in ranks.run(f"{HERE}:late"))


def test_microbatches_that_no_rank_learns_from_do_not_calibrate(ranks: RankPool) -> None:
    first, second = ranks.run(f"{HERE}:calm")
    assert len(first) == len(second) == 4
    assert all(exposure > 0 for exposure in second)
    assert 0.0 in first and max(first) > 0
