"""One controller per engine: what happens to the units of each microbatch, from its forward to its backward.

    IDLE      --first unit of a forward with grad-->  FORWARD     plan chosen for the microbatch's shape
    FORWARD   --loss hook, or first unpack-------->  BACKWARD    final plan applied (`settle`)
    BACKWARD  --end of backward, next forward----->  IDLE        observations taken

Two forwards with grad before one backward belong to one microbatch. Forwards without grad never get here. One
microbatch is in hand at a time; a pipeline sets it aside after its forward and takes it up again for its backward.

What runs as what is decided by `learning.py`: first to measure, then by plans.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.core.treatment import REPLAYED, Treatment
from ds_hilore.core.types import Action, Plan, Shape, UnitId
from ds_hilore.profiling.measure import Measurements
from ds_hilore.recovery.deadwork import DeadWork
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.replay import Site
from ds_hilore.recovery.unit import RecoveryContext, UnitCall, inside_unit
from ds_hilore.runtime.guard import Guard, GuardEvent
from ds_hilore.runtime.learning import Learning
from ds_hilore.runtime.microbatch import Microbatch, Phase
from ds_hilore.runtime.observe import as_rows, call_with_gradient, check_observable
from ds_hilore.runtime.outputs import OutputMarks
from ds_hilore.runtime.parts import Bypass, Checkpoint, ControllerParts, Stage, forced_plan
from ds_hilore.runtime.pruner import Pruner
from ds_hilore.runtime.update import Announcements, Coefficients, MicrobatchFacts, Source

_log = logging.getLogger(__name__)


class Controller:
    """State of one engine's recovery. Made and attached by integration/deepspeed_engine.py; lives as `engine.hilore`.

    Attributes:
        plan: that of the newest microbatch.
        learning: what is measured, and the stage of that.
        coefficients: omega of the newest microbatch, one entry per loss; empty where no loss told.
        events: shortages of memory on this rank, the newest last; a bounded number is kept.
    """

    def __init__(self, parts: ControllerParts) -> None:
        self.parts = parts
        self.update = 0
        self.microbatch = Microbatch()
        self.outputs = OutputMarks()
        self.dead: dict[str, frozenset[Site]] = {}
        self.context = RecoveryContext(rank=parts.rank, dead_work=DeadWork(parts.techniques.dead_work, self._note_dead))
        self.context.proofs.enabled = parts.techniques.derived_state
        self.context.encodable = parts.techniques.encodable
        self.context.settle = self.settle
        self.pruner = Pruner(parts.roles, parts.rank)
        self.guard = Guard(parts.planner, parts.meter, self.context, lambda: self.microbatch)
        self.events: Sequence[GuardEvent] = self.guard.events
        self.learning = Learning(parts, self.context, self.guard)
        self._forced: Plan | None = None
        self._bypass = Bypass.NONE
        self._host_checkpoint: Checkpoint | None = None
        self._announced = Announcements()
        self._aside = 0  # microbatches between `set_aside` and `take_up`
        self._in_forward = False
        self._awaits_unit = False  # the forward that runs has begun a microbatch but no unit yet

    # -- public ----------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Of the microbatch in hand."""
        return self.microbatch.phase

    @property
    def stage(self) -> Stage:
        """How far measuring is."""
        return self.learning.stage

    @property
    def measurements(self) -> Measurements:
        return self.learning.measurements

    @property
    def plan(self) -> Plan:
        return self.microbatch.plan

    @property
    def coefficients(self) -> list[Coefficients]:
        return self.microbatch.coefficients

    @property
    def announced(self) -> Announcements:
        """What the host has told of the update that runs or comes."""
        return self._announced

    def expect_microbatches(self, count: int) -> bool:
        """The host makes updates of `count` microbatches on this rank, whatever its configuration says.

        Returns:
            Whether that is news.
        """
        rules = self.learning.risk.rules
        self.learning.risk.rules = replace(rules, microbatches=count)
        return rules.microbatches != count

    @property
    def budget_bytes(self) -> int:
        """This rank's budget; 0 until the all-R peak is known."""
        return self.parts.planner.budget_bytes

    def force(self, plan: Plan | Treatment | Action | None) -> None:
        """Fixes the plan of all further microbatches (a treatment or action: the same for every unit); None ends it.

        Raises:
            UsageError: neither a plan nor a treatment nor an action that says all.
        """
        self._forced = forced_plan(plan)
        self.learning.disturbed()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, units run as in the plain model: no checkpointing at all."""
        with self._bypassing(Bypass.PLAIN, None):
            yield

    @contextmanager
    def host_checkpointing(self, function: Checkpoint) -> Iterator[None]:
        """Inside, units run through `function(unit, *args)`, for example torch's checkpoint."""
        with self._bypassing(Bypass.HOST, function):
            yield

    @contextmanager
    def _bypassing(self, bypass: Bypass, function: Checkpoint | None) -> Iterator[None]:
        self.learning.disturbed()
        before = self._bypass, self._host_checkpoint
        self._bypass, self._host_checkpoint = bypass, function
        try:
            yield
        finally:
            self._bypass, self._host_checkpoint = before

    def announce_update(self, microbatches: list[MicrobatchFacts]) -> None:
        """All microbatches of this rank's next update (begin_update). Where plans may compress: an exchange of all
        ranks, which waits for what was announced to reach the host."""
        for facts in microbatches:
            self.pruner.announced(facts)
        self._announced.announce_update(microbatches)
        if self.learning.risk.priced:
            forecasts = [None if facts.exact_only else facts.forecast for facts in microbatches]
            self.learning.announce(forecasts, self.microbatch.shape)

    def announce_microbatch(self, facts: MicrobatchFacts) -> None:
        """The next microbatch (begin_microbatch); takes precedence over what `announce_update` said of it."""
        self.pruner.announced(facts)
        self._announced.announce_microbatch(facts)

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward with grad begins: of the microbatch in hand where that waits for its backward, else of a new one.

        Told once per forward, since a unit that saves nothing leaves no trace of the microbatch that it began.
        """
        self._in_forward = True
        self._awaits_unit = self.starts_microbatch
        if self._awaits_unit:
            self._finish_microbatch()
            self.learning.exposed = None
            self.microbatch = Microbatch()
            if self._bypass is not Bypass.NONE:  # its units do not come here, and it is a microbatch all the same
                self.microbatch.facts = self._announced.take()
                self.learning.risk.pass_by(None)

    def end_forward(self) -> None:
        self.context.offload.let_go()
        self._in_forward = False
        self._awaits_unit = False

    def run_unit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of a unit within the engine's forward, as the plan says."""
        if inside_unit() or not torch.is_grad_enabled() or self._bypass is Bypass.PLAIN:
            return function(*args, **kwargs)
        if self._bypass is Bypass.HOST:
            assert self._host_checkpoint is not None
            return self._host_checkpoint(function, *args, **kwargs)
        inputs = UnitInputs.capture(function, args, kwargs)
        if self._awaits_unit:
            self._begin_microbatch(inputs.shape)
        module = inputs.module
        name, unit_class = self.parts.unit_name(module, function)
        batch = self.microbatch
        unit = UnitId(name, batch.counts[name])
        batch.counts[name] += 1
        self.guard.levels.before(unit)
        replay_only = self.parts.replay_only(module)
        treatment = REPLAYED if replay_only else batch.treatment(unit)
        if batch.prunes and treatment.action is Action.RECOMPUTE and not replay_only:
            treatment = batch.treated[unit] = Treatment(Action.RECOMPUTE, place=treatment.place)
            call, result = self.pruner.run((self.context, unit, unit_class, treatment, inputs), function, args, kwargs)
            batch.calls.append(weakref.ref(call))
            return result
        batch.treated[unit] = treatment
        call = UnitCall(self.context, unit, unit_class, treatment, inputs)
        batch.calls.append(weakref.ref(call))
        with self.learning.around(unit, treatment, inputs):
            return call.run(function, args, kwargs)

    def _is_continued(self) -> bool:
        """Whether the microbatch in hand still waits for its backward. A graph that was dropped never gets one."""
        return any(reference() is not None for reference in self.microbatch.calls)

    def _begin_microbatch(self, shape: Shape) -> None:
        self._awaits_unit = False
        self.microbatch.phase = Phase.FORWARD
        self.context.settled = False
        batch = self.microbatch
        batch.shape = shape
        batch.facts = self._announced.take()
        # What is measured, and the trial that compares with it, are of unpruned replays.
        self.pruner.begin(batch, measuring=self.stage is not Stage.PLANNED and self._forced is None)
        spared = self.guard.replays_everything and self.learning.settled  # after a failure: all-R, timed by nobody
        if self._forced is not None:
            batch.plan = self._forced
        elif not spared:
            batch.plan = self.learning.choose(batch, shape)
        if (agreement := self.parts.agreement) is not None:
            batch.agree(agreement.stored(batch.plan, [unit for unit, _ in self.measurements.roster]))
        if self._forced is None and not (spared and self.stage is Stage.TRIAL):
            self.learning.begin(batch, shape, measured=self.update > 0)  # the first update makes optimizer state

    # -- loss ------------------------------------------------------------------------------------------------------

    def note_coefficients(self, omega: Tensor, mask: Tensor | None) -> None:
        """omega from a loss of our family, in closed form (grpo_loss)."""
        self._hear(self.microbatch, Coefficients(omega, Source.FORMULA, mask))

    def observe(self, logps: Tensor, mask: Tensor | None) -> None:
        """Reads omega as the gradient at `logps`, when the real backward gets there: before any unit is unpacked.

        Of several in one microbatch, the last to come settles the plan. Where a unit is unpacked before all have come,
        nothing is compressed: nobody knows yet what the others will say.

        Raises:
            UsageError: no gradient reaches these log-probabilities, or shapes do not fit.
        """
        check_observable(logps, mask)
        batch = self.microbatch
        # Inside the forward, what is observed lies on the way to the outputs, or will be one.
        passed_outputs = self._in_forward or not self.outputs.follow(logps)
        awaited = [True]  # until its first backward
        batch.awaited += 1

        def receive(gradient: Tensor) -> None:
            if awaited:
                batch.awaited -= awaited.pop()
            omega = self.parts.scale(passed_outputs).omega(gradient)
            self._hear(batch, Coefficients(as_rows(omega), Source.GRADIENT, as_rows(mask)))
            if batch is self.microbatch and not batch.awaited:
                self.settle()

        call_with_gradient(logps, receive)

    def _hear(self, batch: Microbatch, coefficients: Coefficients) -> None:
        batch.coefficients.append(coefficients)
        if batch is self.microbatch and batch.phase is Phase.BACKWARD:
            self.learning.hear_late(batch)

    def settle(self) -> None:
        """Applies the final plan, once per microbatch: at the loss hook, else at the first unpack.

        With exact actions only, the plan chosen before forward stands (design section 4: the second problem reacts).
        """
        if self.context.settled:
            return
        self.context.settled = True
        if self.phase is not Phase.FORWARD:
            return
        self.microbatch.phase = Phase.BACKWARD
        batch = self.microbatch
        self.learning.backward_begins(batch, bypassed=self._bypass is not Bypass.NONE)

    def begin_backward(self, may_come_again: bool = False) -> None:
        """engine.backward was called: coefficients that are known in closed form settle the plan now.

        Args:
            may_come_again: the graph is kept (`retain_graph`). What another loss asks of it is not known, so nothing is
                compressed.
        """
        self.microbatch.continued |= may_come_again
        if self.microbatch.coefficients and not self.microbatch.awaited:
            self.settle()

    # -- several microbatches in flight ----------------------------------------------------------------------------

    def set_aside(self) -> Microbatch:
        """The forward of the microbatch in hand is over, and those of others come before its backward (pipelines).

        Returns:
            The microbatch, for `take_up`.
        """
        batch, self.microbatch = self.microbatch, Microbatch()
        self.context.settled = True
        self._aside += 1
        self.learning.in_flight = max(self.learning.in_flight, self._aside)
        return batch

    def take_up(self, batch: Microbatch) -> None:
        """The backward of a microbatch that was set aside comes next."""
        self._finish_microbatch()
        self.microbatch = batch
        self._aside -= 1
        self.context.settled = batch.phase is not Phase.FORWARD
        if self.stage is Stage.MEASURE_R:
            self.learning.time_replays()

    # -- after backward --------------------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The backward of the microbatch is over (engine.backward returned)."""
        self._finish_microbatch()

    def _finish_microbatch(self) -> None:
        if self.phase is Phase.BACKWARD:
            self.guard.end_microbatch()
            self.learning.end(self.microbatch)
            self.pruner.end(self.microbatch)
        self.microbatch.phase = Phase.IDLE
        self.context.settled = True
        self.learning.quiet()

    def end_update(self, gradient_norm: float | None = None) -> None:
        """The optimizer has stepped: parameters changed, so what was computed before is out of date.

        Args:
            gradient_norm: of the reduced gradient, before clipping; None where it is not known.
        """
        self._finish_microbatch()
        self.parameters_changed()
        self._announced.clear()
        self.guard.end_update()
        self.learning.end_update(self._forced is not None, gradient_norm)
        self.update += 1

    def parameters_changed(self) -> None:
        """Raises the generation: state saved before can no longer be used (optimizer step, loaded weights)."""
        self.context.generation += 1

    def abort(self, error: BaseException | None = None) -> MemoryExhausted | None:
        """An exception left the microbatch unfinished: forget it. Graph and state go with the caller's tensors.

        Returns:
            What to raise in place of `error`, where that is a failed allocation.
        """
        exhausted = None if error is None else self.guard.failed(error)
        self.guard.end_microbatch()
        self.microbatch.phase = Phase.IDLE
        self.context.settled = True
        self.learning.abort()
        self.pruner.clear()
        self._announced.restart()
        self.microbatch = Microbatch()
        self._aside = 0
        return exhausted

    @property
    def starts_microbatch(self) -> bool:
        """Whether the next forward with grad begins a microbatch."""
        return self.phase is not Phase.FORWARD or not self._is_continued()

    def progress(self) -> dict[str, Any]:
        """What all ranks must agree on before a microbatch. Not the stage: a rank may lack a class of units."""
        return {
            "update": self.update,
            "announced microbatches": len(self._announced),
            "forced": self._forced is not None,
        }

    def metrics(self) -> dict[str, float]:
        """Figures of the newest microbatch for monitors; bytes and seconds as the plan predicts them."""
        return {**self.microbatch.metrics(), "budget_bytes": self.budget_bytes, **self.guard.metrics()}

    def close(self) -> None:
        self.learning.disturbed()
        self.parts.close()

    def _note_dead(self, unit_class: str, dead: frozenset[Site]) -> None:
        self.dead[unit_class] = dead
        if self.parts.rank == 0:
            names = ", ".join(sorted(site.module for site in dead)) or "nothing to skip"
            _log.info("hilore: replay of %s skips: %s", unit_class, names)
