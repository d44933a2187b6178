"""One training run of `benchmarks.training_parity`, in a process of its own.

    python -m benchmarks.parity_run SPEC OUT      # both are JSON files

A single rank: each run of a pair has a core for itself. Every rollout starts from a seed that update and run share, so
that two runs whose policies are nearly the same sample nearly the same responses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_hilore
from benchmarks.subject import one_rank_environment
from benchmarks.tasks import Question, Tasks, cut, expected_score, right_answers, sample, trimmed
from ds_hilore.codecs.base import Codec, Payload
from ds_hilore.core.types import Action
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.objective.update import group_advantages
from examples.arithmetic.model import Actor, default_cache_dir, load_actor, packaged_model
from examples.arithmetic.rollout import Rollout, Sampling

#: How much larger a planted codec's error is.
PLANTED_ERROR = 20.0
PLANTS = ("sign", "codec")
#: The seed of validation and probes: the same questions for every run.
FIXED = 10_007


@dataclass(frozen=True)
class Spec:
    """One run.

    Args:
        error: max_gradient_error; 0 is the exact run.
        layers: of the model; None: all.
        groups: questions per update, one microbatch each.
        plant: "sign" or "codec": a fault that the comparison must find; "": none.
        look_every: updates from one validation, and look at the probes' gradients, to the next.
    """

    seed: int
    error: float
    updates: int
    layers: int | None
    tasks: tuple[str, ...]
    groups: int
    group_size: int
    max_new_tokens: int
    validation: int
    look_every: int
    learning_rate: float
    budget: str
    calibration: int
    plant: str = ""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.group_size, self.max_new_tokens)


@dataclass
class Report:
    """What a run came to. `scores` and `cosines`: by update. `compressed`: share of units over all updates."""

    rewards: list[float] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    cosines: dict[int, float] = field(default_factory=dict)
    compressed: float = 0.0
    seconds: float = 0.0
    check_seconds: float = 0.0
    update_seconds: list[float] = field(default_factory=list)


class Run:
    """An engine, its tasks, and what is looked at."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        torch.manual_seed(spec.seed)
        actor, self._tokenizer = load_actor(packaged_model(default_cache_dir()), torch.float32)
        cut(actor, spec.layers)
        self._actor = actor
        self._tasks = Tasks(spec.seed, spec.tasks)
        fixed = Tasks(FIXED, spec.tasks).held_out(spec.validation)
        self._answers = right_answers(self._tokenizer, fixed)
        self._probe = self._probe_batch(fixed[: spec.groups])
        self._engine = _engine(actor, spec)
        self._counts = dict.fromkeys(Action, 0)
        self.report = Report()

    def _probe_batch(self, questions: Sequence[Question]) -> Rollout:
        """Responses to fixed questions; advantages are fixed too, so that every group has some."""
        torch.manual_seed(FIXED)
        rollout = sample(self._actor, self._tokenizer, self._tasks, questions, self.spec.sampling)
        drawn = torch.randn(len(rollout.responses))
        return dataclasses.replace(rollout, advantages=group_advantages(drawn, self.spec.group_size))

    def train(self) -> Report:
        spec, report, started = self.spec, self.report, time.perf_counter()
        self._look(0)
        for update in range(spec.updates):
            torch.manual_seed(1_000_003 * (spec.seed + 1) + update)
            drawn = self._tasks.draw(update * spec.groups, spec.groups)
            rollout = sample(self._actor, self._tokenizer, self._tasks, drawn, spec.sampling)
            report.rewards.append(float(rollout.rewards.mean()))
            before = time.perf_counter()
            with self._fault():
                self._differentiate(rollout, self._sign, step=True)
            report.update_seconds.append(time.perf_counter() - before)
            if (update + 1) % spec.look_every == 0 or update + 1 == spec.updates:
                self._look(update + 1)
            print(
                f"update {update + 1}: reward {report.rewards[-1]:.3f}, {report.update_seconds[-1]:.1f} s", flush=True
            )
        units = sum(self._counts.values())
        report.compressed = self._counts[Action.COMPRESS] / units if units else 0.0
        report.seconds = time.perf_counter() - started
        checks = self._engine._hilore_host.checks
        report.check_seconds = 0.0 if checks is None else checks.seconds
        return report

    def _say(self, update: int) -> None:
        kind = "hilore" if self.spec.error else "exact"
        reward, seconds = self.report.rewards[-1], self.report.update_seconds[-1]
        print(f"seed {self.spec.seed} {kind}: update {update + 1}, reward {reward:.2f}, {seconds:.1f} s", flush=True)

    def _differentiate(self, rollout: Rollout, sign: float, step: bool) -> None:
        """Forward and backward of a whole update, a group a microbatch. It is the first pass: ratios are 1."""
        engine, size = self._engine, self.spec.group_size
        spans = [slice(start, start + size) for start in range(0, len(rollout.responses), size)]
        parts = [(trimmed(rollout.sequences.rows(span)), sign * rollout.advantages[span]) for span in spans]
        num_tokens = rollout.sequences.response_mask.sum()
        ds_hilore.begin_update([a for _, a in parts], [s.response_mask for s, _ in parts], num_tokens)
        for sequences, advantages in parts:
            logps = engine(*sequences)
            mask = sequences.response_mask
            loss = ds_hilore.grpo_loss(logps, logps.detach(), advantages, mask, num_tokens, config=GRPOLossConfig())
            engine.backward(loss * len(parts))
            if step:
                for action in engine.hilore.microbatch.ran.values():
                    self._counts[action] += 1
                engine.step()

    # -- looks -----------------------------------------------------------------------------------------------------

    def _look(self, update: int) -> None:
        """Validation; and where the run compresses by now, its gradient of the probe against the exact one."""
        self.report.scores[update] = expected_score(self._actor, self._answers)
        if self._calibrated:
            with self._fault():
                near = self._gradient(self._sign)
            with self._engine.hilore.paused():
                self.report.cosines[update] = cosine(near, self._gradient(1.0))

    def _gradient(self, sign: float) -> list[Tensor]:
        """The probe's, as this run would have it; no step is made, and nothing of it stays."""
        parameters = [p for p in self._engine.module.parameters() if p.requires_grad]
        self._differentiate(self._probe, sign, step=False)
        found = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._engine.hilore.learning.risk.abort()  # what the probe spent is not the next update's
        return found

    # -- planted faults --------------------------------------------------------------------------------------------

    @property
    def _calibrated(self) -> bool:
        """Faults begin here: one that is there in calibration is found by it, and planned around."""
        checks = self._engine._hilore_host.checks
        return checks is not None and checks.calibrated

    @property
    def _sign(self) -> float:
        return -1.0 if self.spec.plant == "sign" and self._calibrated else 1.0

    def _fault(self) -> AbstractContextManager[None]:
        planted = self.spec.plant == "codec" and self._calibrated
        return amplified_errors(PLANTED_ERROR) if planted else nullcontext()


@contextmanager
def amplified_errors(factor: float) -> Iterator[None]:
    """Inside, every codec decodes to something `factor` times as far off, and its statistics do not tell."""
    original = Codec.decode
    generator = torch.Generator().manual_seed(FIXED)

    def decode(self: Codec, payload: Payload, *args: Any, **kwargs: Any) -> Tensor:
        decoded = original(self, payload, *args, **kwargs)
        noise = torch.randn(decoded.shape, generator=generator, dtype=torch.float32).to(decoded)
        more = math.sqrt((factor**2 - 1) * float(payload.error_square) / max(1, decoded.numel()))
        return decoded.add_(noise, alpha=more)

    Codec.decode = decode  # type: ignore[method-assign]
    try:
        yield
    finally:
        Codec.decode = original  # type: ignore[method-assign]


def cosine(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Of two gradients, all parameters together; NaN where one of them is zero."""
    product = math.fsum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))
    squares = [math.fsum(float(a.double().square().sum()) for a in gradient) for gradient in (one, other)]
    return product / math.sqrt(squares[0] * squares[1]) if all(squares) else math.nan


def _engine(actor: Actor, spec: Spec) -> Any:
    one_rank_environment()
    config = {
        "train_micro_batch_size_per_gpu": spec.group_size,
        "gradient_accumulation_steps": spec.groups,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": spec.learning_rate, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        "hilore": {
            "memory_budget": spec.budget,
            "max_gradient_error": spec.error,
            # The runs differ in compression alone; what it gains here is not the question, so nothing is struck out.
            "prune_zero_exposure": False,
            "planner": {"trial_microbatches": 0},
            "selfcheck": {"updates": 0},  # what is measured is to be the plan's own
            "profile": {"calibration_microbatches": spec.calibration, "audit_interval": 0},
        },
    }
    trainable = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    engine, *_ = ds_hilore.initialize(model=actor, model_parameters=trainable, config=config)
    return engine


def read_spec(path: Path) -> Spec:
    data: dict[str, Any] = json.loads(path.read_text())
    return Spec(**{**data, "tasks": tuple(data["tasks"])})


def report_of(data: Mapping[str, Any]) -> Report:
    """A report that went through JSON."""
    by_update = {name: {int(update): value for update, value in data[name].items()} for name in ("scores", "cosines")}
    return Report(**{**data, **by_update})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Run(read_spec(arguments.spec)).train()
    arguments.out.write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
