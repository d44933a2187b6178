"""Gradient error measured in the running job: calibration of compressed state, and audits of whole updates.

Both compute a microbatch's gradient again beside the engine (beside.py), right after its own backward, on all ranks in
step. Calibration compresses one state group of one unit at a time and compares with the exact gradient; its fits say
what a plan risks. An audit differentiates every microbatch of one update exactly and compares the sum with the reduced
gradient that the optimizer is about to use, before clipping.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ds_hilore.core.fabric import ControlPlane, sum_over_ranks
from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action
from ds_hilore.integration.beside import Recorded, gradients_of, recording
from ds_hilore.integration.exact_gradient import averaged
from ds_hilore.profiling.calibrate import Calibration, Intervention, Observation
from ds_hilore.profiling.variants import components, compressions
from ds_hilore.recovery.encoded import Statistic
from ds_hilore.recovery.unit import UnitCall
from ds_hilore.runtime.controller import Controller

_log = logging.getLogger(__name__)

#: The first update whose microbatches calibrate: by then every rank has measured its units, and a gradient norm.
FIRST_UPDATE = 3


@dataclass(frozen=True)
class CheckRules:
    """When gradients are checked.

    Args:
        microbatches: that calibrate, at most; 0: never.
        audit_interval: updates from one audit to the next; 0: none.
    """

    microbatches: int
    audit_interval: int


@dataclass(frozen=True)
class Audit:
    """One audited update: relative error of its reduced gradient, as predicted by all ranks and as measured."""

    update: int
    predicted: float
    measured: float


class GradientChecks:
    """Follows one engine. `audits`: those so far. `seconds`: what all checks have taken on this rank.

    Backwards that do not come through `engine.backward` are not checked, so nothing is compressed where all are such.
    A check holds two more gradients of the trained parameters for as long as it takes.
    """

    def __init__(self, engine: Any, controller: Controller, plane: ControlPlane, rules: CheckRules) -> None:
        self.audits: list[Audit] = []
        self.seconds = 0.0
        self.calibration = Calibration()
        self._engine = engine
        self._controller = controller
        self._plane = plane
        self._rules = rules
        self._microbatches = 0  # of calibration, so far
        self._done = rules.microbatches == 0
        self._pairs: dict[str, dict[tuple[str, str], tuple[tuple[str, str], ...]]] = {}  # by unit class and component
        self._taken: list[Recorded] = []
        self._exact: dict[str, Tensor] | None = None  # of the audited update so far, as this rank's microbatches add up

    # -- when ------------------------------------------------------------------------------------------------------

    @property
    def calibrated(self) -> bool:
        """Whether calibration is over, or there is none."""
        return self._done

    @property
    def calibrating(self) -> bool:
        return not self._done and self._controller.update >= FIRST_UPDATE

    @property
    def auditing(self) -> bool:
        interval = self._rules.audit_interval
        return (
            self._done
            and interval > 0
            and self._controller.update % interval == 0
            and self._controller.learning.risk.active
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the engine."""
        if not (self.calibrating or self.auditing):
            yield
            return
        with recording(self._engine) as taken:
            yield
        self._taken += taken

    def backward_done(self) -> None:
        """The backward of a microbatch is over; every rank is here."""
        taken, self._taken = [each for each in self._taken if each.complete], []
        if not taken:
            return
        started = time.perf_counter()
        if self.calibrating:
            self._calibrate(taken[-1])
        elif self.auditing:
            for each in taken:
                self._add_exact(gradients_of(self._engine, self._controller, each, {}))
        self.seconds += time.perf_counter() - started

    def abort(self) -> None:
        """The update starts again."""
        self._taken.clear()
        self._exact = None

    # -- calibration -----------------------------------------------------------------------------------------------

    def _calibrate(self, recorded: Recorded) -> None:
        """One microbatch: the exact gradient, and one more for each intervention."""
        started = time.perf_counter()
        wanted = self._interventions()
        # A rank with fewer of them keeps step all the same: under ZeRO-3 each pass gathers parameters.
        asked = self._plane.exchange("calibration passes", [len(wanted), self._controller.learning.settled])
        passes = max(count for count, _ in asked)
        if passes == 0 and not all(measured for _, measured in asked):
            return  # nothing to ask only because some rank has not measured its units yet
        exact = gradients_of(self._engine, self._controller, recorded, {})
        for position in range(passes):
            if position < len(wanted):
                self._intervene(recorded, wanted[position], exact)
            else:
                gradients_of(self._engine, self._controller, recorded, {})
        self._microbatches += 1
        self.calibration.cost.update_seconds = self._controller.learning.update_seconds
        self.calibration.cost.note(time.perf_counter() - started, passes + 1)
        if self._microbatches >= self._rules.microbatches or passes == 0:
            self._finish()

    def _interventions(self) -> list[Intervention]:
        measurements = self._controller.measurements
        units = [(unit, position, name) for position, (unit, name) in enumerate(measurements.roster)]
        shape = self._controller.microbatch.shape
        assert shape is not None, "a microbatch has run"
        self._pairs.clear()
        for name, fits in measurements.classes.items():
            offered = [components(codecs) for codecs in compressions(fits.parts, shape)]
            self._pairs[name] = {key: pairs for each in offered for key, pairs in each.items()}
        return self.calibration.interventions(self._microbatches, units, self._pairs)

    def _intervene(self, recorded: Recorded, wanted: Intervention, exact: Mapping[str, Tensor]) -> None:
        found: list[Statistic] = []

        def look(call: UnitCall) -> None:
            found.extend(call.statistics)

        unit_class = dict(self._controller.measurements.roster)[wanted.unit]
        pairs = self._pairs[unit_class][(wanted.place.group, wanted.place.codec)]
        treatment = Treatment(Action.COMPRESS, codecs=pairs)
        near = gradients_of(self._engine, self._controller, recorded, {wanted.unit: treatment}, look)
        exposed = self._controller.learning.exposed
        if not found or exposed is None:
            return
        self.calibration.note(
            Observation(
                place=wanted.place,
                unit=wanted.unit,
                microbatch=wanted.microbatch,
                exposure=exposed.of(wanted.unit),
                encoding_error=_mean_error(found),
                # the engine averages over ranks what each of them differentiates
                gradient_error=distance(near, exact) / self._plane.world_size,
            )
        )

    def _finish(self) -> None:
        self._done = True
        learning = self._controller.learning
        learning.use_calibration(self.calibration)
        if self._plane.rank == 0:
            for line in self.calibration.lines():
                _log.info("hilore: %s", line)

    # -- audits ----------------------------------------------------------------------------------------------------

    def _add_exact(self, gradients: dict[str, Tensor]) -> None:
        if self._exact is None:
            self._exact = gradients
            return
        for name, gradient in gradients.items():
            self._exact[name].add_(gradient)

    def before_step(self) -> None:
        """The update's gradients are complete, the optimizer has not stepped; every rank is here."""
        self._taken.clear()  # of backwards that did not come through the engine
        if self._exact is None:
            return
        started = time.perf_counter()
        exact, self._exact = averaged(self._engine, self._exact), None
        square = reference = 0.0
        for name, parameter in self._engine.module.named_parameters():
            if name in exact:
                used = reduced_gradient(self._engine, parameter)
                truth = exact[name].double()
                reference += float(truth.square().sum())
                square += float(((0 if used is None else used.double()) - truth).square().sum())
        squares = [risk * risk for risk in self._controller.learning.risk.spent]
        (predicted,) = sum_over_ranks(self._plane, "audit", [math.fsum(squares)])
        norm = math.sqrt(reference)
        self.seconds += time.perf_counter() - started
        if norm > 0:
            audit = Audit(self._controller.update, math.sqrt(predicted) / norm, math.sqrt(square) / norm)
            self.audits.append(audit)
            self.calibration.note_audit(audit.predicted, audit.measured)
            self._controller.learning.risk.correction = 1.0 / self.calibration.coherence
            if self._plane.rank == 0:
                said = "hilore: audit of update %d: error %.2e, predicted %.2e"
                _log.info(said, audit.update, audit.measured, audit.predicted)


def reduced_gradient(engine: Any, parameter: nn.Parameter) -> Tensor | None:
    """What the optimizer will use of a parameter, whole; a collective of all ranks under ZeRO-1 and above."""
    from deepspeed.utils import safe_get_full_grad

    found: Tensor | None = safe_get_full_grad(parameter) if engine.zero_optimization_stage() else parameter.grad
    return found


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two gradients."""
    return math.sqrt(sum(float((gradient - other[name]).double().square().sum()) for name, gradient in one.items()))


def _mean_error(found: list[Statistic]) -> float:
    """e of design section 3: root mean square over the tensors of the group."""
    squares = [float(each.squares[0] / each.squares[1]) if float(each.squares[1]) else 0.0 for each in found]
    return math.sqrt(math.fsum(squares) / len(squares))
