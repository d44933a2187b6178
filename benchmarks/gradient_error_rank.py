"""One rank of `benchmarks.gradient_error`, in a process of its own.

python -m benchmarks.gradient_error_rank SPEC OUT      # both JSON; rank 0 writes OUT
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

import ds_hilore
from benchmarks.gradient_error import Found, Spec
from benchmarks.tasks import Tasks, cut, sample, trimmed
from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action
from ds_hilore.integration.beside import gradients_of, recording
from ds_hilore.integration.gradient_checks import GradientChecks
from ds_hilore.integration.gradient_distance import distance, is_finite
from ds_hilore.integration.held_out import Judging
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.objective.update import count_update_tokens
from ds_hilore.profiling.calibrate import Agreement, Calibration, Judgement
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.held_out import HeldOut
from examples.arithmetic.model import Actor, default_cache_dir, load_actor, packaged_model
from examples.arithmetic.rollout import Microbatch, Rollout, Sampling, to_microbatches
from examples.arithmetic.update import run_update, sum_over_ranks

#: Updates that calibration is fed with, in turn; none of them is audited or judged.
POOL = 8
#: Updates within which calibration must be over.
MOST_LEARNING = 120

Update = list[Microbatch]


class Rank:
    """An engine and recorded rollouts."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        torch.manual_seed(spec.seed)
        actor, tokenizer = load_actor(packaged_model(default_cache_dir()), torch.float32)
        rollouts = self._sampled(actor, tokenizer)
        cut(actor, spec.layers)  # whole models answer rightly now and then, so that there are advantages
        self._rollouts = iter([self._recorded(actor, rollout) for rollout in rollouts])
        self._engine = _engine(actor, spec)
        checks = self._engine._hilore_host.checks
        assert isinstance(checks, GradientChecks), "the configuration allows an error"
        self._checks = checks

    def _sampled(self, actor: Actor, tokenizer: Any) -> list[Rollout]:
        """This rank's own questions and the responses to them, by update."""
        spec = self.spec
        count = POOL + spec.settling + spec.updates + -(-spec.judged // spec.groups)
        tasks, sampling = Tasks(spec.seed), Sampling(spec.group_size, spec.max_new_tokens)
        rollouts = []
        for update in range(count):
            place = dist.get_rank() * count + update
            torch.manual_seed(spec.seed * 1_000_003 + place)
            drawn = tasks.draw(place * spec.groups, spec.groups)
            rollouts.append(sample(actor, tokenizer, tasks, drawn, sampling))
        return rollouts

    def _recorded(self, actor: Actor, rollout: Rollout) -> Update:
        """With log-probabilities of the policy as training begins: updates from the second on are off it."""
        made = to_microbatches(actor, rollout, self.spec.group_size, with_reference=False)
        return [dataclasses.replace(each, sequences=trimmed(each.sequences)) for each in made]

    def run(self) -> Found:
        for update in islice(cycle(list(islice(self._rollouts, POOL))), MOST_LEARNING):
            if self._checks.calibrated and self._engine.hilore.learning.settled:
                break
            self._update(update)
        else:
            raise UsageError(f"calibration is not over after {MOST_LEARNING} updates: allow it fewer microbatches")
        for update in islice(self._rollouts, self.spec.settling):
            self._update(update)
        before = len(self._checks.audits)
        shares = [self._update(update) for update in islice(self._rollouts, self.spec.updates)]
        audits = [(audit.predicted, audit.measured) for audit in self._checks.audits[before:]]
        agreement = self._judged()
        compressed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(compressed, sum(shares) / len(shares))
        calibration = self._checks.calibration
        return Found(
            audits=tuple(audits),
            compressed=tuple(compressed),
            over_units=agreement.units,
            over_microbatches=agreement.microbatches,
            judgements=agreement.count,
            calibration_updates=calibration.cost.updates,
            calibration=tuple(calibration.lines()),
        )

    def _update(self, update: Update) -> float:
        """The share of units that were compressed in its last microbatch."""
        run_update(self._engine, update, GRPOLossConfig())
        treated = list(self._engine.hilore.microbatch.ran.values())
        return treated.count(Action.COMPRESS) / len(treated)

    # -- single units ----------------------------------------------------------------------------------------------

    def _judged(self) -> Agreement:
        """Single-unit interventions on what is left of the rollouts, of all ranks."""
        copy = dataclasses.replace(self._checks.calibration, judgements=[], cost=Cost())  # without a cap
        held_out = HeldOut(copy, most=self.spec.judged)
        hilore, plane = self._engine.hilore, self._engine.hilore.parts.plane
        judging = Judging(hilore, plane, held_out, lambda a, b: distance(a, b) / plane.world_size, is_finite)
        for update in self._rollouts:
            num_tokens = count_update_tokens([each.mask for each in update], reduce=sum_over_ranks)
            for microbatch in update:
                self._judge(microbatch, num_tokens, judging)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [each for each in copy.judgements if each.unit is not None])
        return agreement_of(gathered)

    def _judge(self, microbatch: Microbatch, num_tokens: Any, judging: Judging) -> None:
        engine, hilore = self._engine, self._engine.hilore
        ds_hilore.begin_microbatch(microbatch.advantages, microbatch.mask, num_tokens)
        with recording(engine, hilore.context.rng_tracker) as made:
            logps = made.leaving(engine(*microbatch.sequences))
        loss = ds_hilore.grpo_loss(
            logps, microbatch.old_logps, microbatch.advantages, microbatch.mask, num_tokens, config=GRPOLossConfig()
        )
        engine.backward(loss * (dist.get_world_size() * engine.gradient_accumulation_steps()))
        exposed = hilore.learning.exposed
        assert exposed is not None, "the loss has told coefficients"
        judging.judge(hilore.microbatch.shape, exposed, partial(gradients_of, engine, hilore, made.taken[-1]))
        engine.step()


def agreement_of(ranks: list[list[Judgement]]) -> Agreement:
    """Over the judgements of all ranks: a unit is the same on each, a microbatch is not."""
    merged = Calibration()
    for rank, judgements in enumerate(ranks):
        for each in judgements:
            number = len(ranks) * each.microbatch + rank
            merged.note_judged(each.unit, number, each.predicted, each.measured)
    return merged.agreement()


def _engine(actor: Actor, spec: Spec) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": spec.group_size,
        "gradient_accumulation_steps": spec.groups,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": spec.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": spec.learning_rate, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        "hilore": {
            "memory_budget": spec.budget,
            "max_gradient_error": spec.error,
            "prune_zero_exposure": False,
            # What compressing gains on this machine is not the question here: nothing is struck out.
            "planner": {"trial_microbatches": 0},
            "selfcheck": {"updates": 0},  # what is measured is to be the plan's own
            "profile": {"calibration_microbatches": spec.calibration, "audit_interval": 1},
        },
    }
    trainable = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    engine, *_ = ds_hilore.initialize(model=actor, model_parameters=trainable, config=config)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("WARNING")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    deepspeed.init_distributed("gloo")
    found = Rank(Spec(**json.loads(arguments.spec.read_text()))).run()
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(dataclasses.asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
