"""An exception that one rank alone meets: the others are told soon, and the update that all run again is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.core.errors import RankMismatch, UsageError
from ds_hilore.integration import gradient_checks
from ds_hilore.profiling.held_out import HeldOut, Outcome
from tests.engines import config
from tests.integration import updates
from tests.integration.test_compress import grpo
from tests.models import decoder_layers, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_one_rank_fails"

#: Less than a rank waits on the control plane for one that does not come, far less than in a reduction.
SOON_S = 30.0


class Broken(Exception):
    """What the fault raises."""


class Fault:
    """Raises once at one place of an engine's update, on one rank."""

    def __init__(self, engine: Any) -> None:
        self.armed = ""  # place of the fault of the update's last microbatch
        self._place = ""
        layer: Any = decoder_layers(engine.module)[0]
        layer.post_attention_layernorm.register_forward_hook(self._after_forward)

    def strike(self, place: str) -> None:
        if place == self._place:
            self._place = ""
            raise Broken(place)

    def _after_forward(self, _module: Any, _inputs: Any, output: Tensor) -> None:
        self.strike("forward")
        if output.requires_grad:
            output.register_hook(lambda _gradient: self.strike("backward"))

    def loss(self, engine: Any, ids: Tensor, advantages: Tensor) -> Tensor:
        if engine.is_gradient_accumulation_boundary():
            self._place, self.armed = self.armed, ""
        loss = plain_loss(engine, ids, advantages)
        self.strike("loss")
        return loss


def _until_it_runs(update: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], list[str], float]:
    """What an update gives in the end, the errors before, and the longest time to one of them."""
    errors, longest = [], 0.0
    while len(errors) < 5:
        started = time.monotonic()
        try:
            return update(), errors, longest
        except (Broken, RankMismatch) as error:
            errors.append(type(error).__name__)
            longest = max(longest, time.monotonic() - started)
    raise AssertionError(f"the update never ran: {errors}")


def restarted(stage: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Three updates of two microbatches; after the loss of the second's second microbatch has raised on `ranks`, the
    caller begins that update again."""
    reference, made = updates.pair(lambda: lora(llama(layers=2)), config(stage, 2))
    fault, unequal, errors = Fault(made), [], []
    for number in range(3):
        expected = updates.run_update(reference, number)
        fault.armed = "loss" if number == 1 and dist.get_rank() in ranks else ""
        while True:
            try:
                found = updates.run_update(made, number, fault.loss)
                break
            except Broken:
                errors.append("Broken")
                ds_hilore.restart_update(made)
            except RankMismatch:
                errors.append("RankMismatch")
        unequal += updates.unequal_bits(expected, found)
    return {"unequal": unequal, "errors": errors}


def _raising(original: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    """`original`, that raises each of `errors` first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*args, **kwargs)

    return call


def one_fails(stage: int, place: str, failing: int, accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    """Five updates; in two of them one rank fails in the last microbatch. Against DeepSpeed without a fault."""
    settings = config(stage, accumulation, **zero)
    reference, made = updates.pair(lambda: lora(llama(layers=2)), settings)
    fault, unequal, told, longest = Fault(made), [], [], 0.0
    for number in range(5):
        expected = updates.run_update(reference, number)
        fault.armed = place if number in (1, 3) and dist.get_rank() == failing else ""
        found, errors, seconds = _until_it_runs(partial(updates.run_update, made, number, fault.loss))
        told.append(errors)
        longest = max(longest, seconds)
        unequal += updates.unequal_bits(expected, found)
    return {"unequal": unequal, "errors": told, "longest": longest}


def steps(stage: int, **zero: Any) -> dict[str, Any]:
    """Four updates; the optimizer of each rank raises in two of them, before it has changed anything."""
    reference, made = updates.pair(lambda: lora(llama(layers=2)), config(stage, 2, **zero))
    unequal, failures = [], 0
    inner = getattr(made.optimizer, "optimizer", made.optimizer)
    original = inner.step
    for number in range(4):
        expected = updates.run_update(reference, number)
        effects = [Broken("step")] if number in (1, 2) else []
        with patch.object(inner, "step", _raising(original, effects)):
            found, errors, _ = _until_it_runs(partial(updates.run_update, made, number))
        failures += len(errors)
        unequal += updates.unequal_bits(expected, found)
    weights = [dict(each.module.named_parameters()) for each in (reference, made)] if stage < 3 else [{}, {}]
    return {"unequal": unequal + updates.unequal_bits(*weights), "failures": failures}


@patch.object(HeldOut, "close", lambda self, *squares: Outcome.HOLDS)
def check_fails(stage: int, failing: int, judging: bool) -> dict[str, Any]:
    """A pass with compressed state raises once on one rank, while calibration fits, or while it judges."""
    block = {"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 3, "audit_interval": 0}}
    found, errors, original = [], [], gradient_checks.gradients_of
    for faulty in (False, True):
        engine = updates.hilore_engine(lora(llama(layers=2)), config(stage), memory_budget="1.0x", **block)
        checks = engine._hilore_host.checks
        armed = [faulty and dist.get_rank() == failing]

        def gradients(*args: Any, _armed: list[bool] = armed, _checks: Any = checks) -> Any:
            if _armed[0] and args[3] and (_checks._judging is not None) == judging:
                _armed[0] = False
                raise Broken("check")
            return original(*args)

        with patch.object(gradient_checks, "gradients_of", gradients):
            for number in range(10):
                gradient, seen, _ = _until_it_runs(partial(updates.run_update, engine, number, _loss(number)))
                found.append(gradient)
                errors += seen
        assert checks.calibrated and not armed[0]
    half = len(found) // 2
    unequal = [name for one, other in zip(found[:half], found[half:]) for name in updates.unequal_bits(one, other)]
    return {"unequal": unequal, "errors": errors}


def _loss(number: int) -> updates.Loss:
    return lambda engine, ids, advantages: grpo(engine, 10 * number + dist.get_rank())


#: Both ranks, and more kinds of faults, are tried by tests/faults.
PLACES = [
    *[(0, place, failing) for place in ("forward", "loss", "backward") for failing in (0, 1)],
    (1, "backward", 1),
    (2, "forward", 0),
    (2, "loss", 1),
    (3, "loss", 0),
]


@pytest.mark.parametrize(("stage", "place", "failing"), PLACES)
def test_the_other_rank_is_told_and_the_update_runs_again(
    ranks: RankPool, stage: int, place: str, failing: int
) -> None:
    found = ranks.run(f"{HERE}:one_fails", stage=stage, place=place, failing=failing, timeout=90.0)
    # Where ranks first need each other when gradients are complete, one that repeats its loss only comes later.
    waits = stage == 0 and place == "loss"
    for rank, seen in enumerate(found):
        fails = rank == failing or not waits
        assert [bool(errors) for errors in seen["errors"]] == [False, fails, False, fails, False]
        assert all(("Broken" in errors) == (rank == failing) for errors in seen["errors"] if errors), seen["errors"]
        assert all("RankMismatch" in errors for errors in seen["errors"] if errors and rank != failing)
        assert seen["unequal"] == [] and seen["longest"] < SOON_S


def test_reductions_that_overlap_backward(ranks: RankPool) -> None:
    """ZeRO-1 as ZeRO-2 then; with accumulation, too."""
    for accumulation in (1, 2):
        case = {"stage": 1, "place": "forward", "overlap_comm": True, "accumulation": accumulation}
        for seen in ranks.run(f"{HERE}:one_fails", failing=1, timeout=90.0, **case):
            assert seen["unequal"] == [] and seen["longest"] < SOON_S


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_a_caller_begins_an_update_again(ranks: RankPool, stage: int, failing: tuple[int, ...]) -> None:
    for rank, seen in enumerate(ranks.run(f"{HERE}:restarted", stage=stage, ranks=failing)):
        assert seen == {"unequal": [], "errors": ["Broken" if rank in failing else "RankMismatch"]}


def test_only_an_engine_with_a_block_begins_an_update_again() -> None:
    with pytest.raises(UsageError, match="no hilore block"):
        ds_hilore.restart_update(object())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_raises_leaves_no_gradients_behind(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:steps", stage=stage):
        assert seen == {"unequal": [], "failures": 2}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("judging", [False, True])
def test_a_check_that_fails_on_one_rank_is_known_to_all_before_they_step(
    ranks: RankPool, stage: int, judging: bool
) -> None:
    for rank, seen in enumerate(ranks.run(f"{HERE}:check_fails", stage=stage, failing=1, judging=judging)):
        assert seen["errors"] and seen["unequal"] == []
        assert ("Broken" in seen["errors"]) == (rank == 1)
