"""What is told of a TRL run, and when: whole updates where the trainer has them, else one microbatch at a time."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.integration import trl
from ds_hilore.integration.method_patch import applied
from ds_hilore.runtime.update import Announcements, MicrobatchFacts


class Listening:
    """A controller as far as announcements go: what it is told, and which facts each microbatch gets."""

    def __init__(self) -> None:
        self.update = 0
        self.announced = Announcements()
        self.told: list[int] = []
        self.parts = SimpleNamespace(rank=0)
        self.learning = SimpleNamespace(risk=SimpleNamespace(rules=SimpleNamespace(limit=0.01)))

    def announce_update(self, microbatches: list[MicrobatchFacts]) -> None:
        self.told.append(len(microbatches))
        self.announced.announce_update(microbatches)

    def announce_microbatch(self, facts: MicrobatchFacts) -> None:
        self.told.append(0)
        self.announced.announce_microbatch(facts)


class Trainer:
    """GRPOTrainer's rhythm: responses every steps_per_generation * num_iterations microbatches, in slices."""

    loss_type = "dr_grpo"
    max_completion_length = 4
    use_vllm = vllm_importance_sampling_correction = aux_loss_enabled = _entropy_bonus_enabled = False
    accelerator = SimpleNamespace(num_processes=2)

    def __init__(self, accumulation: int, slices: int, iterations: int = 1) -> None:
        self.current_gradient_accumulation_steps = accumulation
        self.num_iterations = iterations
        self.args = SimpleNamespace(steps_per_generation=slices)
        self._step = 0
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._made = 0

    def prepared(self) -> dict[str, Any]:
        slices = self.args.steps_per_generation
        if self._step % (slices * self.num_iterations) == 0:
            self._buffered_inputs = [self._slice() for _ in range(slices)]
        assert self._buffered_inputs is not None
        return self._buffered_inputs[self._step % slices]

    def _slice(self) -> dict[str, Any]:
        self._made += 1
        return {"advantages": torch.full((1,), float(self._made)), "completion_mask": torch.ones(1, 4)}


def run(trainer: Trainer, updates: int) -> Listening:
    """Whether each microbatch gets the facts of its own responses is checked here."""
    controller = Listening()
    for _ in range(updates):
        for _ in range(trainer.current_gradient_accumulation_steps):
            inputs = trainer.prepared()
            trl.announce(trainer, controller, inputs)  # type: ignore[arg-type]
            facts = controller.announced.take()
            assert facts is not None and facts.advantages is inputs["advantages"]
            trainer._step += 1
        controller.update += 1
        controller.announced.clear()
    return controller


@pytest.mark.parametrize(
    ("accumulation", "slices", "iterations", "told"),
    [
        (2, 2, 1, [2, 2, 2]),  # TRL's default: responses for one update
        (2, 4, 1, [2, 2, 2]),  # for two
        (2, 2, 2, [2, 2, 2]),  # used twice
        (4, 2, 2, [4, 4, 4]),  # used twice within one update
        (2, 1, 1, [0, 0, 0, 0, 0, 0]),  # new ones in the middle of an update
        (3, 2, 1, [0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (1, 1, 1, [1, 1, 1]),
    ],
)
def test_updates_are_told_whole_where_they_are_known(
    accumulation: int, slices: int, iterations: int, told: list[int]
) -> None:
    assert run(Trainer(accumulation, slices, iterations), updates=3).told == told


def test_a_replaced_microbatch_is_told_for_itself() -> None:
    trainer, controller = Trainer(2, 2), Listening()
    inputs = dict(trainer.prepared())
    trl.announce(trainer, controller, inputs)  # type: ignore[arg-type]
    assert controller.told == [0]


@pytest.mark.parametrize("term", ["_entropy_bonus_enabled", "aux_loss_enabled"])
def test_terms_beside_the_log_probabilities_keep_plans_exact(term: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(1, 1)
    setattr(trainer, term, True)
    controller = Listening()
    trl.announce(trainer, controller, trainer.prepared())  # type: ignore[arg-type]
    facts = controller.announced.take()
    assert facts is not None and facts.exact_only
    assert "exact actions only" in caplog.text and trl.unaccounted(trainer) in caplog.text


# ------------------------------------------------------------------------------------------------ the patch


def test_nothing_is_patched_where_trl_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trl.trainer.grpo_trainer", raising=False)
    assert trl.patches() == []


class Changed:
    def _compute_loss(self, model: Any, batch: Any) -> None: ...

    def _get_per_token_logps_and_entropies(self, model: Any) -> None: ...


def test_another_trl_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("trl.trainer.grpo_trainer")
    module.GRPOTrainer = Changed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(Changed.__dict__)
    message = r"_compute_loss of trl \S+ takes \(self, model, batch\)"
    with pytest.raises(UnsupportedError, match=message), applied(trl.patches()):
        pass
    assert dict(Changed.__dict__) == before


def test_trl_as_installed_is_known() -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed").GRPOTrainer
    before = {name: trainer.__dict__[name] for name in ("_compute_loss", "_get_per_token_logps_and_entropies")}
    with applied(trl.patches()):
        assert all(trainer.__dict__[name] is not method for name, method in before.items())
    assert all(trainer.__dict__[name] is method for name, method in before.items())
