"""One engine and one microbatch; an update of it under any method."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_hilore
from benchmarks.batches import live_rows, with_dead_rows
from benchmarks.methods import (
    HILORE_REPLAYS,
    TORCH,
    Suffix,
    actions,
    announces,
    applied,
    is_hilore,
    layer_count,
    letter,
    planned_mode,
    runs_live_rows_only,
    suffixes,
    torch_checkpoint,
)
from benchmarks.records import Case, Peak
from benchmarks.selective import selective_checkpoint
from benchmarks.spec import Spec
from benchmarks.subject import Batch, engine_for, policy, sized
from ds_hilore.memory.meter import peak_meter
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.runtime.parts import Stage
from examples.arithmetic.model import convert_packaged_model, default_cache_dir, packaged_model

LOSS = GRPOLossConfig()
START_BUDGET = "1.0x"
SOLVED_S = 60.0


class Bench:
    """Runs updates of one preset. The run has learnt its units' costs once `learn` returns.

    Attributes:
        batch: the microbatch of methods that do not leave dead rows out.
    """

    def __init__(self, spec: Spec) -> None:
        size = sized(spec.preset, spec.layers, spec.rows)
        model = None if spec.model is None else Path(spec.model)
        if model is None and size.shape is None:
            model = packaged_model(default_cache_dir())
            convert_packaged_model(model)
        self._whole_logits = spec.loss == "logits"
        self._learns_whole_logits = spec.learns_whole_logits
        self._policy, vocabulary = policy(model, size, spec.full_finetuning, spec.learns_whole_logits)
        self.engine = engine_for(self._policy, START_BUDGET, max_gradient_error=spec.error, paper=spec.paper)
        self.meter = peak_meter(self.engine.device)
        self.use(Batch.random(size, vocabulary, seed=0, device=self.engine.device))
        self._dead_rows = spec.dead_rows

    def use(self, batch: Batch) -> None:
        """Updates from now on are of this microbatch."""
        self.batch, self._live = batch, live_rows(batch)
        self._count = batch.mask.sum()  # N: the loss is per token of these, whichever rows are left out

    def on_policy(self) -> Batch:
        """The microbatch with the model's own log-probabilities as old ones: ratios are 1, no token is clipped."""
        with torch.no_grad():
            logps = self.engine(self.batch.ids, self.batch.mask).detach()
        return dataclasses.replace(self.batch, old_logps=logps)

    @property
    def layers(self) -> int:
        return layer_count(self.engine)

    def learn(self) -> None:
        """The first updates of a run: two that replay and measure, one that stores."""
        while self.engine.hilore.stage is not Stage.PLANNED or self.calibrating:
            self.update(None)
        if self._dead_rows:  # all others are to be live
            self.use(with_dead_rows(self.on_policy(), self._dead_rows))

    @property
    def calibrating(self) -> bool:
        """Whether compressed state is still to be calibrated; audits come after, where there are any."""
        checks = self.engine._hilore_host.checks
        return checks is not None and not checks.calibrated

    def solve(self, case: Case) -> None:
        """Lets the background programme finish the plan of a planned case: one update asks for it.

        As in a run that does nothing else, its peak is new to the engine, which learns from what it foresaw lower.
        """
        if planned_mode(case.method) is not None:
            self.meter.settle()
            self.meter.reset()
            self.update(case)
            while self.engine.hilore.stage is not Stage.PLANNED:  # the first plan that compresses begins a trial
                self.update(case)
            self.engine.hilore.parts.planner.wait(timeout_s=SOLVED_S)

    def update(self, case: Case | None, before_step: Callable[[], None] | None = None) -> float:
        """Seconds of forward, loss, backward and optimizer step. None: as the run itself has it."""
        if case is None:
            self._policy.whole_logits = self._learns_whole_logits
            return self._update(self.batch, before_step)
        self._policy.whole_logits = self._whole_logits or Suffix.LOGITS in suffixes(case.method)
        batch = self._live if runs_live_rows_only(case.method) else self.batch
        if announces(case.method):
            ds_hilore.begin_microbatch(batch.advantages, batch.mask, self._count, engine=self.engine)
        with applied(self.engine, case):
            return self._update(batch, before_step)

    def _update(self, batch: Batch, before_step: Callable[[], None] | None) -> float:
        engine = self.engine
        started = now()
        logps = engine(batch.ids, batch.mask)
        loss = ds_hilore.grpo_loss(logps, batch.old_logps, batch.advantages, batch.mask, self._count, config=LOSS)
        engine.backward(loss)
        if before_step is not None:
            before_step()
        engine.step()
        return now() - started

    def gradients(self, case: Case) -> list[Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found: list[Tensor] = []
        parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
        self.update(case, lambda: found.extend(safe_get_full_grad(p).clone() for p in parameters))
        return found

    def peak(self, case: Case) -> Peak:
        """Physical memory of one update; meaningful on CPU only in a process that gives freed memory back."""
        self.meter.settle()
        self.meter.reset()
        floor = self.meter.level_bytes()
        self.update(case)
        planned = planned_mode(case.method) is not None
        return Peak(
            self.meter.peak_bytes(),
            floor,
            self.engine.hilore.plan.peak_bytes if planned else None,
            self.actions(case),
        )

    def actions(self, case: Case) -> str:
        """One letter per layer, of the last update: S kept in part by a selective policy, others as `letter` has it."""
        if is_hilore(case.method):
            return "".join(letter(treatment) for treatment in self.engine.hilore.microbatch.treated.values())
        return actions(case, self.layers)

    def codec_seconds(self) -> list[float]:
        """What each layer of the last update has spent on encoding and decoding, as the run has measured it."""
        hilore = self.engine.hilore
        batch, class_of = hilore.microbatch, dict(hilore.measurements.roster)
        spent = []
        for unit, treatment in batch.treated.items():
            codecs = hilore.measurements.classes[class_of[unit]].parts.codecs
            fits = [codecs[pair] for pair in treatment.codecs]
            spent.append(sum(each.encode.of(batch.shape) + each.decode.of(batch.shape) for each in fits))
        return spent

    def replay_seconds(self, kinds: Sequence[str], updates: int) -> dict[str, list[float]]:
        """Median seconds of each layer's replay over some updates, by kind of replay; kinds take turns.

        Args:
            kinds: "torch", as its checkpoint replays; one of `HILORE_REPLAYS`, without dead work; a selective policy.
        """
        replays = {kind: _Replays(self.layers) for kind in kinds}
        for _ in range(updates):
            for kind, found in replays.items():
                found.begin()
                self._timed_replays(kind, found)
        return {kind: found.medians() for kind, found in replays.items()}

    def _timed_replays(self, kind: str, found: _Replays) -> None:
        """One update in which all layers are replayed."""
        if kind not in HILORE_REPLAYS:
            function = torch_checkpoint if kind == TORCH.method else selective_checkpoint(kind)
            with self.engine.hilore.host_checkpointing(partial(found.checkpoint, function)):
                self.update(None)
            return
        dead_work = self.engine.hilore.context.dead_work
        original = dead_work.replay
        dead_work.replay = partial(found.replay, original)
        try:
            self.update(Case(HILORE_REPLAYS[kind]))
        finally:
            dead_work.replay = original


class _Replays:
    """Seconds of replays by layer, over several updates."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._forwards = 0
        self._replays = 0

    def begin(self) -> None:
        self._forwards = self._replays = 0

    def checkpoint(self, inner: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A checkpoint function whose second call of `function`, the replay, is timed."""
        layer = self._forwards
        self._forwards += 1
        calls = 0

        def timed(*inner_args: Any, **inner_kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                return function(*inner_args, **inner_kwargs)
            started = now()
            try:
                return function(*inner_args, **inner_kwargs)
            finally:  # early stop leaves by an exception
                self._seconds[layer].append(now() - started)

        return inner(timed, *args, **kwargs)

    def replay(self, original: Callable[..., Any], source: Any) -> Any:
        """In place of DeadWork.replay. Backward runs through the layers from the last to the first."""
        layer = self._layers - 1 - self._replays
        self._replays += 1
        started = now()
        try:
            return original(source)
        finally:
            self._seconds[layer].append(now() - started)

    def medians(self) -> list[float]:
        return [sorted(self._seconds[layer])[len(self._seconds[layer]) // 2] for layer in range(self._layers)]


def relative_error(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """||g - exact|| / ||exact|| over all tensors; 0 only where all are the same bits."""
    squares = reference = 0.0
    for gradient, truth in zip(gradients, exact, strict=True):
        if not torch.equal(gradient, truth):
            squares += (gradient.double() - truth.double()).square().sum().item()
        reference += truth.double().square().sum().item()
    return (squares / reference) ** 0.5


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
