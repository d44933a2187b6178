"""Calibration and audits in the running job: on whole updates, on all ranks in step, without any effect on training."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.core.errors import MemoryExhausted, RankMismatch
from ds_hilore.core.types import Action
from ds_hilore.integration import audits, gradient_checks
from ds_hilore.integration.gradient_checks import FIRST_UPDATE
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.profiling.held_out import HeldOut, Outcome
from tests.engines import config
from tests.integration import updates
from tests.integration.test_compress import grpo
from tests.models import batch, llama, lora
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


SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CALLED: dict[str, tuple[ModuleType, str]] = {
    "calibration": (gradient_checks, "gradients_of"),
    "audit": (gradient_checks, "gradients_of"),
    "comparison": (audits, "averaged"),
}


@patch.object(HeldOut, "close", lambda self, *squares: Outcome.HOLDS)
def starved(kind: str, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """Updates that are run again whenever they fail, without memory for checks of one kind on some ranks."""
    failures, number = [], 0
    settings = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 2, "audit_interval": 1}}
    engine = updates.hilore_engine(lora(llama(layers=2)), config(0), memory_budget="1.0x", **settings)
    checks = engine._hilore_host.checks
    original = getattr(*CALLED[kind])

    def allocate(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() in ranks and (kind == "calibration" or checks.calibrated):
            raise SHORT
        return original(*args, **kwargs)

    with patch.object(*CALLED[kind], allocate):
        while number < 10 and len(failures) < 5:
            try:
                updates.run_update(engine, number, _loss(number))
                number += 1
            except (MemoryExhausted, RankMismatch) as error:
                failures.append(type(error).__name__)
    trusted = engine.hilore.learning.risk.trusted
    return {"failures": failures, "updates": number, "trusted": trusted, "audits": len(checks.audits)}


@patch.object(HeldOut, "close", lambda self, *squares: Outcome.HOLDS)
def not_finite(kind: str) -> dict[str, Any]:
    """Every other microbatch of the second rank has coefficients, or an exact gradient, that are no numbers."""
    settings = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 3, "audit_interval": 0}}
    engine = updates.hilore_engine(lora(llama(layers=2)), config(0), memory_budget="1.0x", **settings)
    checks, number, spoilt = engine._hilore_host.checks, 0, 0
    while not checks.calibrated and number < 30:
        bad = number % 2 == 0 and dist.get_rank() == 1
        advantage, weight = (math.nan if bad and kind == "omega" else 1.0), (math.nan if bad else 0.0)
        spoilt += checks.calibrating and number % 2 == 0
        logits: list[Tensor] = []
        with engine.module.register_forward_hook(lambda *called, kept=logits: kept.append(called[2].logits)):
            loss = _of_advantages(advantage)(engine, *batch(seed=number))
        engine.backward(loss + weight * logits[0].sum() if kind == "gradient" else loss)
        for parameter in engine.module.parameters():
            if number % 2 == 0 and parameter.grad is not None:
                parameter.grad.zero_()  # or weights would be no numbers either
        engine.step()
        number += 1
    calibration = checks.calibration
    seen = [seen.gradient_error for seen in calibration.observations]
    judged = [judged.measured for judged in calibration.judgements]
    return {
        "spoilt": spoilt,
        "microbatches": sorted({seen.microbatch for seen in calibration.observations}),
        "seen": seen,
        "judged": judged,
        "closed": [reason for reason in calibration.disabled().values() if "finite" in reason],
        "trusted": engine.hilore.learning.risk.trusted,
    }


def encoded_beyond() -> list[str]:
    """Reasons of disabled places, where a compressed pass overflows and the exact one does not."""
    original = gradient_checks.gradients_of

    def gradients(engine: Any, controller: Any, recorded: Any, treatments: Any, *more: Any) -> Any:
        found = original(engine, controller, recorded, treatments, *more)
        return {name: gradient / 0 for name, gradient in found.items()} if treatments else found

    settings = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 2, "audit_interval": 0}}
    engine = updates.hilore_engine(lora(llama(layers=2)), config(0), memory_budget="1.0x", **settings)
    checks, number = engine._hilore_host.checks, 0
    with patch.object(gradient_checks, "gradients_of", gradients):
        while not checks.calibration.observations and number < 10:
            updates.run_update(engine, number, _loss(number))
            number += 1
    places = checks.calibration.places
    assert places
    return [checks.calibration.disabled().get(place, "") for place in places]


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


@pytest.mark.parametrize("kind", list(CALLED))
def test_a_check_without_memory_is_dropped_by_all_ranks(ranks: RankPool, kind: str) -> None:
    """Its update fails once, and training goes on without such checks."""
    found = ranks.run(f"{HERE}:starved", kind=kind, timeout=100.0)
    assert all(seen["updates"] == 10 and 1 <= len(seen["failures"]) <= 2 for seen in found), found
    assert "MemoryExhausted" in found[1]["failures"]
    assert all(seen["trusted"] == (kind != "calibration") and seen["audits"] == 0 for seen in found)


@pytest.mark.parametrize("kind", ["calibration", "audit"])
@pytest.mark.parametrize("short", [0, 1])
def test_a_check_without_memory_on_one_rank_is_dropped_by_all(ranks: RankPool, kind: str, short: int) -> None:
    """The other ranks, which wait for it in vain, are told at once, and all run the update again."""
    found = ranks.run(f"{HERE}:starved", kind=kind, ranks=(short,), timeout=100.0)
    assert all(seen["updates"] == 10 and 1 <= len(seen["failures"]) <= 2 for seen in found), found
    assert "MemoryExhausted" in found[short]["failures"] and "RankMismatch" in found[1 - short]["failures"]
    assert all(seen["trusted"] == (kind != "calibration") and seen["audits"] == 0 for seen in found)


@pytest.mark.parametrize("kind", ["omega", "gradient"])
def test_a_microbatch_that_is_no_number_says_nothing_of_codecs(ranks: RankPool, kind: str) -> None:
    """On no rank, wherever it was; the others calibrate and judge as if it had not been."""
    for seen in ranks.run(f"{HERE}:not_finite", kind=kind, timeout=100.0):
        assert seen["spoilt"] > 1 and seen["microbatches"] == [0, 1, 2]
        assert seen["seen"] and seen["judged"] and all(map(math.isfinite, seen["seen"] + seen["judged"]))
        assert seen["closed"] == [] and seen["trusted"]


def test_state_that_overflows_when_encoded_closes_its_place(ranks: RankPool) -> None:
    for reasons in ranks.run(f"{HERE}:encoded_beyond"):
        assert all("finite" in reason for reason in reasons), reasons
