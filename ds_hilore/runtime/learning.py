"""How a run learns what its units cost, and then follows plans: what each stage does with a microbatch.

    MEASURE_R  every unit is replayed, in two updates: the second has optimizer state, its peak is "1.0x"
    MEASURE_H  one unit of each class is stored, for one microbatch: the least memory that tells its bytes
    TRIAL      a few microbatches run all-R and as planned in turn (trial.py)
    PLANNED    plans are followed, and peaks watched where that costs nothing (watch.py)

Each rank goes through the stages for itself: a rank may lack a class of units.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.treatment import REPLAYED, Treatment
from ds_hilore.core.types import Action, Plan, Shape, UnitId
from ds_hilore.memory.prize import Prize, storing_bytes
from ds_hilore.profiling.calibrate import Calibration
from ds_hilore.profiling.measure import Measurements
from ds_hilore.profiling.variants import components, error_of
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.unit import RecoveryContext, UnitCall
from ds_hilore.runtime.baseline import BaselineMeter
from ds_hilore.runtime.budget import all_units, loss_leads
from ds_hilore.runtime.forecast import Forecast
from ds_hilore.runtime.guard import Guard
from ds_hilore.runtime.microbatch import Microbatch, footprints
from ds_hilore.runtime.parts import ControllerParts, Stage
from ds_hilore.runtime.risk import Exposed, RiskKeeper, read
from ds_hilore.runtime.sampling import SAMPLED, SAMPLED_WHOLE, Sampler
from ds_hilore.runtime.trial import COMPRESSING, Trial, Turn, Verdict
from ds_hilore.runtime.update import Coefficients
from ds_hilore.runtime.watch import PeakWatch

_log = logging.getLogger(__name__)


class Learning:
    """The stages of one controller. Told of every microbatch that is not forced or bypassed.

    Attributes:
        stage: how far it is.
        measurements: what was found of the units.
        in_flight: most microbatches whose state was held at once.
        known: the measurements were those of an earlier run before the first microbatch.
        prize: what there is to win on this rank, once the first plan is made.
        learnt: told of the measurements once they are complete.
        risk: this rank's account of gradient error.
        verdict: of the newest trial; None: there was none.
        exposed: coefficients of the newest microbatch, where compression is allowed and a loss told them.
    """

    def __init__(self, parts: ControllerParts, context: RecoveryContext, guard: Guard) -> None:
        self.stage = Stage.MEASURE_R
        self.measurements = Measurements(least_encoded_bytes=parts.techniques.least_encoded_bytes)
        self.in_flight = 1
        self.known = False
        self.prize: Prize | None = None
        self.learnt: Callable[[Measurements], object] = lambda measurements: None
        self.baseline = BaselineMeter(parts.meter)
        self.risk = RiskKeeper(parts.risk)
        self.exposed: Exposed | None = None
        self.verdict: Verdict | None = None
        self._parts = parts
        self._context = context
        self._guard = guard
        self._watch = PeakWatch(parts.meter, parts.planner, self.baseline)
        self._trial = Trial(parts.clock, self.measurements, parts.trial_microbatches)
        self._sampler = Sampler(parts.clock, self.measurements, parts.codecs)
        self._sampled: set[str] = set()  # classes that were stored once, or would not be
        self._tries = False  # a trial must show that compressing pays
        self._pays: dict[int, bool] = {}  # what trials have shown, by budget
        self._started: Any = None  # of the all-R microbatch that is being timed
        self._replayed: tuple[Shape, float] | None = None  # the fastest of those
        self._risk = 0.0  # of the newest microbatch's final plan
        self._heard_late = False

    @property
    def update_seconds(self) -> float | None:
        """Seconds of one all-R update, of its microbatches' forward and backward; None: not timed yet."""
        return None if self._replayed is None else self._replayed[1] * max(1, self.risk.rules.microbatches)

    @property
    def settled(self) -> bool:
        """Whether microbatches follow plans, in a trial or for good."""
        return self.stage in (Stage.TRIAL, Stage.PLANNED)

    # -- forward ---------------------------------------------------------------------------------------------------

    def announce(self, forecasts: Sequence[Forecast | None], shape: Shape | None) -> None:
        """All microbatches of this rank's next update are known. Where risk is priced: an exchange of all ranks.

        Args:
            forecasts: None: exact actions only.
            shape: of the newest microbatch, whose plans stand for those to come; None: there was none.
        """
        self.risk.announce(forecasts)
        if self.risk.priced and self._others is not None:
            self._set_price(shape)

    def _set_price(self, shape: Shape | None) -> None:
        points: tuple[tuple[float, float], ...] = ()
        if self.settled and shape is not None:
            size = self._parts.planner.planning_shape(shape)
            points = self._parts.planner.breakpoints(size, self.measurements.profiles(size))
        self.risk.set_price(points, self._others)

    @property
    def _others(self) -> ControlPlane | None:
        """The control plane, where there are other ranks."""
        plane = self._parts.plane
        return plane if plane is not None and plane.world_size > 1 else None

    def choose(self, batch: Microbatch, shape: Shape) -> Plan:
        """The representation of every unit, chosen before it runs (design section 4, first problem)."""
        if self.stage is Stage.MEASURE_H:
            return self._sampling_plan(batch)
        if self.stage is Stage.MEASURE_R:
            return Plan()
        if self.risk.announced:  # before the first of its microbatches, however that runs
            self._set_price(shape)
        if self.stage is Stage.TRIAL and self._trial.turn is Turn.REPLAYED:
            return Plan()
        planner = self._parts.planner
        if self.in_flight <= 1:
            self._watch.floor()
        size = planner.planning_shape(shape)
        profiles = self.measurements.profiles(size, batch.pruning)
        forecast = None if batch.facts is None or not self.risk.active else batch.facts.forecast
        exact = batch.exact_only or self._stays_exact
        expected = (0.0, (1.0,)) if exact else self.risk.expect(shape.tokens, forecast)
        found = planner.prepare(size, profiles, *expected, pruning=batch.pruning)
        batch.prepared, plan = (None, found) if isinstance(found, Plan) else (found, found.plan)
        untried = self._tries and planner.budget_bytes not in self._pays
        if untried and self.stage is Stage.PLANNED and plan.count(Action.COMPRESS):
            self._try_compression()
            batch.prepared, batch.prunes, batch.pruning = None, False, None
            return Plan()  # its first turn
        if self.prize is None:
            self._say_prize(plan, storing_bytes(profiles))
        replayed = all(name == REPLAYED.name for name in plan.choice.values())
        if self.stage is Stage.TRIAL and not self._trial.compresses and replayed:
            self._end_trial()  # both kinds of its microbatches would be the same
        return plan

    @property
    def _stays_exact(self) -> bool:
        """Whether the microbatch in hand is an exact one of a trial in which others compress, or such a trial has shown
        that compressing does not pay."""
        turn = self.stage is Stage.TRIAL and self._trial.compresses and self._trial.turn is Turn.EXACT
        return turn or not self._pays.get(self._parts.planner.budget_bytes, True)

    def _say_prize(self, plan: Plan, storing: int) -> None:
        """What there is to win first, before anything is promised."""
        shape, seconds = self._replayed or (Shape(0, 0), 0.0)
        replays = [self.measurements.replay_seconds(name, shape) or 0.0 for _, name in self.measurements.roster]
        self.prize = Prize(
            self._parts.planner.budget_bytes,
            self.baseline.result().peak_bytes,
            seconds,
            sum(replays),
            plan.saved_seconds,
            plan.peak_bytes,
            storing,
        )
        for line in self.prize.lines():
            _log.info("hilore (rank %d): %s", self._parts.rank, line)

    def _sampling_plan(self, batch: Microbatch) -> Plan:
        """Stores the last unit of each class that was never stored."""
        wanted = frozenset(self.measurements.unmeasured_classes() - self._sampled)
        batch.sampled = wanted
        last = {unit_class: unit for unit, unit_class in self.measurements.roster}
        self._context.sample = self._sampler.note
        self._context.around_operator = self._sampler.timed
        how = SAMPLED if self._parts.techniques.kept_outputs else SAMPLED_WHOLE
        return all_units([unit for unit_class, unit in last.items() if unit_class in wanted], how)

    def begin(self, batch: Microbatch, shape: Shape, measured: bool) -> None:
        """The first unit of a microbatch is about to run, as `choose` has it.

        Args:
            measured: its peak may become "1.0x": there is optimizer state.
        """
        if self.stage is Stage.MEASURE_R:
            self.time_replays()
            self._started = self._parts.clock.start()
            if measured:
                self.baseline.begin(shape)
        elif self.stage is Stage.TRIAL:
            self._context.watch = self._trial.unpacked
            self._trial.begin(shape)
        elif self.stage is Stage.PLANNED and self.in_flight <= 1 and not batch.prunes:
            self._watch.begin(shape)
            self._guard.levels.begin(batch, self._parts.planner.planning_shape(shape))

    def around(self, unit: UnitId, treatment: Treatment, inputs: UnitInputs) -> AbstractContextManager[None]:
        """Around the forward of a unit."""
        if self.stage is Stage.TRIAL:
            return self._trial.forward_of(unit, treatment, inputs.shape)
        return self._measured_forward() if self.stage is Stage.MEASURE_R else nullcontext()

    @contextmanager
    def _measured_forward(self) -> Iterator[None]:
        yield
        self.baseline.unit_ran()

    # -- backward --------------------------------------------------------------------------------------------------

    def time_replays(self) -> None:
        """Replays from now on are timed, until the microbatch ends."""
        self._context.timing = self._timed_replay

    @contextmanager
    def _timed_replay(self, unit: UnitId) -> Iterator[None]:
        receive = self.measurements.replay_receiver(unit)
        started = self._parts.clock.start()
        yield
        self._parts.clock.stop(started, receive)

    def backward_begins(self, batch: Microbatch, bypassed: bool) -> None:
        """Forward and loss are over; the final plan is about to be applied."""
        if not self.settled and not bypassed:
            self.measurements.note_forward(footprints(batch.alive()))
        self.baseline.backward_begins()
        calls = batch.alive()
        told = self.risk.rules.limit > 0 and batch.coefficients and not batch.exact_only
        seen = None
        if told or any(call.statistics for call in calls):
            seen = self._read(batch, batch.coefficients if told else (), calls)
        self.exposed = seen if told else None
        self._risk = 0.0
        batch.follow(self._decide(batch, self.exposed), frozenset() if seen is None else seen.unusable)

    def _read(self, batch: Microbatch, told: Sequence[Coefficients], calls: Sequence[UnitCall]) -> Exposed:
        return read(told, calls, self._parts.reaches, batch.shape, self.risk.rules.linear)

    def _decide(self, batch: Microbatch, exposed: Exposed | None) -> Plan:
        """The second problem: what the prepared plan becomes, now that memory and coefficients are known."""
        level, row = self._watch.level_bytes(), batch.prepared
        if row is None or batch.shape is None:
            self.risk.pass_by(exposed)
            return batch.plan
        units = [unit.unit for unit in row.problem.units]
        now = None if exposed is None or self._stays_exact else self.risk.decide(exposed, units)
        planner, free = self._parts.planner, self._parts.meter.free_bytes()
        size = planner.planning_shape(batch.shape)
        decided = planner.decide(size, row, level, now, free)
        if decided is not row.plan and (short := planner.shortage(size, row, level, free)):
            self._guard.backward_short(short, row.plan, decided)
        if exposed is None or now is None:
            self.risk.pass_by(exposed)
        else:
            self.risk.note(exposed, decided.risk)
            self._risk = decided.risk
        return decided

    def hear_late(self, batch: Microbatch) -> None:
        """Coefficients have come once the plan of their microbatch was final: of a second backward that nobody
        announced. What was compressed falls short of them too, which is accounted for, if too late to be planned."""
        before, risk = self.exposed, self._risk
        if before is None:
            return  # nothing is compressed by plan
        self.exposed = self._read(batch, batch.coefficients, batch.alive())
        if not self._heard_late:
            self._heard_late = True
            _log.warning(
                "hilore (rank %d): coefficients came after the plan of their microbatch was final: its gradient error "
                "may be above what was planned; give retain_graph=True to engine.backward, and call observe_logps "
                "before it",
                self._parts.rank,
            )
        # Frozen exposures know nothing of the real ones.
        if risk > 0 and before.exposure > 0 and math.isfinite(self.exposed.exposure) and not self.risk.rules.static:
            self._risk = risk * self.exposed.exposure / before.exposure  # risk is linear in exposure
            self.risk.corrected(self._risk)

    def end(self, batch: Microbatch) -> None:
        """The backward of a microbatch is over."""
        if self._started is not None and batch.shape is not None:
            self._parts.clock.stop(self._started, partial(self._note_replayed, batch.shape))
            self._started = None
        self.baseline.end()
        self._watch.end(self.measurements, batch.treated)
        used = any(treatment.action is Action.COMPRESS for treatment in batch.treated.values())
        self._trial.end(encoded=used or batch.plan.count(Action.COMPRESS) > 0)
        if batch.sampled is not None and self.stage is Stage.MEASURE_H:
            self._sampled |= batch.sampled
            if not self.measurements.unmeasured_classes() - self._sampled:
                self._calibrate()

    def _note_replayed(self, shape: Shape, seconds: float) -> None:
        known = self._replayed
        if known is None or seconds * known[0].tokens < known[1] * shape.tokens:
            self._replayed = shape, seconds

    def quiet(self) -> None:
        """No microbatch is in hand: nothing is timed."""
        self._context.timing = lambda unit: nullcontext()
        self._context.watch = self._context.sample = None
        self._context.around_operator = nullcontext

    # -- updates ---------------------------------------------------------------------------------------------------

    def end_update(self, forced: bool, gradient_norm: float | None = None) -> None:
        """The optimizer has stepped on a reduced gradient of this norm (None: not known)."""
        self._parts.clock.collect()
        self.risk.end_update(gradient_norm)
        if self.stage is Stage.MEASURE_R and not forced and self.measurements.roster:
            self.baseline.step_done()
            if self.baseline.complete:
                self.stage = Stage.MEASURE_H
                if self.known and not self.measurements.unmeasured_classes():
                    self._calibrate()
                    self.stage = Stage.PLANNED
        elif self.stage is Stage.TRIAL and self._trial.over:
            self._end_trial()

    def _calibrate(self) -> None:
        baseline = self.baseline.result()
        profiles = {phase.shape: self.measurements.profiles(phase.shape) for phase in baseline.phases}
        self._parts.planner.calibrate(baseline, profiles, self.in_flight)
        self._context.lean_replay = not loss_leads(baseline, profiles)
        # Of several microbatches in flight, backwards do not follow their own forwards: nothing could be told apart.
        self.stage = Stage.TRIAL if self._trial.microbatches and self.in_flight <= 1 else Stage.PLANNED
        if self.stage is Stage.PLANNED:
            self.learnt(self.measurements)

    def _end_trial(self) -> None:
        self.stage = Stage.PLANNED
        self._context.watch = None
        if self._trial.over:
            verdict = self.verdict = self._trial.verdict()
            self._parts.planner.replan()
            _log.info("hilore (rank %d): %s", self._parts.rank, verdict)
            if verdict.compressed_s is not None:  # else risk allowed none, and another microbatch may try
                self._pays[self._parts.planner.budget_bytes] = not verdict.compression
                if verdict.compression:
                    self._say_exact(verdict.compression)
        self.learnt(self.measurements)

    def use_calibration(self, calibration: Calibration) -> None:
        """Compressed variants become known to plans, at the risk that was measured. None is chosen before `accept`."""

        def risk(unit: UnitId, treatment: Treatment) -> float | None:
            roster = self.measurements.roster  # of now: a stored calibration may be there before any unit is known
            place, unit_class = next((place, name) for place, (known, name) in enumerate(roster) if known == unit)
            parts = self.measurements.classes[unit_class].parts
            errors = {key: error_of(parts, pairs) for key, pairs in components(treatment.codecs).items()}
            return calibration.risk(place, len(roster), errors, unit)

        self.measurements.risk = risk
        self.measurements.outdate()
        self.risk.freeze(calibration.exposures())
        self.risk.trusted = False
        if self.settled:
            self._parts.planner.replan()

    def accept(self) -> None:
        """Predictions have held on microbatches that did not make them: plans may compress. Where trials are made, the
        first plan of a budget that would begins one, which shows whether that pays."""
        self.risk.trusted = True
        self._tries = self._parts.trial_microbatches > 0 and self.in_flight <= 1

    def refuse(self, reason: str) -> None:
        """Plans stay exact, for good."""
        self.risk.trusted = False
        self.measurements.risk = lambda unit, treatment: None
        self.measurements.outdate()
        if self.settled:
            self._parts.planner.replan()
        self._say_exact(reason)

    def _say_exact(self, reason: str) -> None:
        _log.warning("hilore (rank %d): nothing is compressed, plans are exact: %s", self._parts.rank, reason)

    def _try_compression(self) -> None:
        turns = max(self._parts.trial_microbatches, len(COMPRESSING))
        self._trial = Trial(self._parts.clock, self.measurements, turns, COMPRESSING)
        self.stage = Stage.TRIAL

    def disturbed(self) -> None:
        """Something else than the stage's own runs now: what is being measured tells nothing."""
        self.baseline.abort()
        self._watch.abort()

    def abort(self) -> None:
        """The microbatch in hand failed."""
        self.quiet()
        self.baseline.abort()
        self._watch.abort()
        self._trial.abort()
        self.risk.abort()
        self._started = None
