"""What compressing adds over exact plans where the microbatches of an update differ in exposure.

    python -m benchmarks.exposure_mix                        # 8 layers of SmolLM2, 8 microbatches of 4 x 128 tokens
    python -m benchmarks.exposure_mix --layers 30 --turns 6 --json mix.json

An update has groups without variance (advantage 0), groups whose tokens are clipped but for a few, ordinary ones, and
ones with large advantages, in turn, all told by `begin_update`. Risk is made to bind: the allowed gradient error goes
down, from --max-gradient-error, until the static plan may use L on at most --static-share of what memory allows; the
table says on how much. Both modes have that same error, memory, codecs and planner. Seconds are medians over turns, and
"counted": measured seconds of the replays, codecs and kept outputs that plans leave, free of noise elsewhere. What L
adds is the seconds saved over the exact plan; the last line compares update_aware's with static_risk's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ds_hilore
from benchmarks.bench import LOSS, SOLVED_S, now, relative_error
from benchmarks.methods import NONE, applied, letter
from benchmarks.records import Case
from benchmarks.subject import Batch, Preset, one_rank_environment, policy, sized
from ds_hilore.cli.statistics import in_turns
from ds_hilore.core.treatment import treatment_of
from ds_hilore.core.types import Action
from ds_hilore.runtime.parts import Stage
from examples.arithmetic.model import convert_packaged_model, default_cache_dir, packaged_model

EXACT, STATIC, AWARE = "hilore_exact", "hilore_static_risk", "hilore_update_aware"
#: An error that binds nobody.
ANY_ERROR = 1e6
#: By how much the allowed error goes down in a step of the search, and steps at most.
STEP, STEPS = 0.7, 16
#: Calibration sees every kind of microbatch twice.
CALIBRATION = 8
#: Ratios of clipped tokens: outside of 0.8 to 1.2.
CLIPPED_LOG_RATIO = 0.4


class Group(Enum):
    """What a microbatch is like."""

    ZERO = "no variance"  # equal rewards: advantages 0
    CLIPPED = "clipped"  # nine of ten tokens beyond the clip range
    ORDINARY = "ordinary"  # advantages around 1, ratios 1
    LARGE = "large"  # advantages around 4: rewards that are not scaled by their deviation


@dataclass(frozen=True)
class Figures:
    """One update. `letters`: units of all microbatches by letter. `counted`: see the module's docstring."""

    seconds: float
    counted: float
    letters: Counter[str]


def mixed(batch: Batch, logps: Tensor, kind: Group, seed: int) -> Batch:
    """The microbatch with coefficients as `kind` has them.

    Args:
        batch: [B, T] tokens with a mask.
        logps: [B, T - 1] of the policy, so that ratios are what is meant.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, device = len(batch.advantages), logps.device
    signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
    advantages = (signs * (0.8 + 0.4 * torch.rand(rows, generator=generator))).to(device)
    old = logps
    if kind is Group.ZERO:
        advantages = torch.zeros_like(advantages)
    elif kind is Group.LARGE:
        advantages = 4 * advantages
    elif kind is Group.CLIPPED:
        beyond = (torch.rand(logps.shape, generator=generator) < 0.9).to(device)
        # a ratio far above 1 where the advantage asks for more, far below where it asks for less
        old = torch.where(beyond, logps - CLIPPED_LOG_RATIO * advantages.sign()[:, None], logps)
    return dataclasses.replace(batch, advantages=advantages, old_logps=old)


class Mix:
    """An engine that accumulates one update's microbatches, and these."""

    def __init__(self, size: Preset, kinds: Sequence[Group], error: float, phi: float) -> None:
        path = packaged_model(default_cache_dir())
        convert_packaged_model(path)
        subject, vocabulary = policy(path, size, full_finetuning=False)
        self.engine = _engine(subject, len(kinds), error)
        batches = [Batch.random(size, vocabulary, seed, self.engine.device) for seed in range(len(kinds))]
        with torch.no_grad():
            self.batches = [
                mixed(batch, self.engine(batch.ids, batch.mask).detach(), kind, seed)
                for seed, (batch, kind) in enumerate(zip(batches, kinds, strict=True))
            ]
        self.count = torch.stack([batch.mask.sum() for batch in self.batches]).sum()
        self._phi = phi

    def learn(self) -> None:
        """Updates until units are measured and calibration is over."""
        checks = self.engine._hilore_host.checks
        while self.engine.hilore.stage is not Stage.PLANNED or not checks.calibrated:
            self._run()

    def update(self, method: str, before_step: Callable[[], None] | None = None) -> Figures:
        """One update under a method's plans."""
        prize = self.engine.hilore.learning.prize
        budget = prize.replayed_peak_bytes + int(self._phi * (prize.storing_bytes or 0))
        case = NONE if method == NONE.method else Case(method, f"phi={self._phi}", budget)
        with applied(self.engine, case):
            return self._run(before_step)

    def warm(self, method: str) -> None:
        """The background programme finishes the method's plans."""
        self.update(method)
        self.engine.hilore.parts.planner.wait(timeout_s=SOLVED_S)

    def gradients(self, method: str) -> list[Tensor]:
        found: list[Tensor] = []
        parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
        self.update(method, lambda: found.extend(p.grad.detach().clone() for p in parameters))
        return found

    @contextmanager
    def allowing(self, error: float) -> Iterator[None]:
        """Inside, another gradient error is allowed."""
        risk = self.engine.hilore.learning.risk
        configured = risk.rules
        risk.rules = dataclasses.replace(configured, limit=error)
        try:
            yield
        finally:
            risk.rules = configured

    def _run(self, before_step: Callable[[], None] | None = None) -> Figures:
        engine, batches = self.engine, self.batches
        letters: Counter[str] = Counter()
        counted, started = 0.0, now()
        ds_hilore.begin_update([b.advantages for b in batches], [b.mask for b in batches], self.count, engine=engine)
        for position, batch in enumerate(batches, 1):
            logps = engine(batch.ids, batch.mask)
            loss = ds_hilore.grpo_loss(logps, batch.old_logps, batch.advantages, batch.mask, self.count, config=LOSS)
            engine.backward(loss * len(batches))
            if engine.hilore.stage is Stage.PLANNED:
                counted += spent_seconds(engine.hilore)
            letters.update(letter(treatment) for treatment in engine.hilore.microbatch.treated.values())
            if before_step is not None and position == len(batches):
                before_step()
            engine.step()
        return Figures(now() - started, counted, letters)


def spent_seconds(hilore: Any) -> float:
    """What recovering the newest microbatch's state took, by the measured seconds of its parts: replays, less kept
    operators; encoding, also of what was not used in the end; decoding."""
    batch, measured = hilore.microbatch, hilore.measurements
    class_of = dict(measured.roster)
    before = batch.plan if batch.prepared is None else batch.prepared.plan
    spent = 0.0
    for unit, treatment in batch.treated.items():
        name, prepared = class_of[unit], treatment_of(before, unit)
        parts = measured.classes[name].parts
        encoded = prepared.codecs or treatment.codecs
        spent += sum(parts.codecs[pair].encode.of(batch.shape) for pair in encoded)
        spent += sum(parts.codecs[pair].decode.of(batch.shape) for pair in treatment.codecs)
        if treatment.action is Action.RECOMPUTE:
            kept = sum(parts.operators[operator].seconds.of(batch.shape) for operator in treatment.keeps)
            spent += (measured.replay_seconds(name, batch.shape) or 0.0) - kept
    return spent


def _engine(model: Any, microbatches: int, error: float) -> Any:
    one_rank_environment()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True, "fused": True}},
        "steps_per_print": 10**9,
        "hilore": {
            "memory_budget": "1.0x",
            "max_gradient_error": error,
            "prune_zero_exposure": False,
            "selfcheck": {"updates": 0},  # what is measured is to be the plan's own
            "profile": {"calibration_microbatches": CALIBRATION, "audit_interval": 0},
        },
    }
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=trainable, config=config)
    return engine


def binding_error(mix: Mix, error: float, most_share: float) -> tuple[float, int, int]:
    """The largest error of the search at which risk binds the static plan.

    Returns:
        That error, the units that its plan compresses, and those that it would if risk were nothing.
    """
    with mix.allowing(ANY_ERROR):
        mix.warm(STATIC)
        allowed = mix.update(STATIC).letters["L"]
    for _ in range(STEPS):
        with mix.allowing(error):
            used = mix.update(STATIC).letters["L"]
        if used <= most_share * allowed:
            break
        error *= STEP
    return error, used, allowed


def report(mix: Mix, error: float, turns: int, console: Console) -> dict[str, Any]:
    """Takes all times under one allowed error."""
    methods = (EXACT, STATIC, AWARE)
    with mix.allowing(error):
        exact = mix.gradients(NONE.method)
        errors = {}
        for method in methods:
            mix.warm(method)
            errors[method] = relative_error(mix.gradients(method), exact)
        del exact
        taken: dict[str, list[Figures]] = in_turns(methods, turns, mix.update, console)
    return {
        method: {
            "seconds": [each.seconds for each in figures],
            "counted": [each.counted for each in figures],
            "letters": dict(figures[-1].letters),
            "gradient_error": errors[method],
        }
        for method, figures in taken.items()
    }


def added(found: dict[str, Any], method: str, clock: str) -> float:
    """Seconds that a method's L saves over the exact plan, median over turns."""
    return median(exact - own for exact, own in zip(found[EXACT][clock], found[method][clock], strict=True))


def table(found: dict[str, Any], title: str) -> Table:
    shown = Table(title=title)
    for column in ("method", "seconds", "counted seconds", "L adds", "L adds, counted", "units", "gradient"):
        shown.add_column(column, no_wrap=column == "method")
    for method, figures in found.items():
        shown.add_row(
            method,
            *(f"{median(figures[clock]):.2f}" for clock in ("seconds", "counted")),
            *(f"{added(found, method, clock):+.3f}" for clock in ("seconds", "counted")),
            " ".join(f"{count}{letter}" for letter, count in sorted(figures["letters"].items())),
            "bitwise" if figures["gradient_error"] == 0 else f"{figures['gradient_error']:.1e}",
        )
    return shown


def ratio(found: dict[str, Any], clock: str) -> float | None:
    """What L adds with update_aware over what it adds with static_risk; None where the latter gains nothing."""
    static = added(found, STATIC, clock)
    return added(found, AWARE, clock) / static if static > 0 else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, help="sequences per microbatch")
    parser.add_argument("--groups", type=int, default=2, help="microbatches of each kind in an update")
    parser.add_argument(
        "--phi", type=float, default=0.4, help="memory: of what storing every unit takes over replaying"
    )
    parser.add_argument("--max-gradient-error", type=float, default=0.01)
    parser.add_argument("--static-share", type=float, default=0.7, help="of the L that memory allows, at most")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    size, kinds = sized("quick", arguments.layers, arguments.rows), list(Group) * arguments.groups
    mix = Mix(size, kinds, arguments.max_gradient_error, arguments.phi)
    mix.learn()
    error, used, allowed = binding_error(mix, arguments.max_gradient_error, arguments.static_share)
    if not allowed:
        sys.exit("no plan compresses here, whatever the error: compressing pays on no unit within this memory")
    found = report(mix, error, arguments.turns, Console(stderr=True))
    console = Console(width=None if sys.stdout.isatty() else 140)
    units = len(mix.engine.hilore.parts.unit_names)
    console.print(table(found, f"{units} units, {len(kinds)} microbatches of {size.tokens} tokens, error {error:.2g}"))
    share = used / allowed
    console.print(
        f"static_risk uses L on {used} of the {allowed} units (times microbatches) that memory allows: {share:.0%}"
    )
    for clock, name in (("counted", "counted"), ("seconds", "by the clock")):
        known = ratio(found, clock)
        said = "static_risk gains nothing by L" if known is None else f"update_aware / static_risk = {known:.2f}"
        console.print(f"what L adds, {name}: {said}")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump({"error": error, "static_share": share, "methods": found}, out, indent=1)


if __name__ == "__main__":
    main()
