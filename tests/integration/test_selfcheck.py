"""The self-check: silent where plans are right, and a planted fault is found, named and raised on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hilore.core.errors import GradientMismatch
from ds_hilore.core.types import Action
from ds_hilore.recovery.bundle import Derived
from ds_hilore.recovery.deadwork import DeadWork
from ds_hilore.recovery.replay import ReplaySource
from ds_hilore.recovery.surroundings import Surroundings
from tests.engines import config
from tests.integration import updates
from tests.models import lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_selfcheck"
CHECKED = {"selfcheck": {"updates": 2}}
UNCHECKED = {"selfcheck": {"updates": 0}}


def _engine(stage: int, accumulation: int, plan: str, block: dict[str, Any], family: str = "llama", **how: Any) -> Any:
    model = lora(updates.FAMILIES[family](), lora_dropout=how.get("dropout", 0.0))
    settings = config(stage, accumulation) | how.get("settings", {})
    made = updates.hilore_engine(model, settings, **block)
    if plan == "mixed":  # ranks differ
        made.hilore.force(updates.different_plans(made)[2])
    elif plan != "own":
        made.hilore.force({"H": Action.STORE, "R": Action.RECOMPUTE}[plan])
    return made


def silent(count: int = 3, **how: Any) -> dict[str, Any]:
    """The same updates with and without checks."""
    found = []
    for block in (UNCHECKED, CHECKED):
        made = _engine(block=block, **how)
        found.append([updates.run_update(made, number) for number in range(count)])
    check = made._hilore_host.selfcheck
    unequal = [name for one, other in zip(*found) for name in updates.unequal_bits(one, other)]
    seen = {name: getattr(check, name) for name in ("updates", "largest", "over", "passed_over", "seconds")}
    return {"unequal": unequal, "seen": seen}


def planted(stage: int, accumulation: int, fault: str, family: str = "llama") -> dict[str, Any]:
    """A fault in one unit of the second rank, in the first update; then there is none any more."""
    dropout = 0.1 if fault == "random" else 0.0
    made = _engine(stage, accumulation, "mixed" if fault == "random" else "H", CHECKED, family, dropout=dropout)
    path, said = updates.units_of(made)[-1 if fault == "random" else 1], ""
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(FAULTS[fault](made, path))
        try:
            updates.run_update(made, 0)
        except GradientMismatch as error:
            said = str(error)
    steps, check = made.global_steps, made._hilore_host.selfcheck
    after = updates.run_update(made, 1)
    truth = _engine(stage, accumulation, "H", UNCHECKED, family, dropout=dropout)
    unequal = updates.unequal_bits(updates.run_update(truth, 1), after)
    return {"path": path, "said": said, "steps": steps, "unequal": unequal, "checked": check.updates}


@contextmanager
def corrupted(made: Any, path: str) -> Iterator[None]:
    """What one unit stored is written into between forward and backward, past autograd's versions."""
    settle = made.hilore.context.settle

    def write() -> None:
        calls = made.hilore.microbatch.alive()
        others = set().union(*(call.held_storages() for call in calls if call.unit.name != path))
        for call in calls:
            for handle in call._alive() if call.unit.name == path else ():
                for tensor in handle.value.held():
                    if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in others:
                        tensor.data.mul_(1.001)
        settle()

    with patch.object(made.hilore.context, "settle", write):
        yield


@contextmanager
def wrong_recipe(made: Any, path: str) -> Iterator[None]:
    """What one unit derives in backward is not what it saved, although it was so when that was proven in forward."""
    original, context = Derived.get, made.hilore.context

    def off(derived: Derived) -> Tensor:
        return original(derived) * (1.001 if context.settled and context.at_work.name == path else 1.0)

    with patch.object(Derived, "get", off):
        yield


@contextmanager
def other_random_numbers(made: Any, path: str) -> Iterator[None]:
    """The replay of one unit draws other random numbers than its forward."""
    original = DeadWork.replay

    def replay(dead_work: DeadWork, source: ReplaySource) -> Any:
        if path in source.label:
            source = replace(source, surroundings=Surroundings(torch.device("cpu")))
        return original(dead_work, source)

    with patch.object(DeadWork, "replay", replay):
        yield


FAULTS: dict[str, Callable[[Any, str], Any]] = {
    "corrupted": corrupted,
    "recipe": wrong_recipe,
    "random": other_random_numbers,
}


@pytest.mark.parametrize(
    ("stage", "accumulation", "plan"),
    [(0, 2, "mixed"), (1, 1, "H"), (2, 2, "mixed"), (3, 2, "mixed")],
)
def test_right_plans_pass_and_training_is_untouched(ranks: RankPool, stage: int, accumulation: int, plan: str) -> None:
    for found in ranks.run(f"{HERE}:silent", stage=stage, accumulation=accumulation, plan=plan):
        assert found["unequal"] == [], found
        assert found["seen"]["updates"] == 2 and found["seen"]["over"], found
        assert found["seen"]["largest"] == 0.0, found


@pytest.mark.parametrize(
    ("stage", "accumulation", "fault"),
    [(0, 1, "corrupted"), (1, 2, "recipe"), (2, 1, "random"), (3, 2, "corrupted")],
)
def test_a_planted_fault_stops_every_rank(ranks: RankPool, stage: int, accumulation: int, fault: str) -> None:
    """Before the step, with one message; what comes after is right, and checked."""
    found = ranks.run(f"{HERE}:planted", stage=stage, accumulation=accumulation, fault=fault)
    assert found[0]["said"] == found[1]["said"]
    for seen in found:
        assert f"unit {seen['path']} (" in seen["said"] and "rank 1" in seen["said"], seen["said"]
        assert f"most in {seen['path']}." in seen["said"]
        assert ("replay" if fault == "random" else "stored") in seen["said"]
        assert seen["steps"] == 0 and seen["unequal"] == [] and seen["checked"] == 1


def other_path(stage: int, kind: str) -> dict[str, Any]:
    """Updates whose loss does not go through the engine's outputs alone; the head is trained."""
    model = lora(updates.FAMILIES["llama"](), modules_to_save=["lm_head"] if kind == "head" else None)
    made = updates.hilore_engine(model, config(stage), **CHECKED)
    made.hilore.force(Action.STORE)
    kept: list[Tensor] = []

    def loss(engine: Any, ids: Tensor, advantages: Tensor) -> Tensor:
        found = plain_loss(engine, ids, advantages)
        if kind == "head":
            weight = engine.module.get_output_embeddings().modules_to_save["default"].weight
            return found + weight.square().mean()
        return found + kept.pop().square().mean()

    layers = [module for module in made.module.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    if kind == "hidden":
        layers[1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    for number in range(2):
        updates.run_update(made, number, loss)
    check = made._hilore_host.selfcheck
    return {"updates": check.updates, "passed_over": check.passed_over, "largest": check.largest}


def test_what_a_loss_adds_by_other_paths_is_no_fault(ranks: RankPool) -> None:
    """Tensors from within the model make a check impossible; a weight outside of units is left out of it."""
    for found in ranks.run(f"{HERE}:other_path", stage=2, kind="hidden"):
        assert found["updates"] == 0 and "other paths" in found["passed_over"]
    for found in ranks.run(f"{HERE}:other_path", stage=2, kind="head"):
        assert found["updates"] == 2 and found["largest"] == 0.0 and not found["passed_over"]
