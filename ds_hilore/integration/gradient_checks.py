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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ds_hilore.core.fabric import ControlPlane, sum_over_ranks
from ds_hilore.integration.audits import Audit, AuditedUpdate, reduced_error
from ds_hilore.integration.beside import Recorded, Recording, gradients_of, recording
from ds_hilore.integration.gradient_distance import distance, is_finite
from ds_hilore.integration.held_out import Judging
from ds_hilore.integration.interventions import Interventions
from ds_hilore.memory.refused import refused_bytes
from ds_hilore.profiling.calibrate import Calibration
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.calibration_layout import Progress
from ds_hilore.profiling.held_out import MICROBATCHES, HeldOut, Outcome
from ds_hilore.runtime.controller import Controller

_log = logging.getLogger(__name__)

#: The first update whose microbatches calibrate: by then every rank has measured its units, and a gradient norm.
FIRST_UPDATE = 3

#: Microbatches in a row that could not calibrate, after which calibration is given up: each was recorded in vain.
MOST_SKIPPED = 100


@dataclass(frozen=True)
class CheckRules:
    """When gradients are checked.

    Args:
        microbatches: that calibrate, at most; 0: never.
        audit_interval: updates from one audit to the next; 0: none.
    """

    microbatches: int
    audit_interval: int


class GradientChecks:
    """Follows one engine. `audits`: those so far. `seconds`: what all checks have taken on this rank.

    Whether a microbatch calibrates or is audited is the same on all ranks. Whether it can be is not: ranks tell each
    other, and all leave it where one cannot. Backwards that do not come through `engine.backward` are not checked, so
    nothing is compressed where all are such.

    Memory: a check holds two whole gradients of the trained parameters in float32 beside the engine's own (the exact
    one, or the sum of those of an audited update, and that of the pass at hand), and an audit one of them from its
    first backward to the step. Where a rank has no memory for that, the update fails on all, and runs again without
    such checks. Not so in a collective of the engine (under ZeRO-3 in any pass; in the comparison of an audit above
    ZeRO-0): there the other ranks wait until the communicator gives up.
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
        self._compresses = False  # plans may, for all that the checks have found
        self._interventions = Interventions(controller)
        self._judging: Judging | None = None  # once slopes are fitted
        self._keep: Callable[[Progress], object] = lambda progress: None
        self._skipped = 0  # microbatches in a row that could not calibrate
        self._taken: list[Recorded] = []
        self._begun = False  # a forward of the update has been
        self._backwards = 0  # of the update, through the engine
        self._audit: AuditedUpdate | None = None
        self._elsewhere = False  # some backwards do not come through the engine
        self._checking = False  # a check is at work
        self._too_large = False  # the newest one found no memory on this rank, and ranks do not know it yet
        self._audits_fit = True
        self._resumed = False  # slopes are partly or all of an earlier run
        self._exposures: list[float] = []  # of this run's microbatches that fitted or judged

    def go_on(self, found: Progress | None, keep: Callable[[Progress], object] | None = None) -> None:
        """Goes on where an earlier run of this setting was; every rank is here. Where ranks do not know of the same
        point (a file is gone, or not fit to be read) all calibrate anew.

        Slopes depend on weights, and a setting says nothing of those: what an earlier run has accepted is judged again,
        on microbatches of this one, before anything is compressed.

        Args:
            found: None: this rank knows of none.
            keep: told where calibration is, whenever that changes; None: who was told before.
        """
        self._keep = keep or self._keep
        points = self._plane.exchange("stored calibration", None if found is None else found.point)
        if found is None:
            return
        if any(point != found.point for point in points):
            said = "hilore (rank %d): the stored calibration is not used, it is made anew: ranks were at %s"
            _log.warning(said, self._plane.rank, points)
            return
        self.calibration, self._microbatches, self._resumed = found.calibration, found.microbatches, True
        self._controller.learning.risk.correction = 1.0 / self.calibration.coherence
        if found.accepted:  # its run paid for what it took, and was told how good predictions were
            cost = self.calibration.cost
            self.calibration.cost = Cost(0.0, min(1, cost.passes), cost.slowest, cost.update_seconds)
            self.calibration.judgements.clear()
        if found.fitted:
            self._fitted()

    @property
    def progress(self) -> Progress:
        """How far calibration is, for a run that goes on from here; at its beginning where it was refused: another run
        may have better luck."""
        if self._done and not self._compresses:
            return Progress()
        fitted = self._done or self._judging is not None
        return Progress(self.calibration, self._microbatches, fitted, self._compresses)

    def _store(self) -> None:
        self._keep(self.progress)

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
            self._compresses
            and self._audits_fit
            and interval > 0
            and self._controller.update % interval == 0
            and self._controller.learning.risk.active
        )

    @contextmanager
    def forward(self) -> Iterator[Recording | None]:
        """Around a forward of the engine; its result must leave through the recording, where there is one."""
        if not self._begun:  # only a whole update can be audited
            self._begun = True
            self._drop_what_does_not_fit()
            self._audit = AuditedUpdate() if self.auditing else None
        if self._elsewhere or not (self.calibrating or self._audit is not None):
            yield None
            return
        with recording(self._engine, self._controller.context.rng_tracker) as made:
            yield made
        self._taken += made.taken

    def backward_done(self) -> None:
        """The backward of a microbatch is over; every rank is here."""
        self._backwards += 1
        with self._at_work():
            if self.calibrating:
                taken, self._taken = self._taken, []
                self._calibrate(taken)
            elif self._audit is not None:
                taken = [each for each in self._taken if each.complete]
                self._taken = [each for each in self._taken if not each.complete]  # may have a backward of their own
                self._add_exact(self._audit, taken)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Around a check. One that raises leaves it noted, for `abort`."""
        self._checking, started = True, time.perf_counter()
        yield
        self._checking = False
        self.seconds += time.perf_counter() - started

    def abort(self, error: BaseException | None = None) -> None:
        """The update starts again.

        Args:
            error: that it ended in. Memory that a check did not find would be missing again and again.
        """
        if self._checking and error is not None and refused_bytes(error) is not None:
            self._too_large = True
        self._checking = False
        self._taken.clear()
        self._begun, self._backwards, self._audit = False, 0, None

    def _drop_what_does_not_fit(self) -> None:
        """An update begins, again it may be; every rank is here."""
        if not (self.calibrating or self.auditing):
            return
        # Where one rank alone failed, the others are elsewhere at first: what it found stands until all have met here.
        short = any(self._plane.exchange("gradient checks fit in memory", self._too_large))
        self._too_large = False
        if not short:
            return
        if self.calibrating:
            self._finish("a pass of calibration did not fit in memory")
            return
        self._audits_fit = False
        if self._plane.rank == 0:
            _log.warning("hilore: an audit did not fit in memory: there are none any more")

    # -- calibration -----------------------------------------------------------------------------------------------

    def _calibrate(self, taken: list[Recorded]) -> None:
        """One microbatch: the exact gradient, and one more for each intervention; predictions are judged on others.

        A microbatch of several forwards, one that did not run as units of ours, or whose loss told no coefficients
        cannot say what exposure its error belongs to. One without exposure on any rank (groups whose rewards are all
        equal) says nothing, and its passes would use up what the next ones may cost. One whose exposure or exact
        gradient is not finite on some rank is left out on all: that is no error of compressed state, which must not be
        condemned for it.
        """
        learning = self._controller.learning
        exposed = learning.exposed if self._controller.microbatch.shape is not None else None
        usable = len(taken) == 1 and taken[0].complete and exposed is not None
        finite = exposed is None or math.isfinite(exposed.exposure)
        tells = exposed is not None and exposed.exposure != 0
        told = self._plane.exchange("microbatch calibrates", [usable, finite, tells])
        if not all(each for each, _, _ in told):
            self._skip()
            return
        self._skipped = 0
        if not all(each for _, each, _ in told) or not any(each for _, _, each in told):
            return
        assert exposed is not None, "this rank is one of those that told coefficients"
        self._exposures.append(exposed.exposure)
        if self._judging is None:
            self._fit(taken[0])
        else:
            self._judge(taken[0], self._judging)

    def _fit(self, recorded: Recorded) -> None:
        learning, started = self._controller.learning, time.perf_counter()
        wanted = self._interventions.wanted(self.calibration, self._microbatches)
        # A rank with fewer of them keeps step all the same: under ZeRO-3 each pass gathers parameters.
        asked = self._plane.exchange("calibration passes", [len(wanted), learning.settled])
        passes = max(count for count, _ in asked)
        if passes == 0 and not all(measured for _, measured in asked):
            return  # nothing to ask only because some rank has not measured its units yet
        again = partial(gradients_of, self._engine, self._controller, recorded)
        exact = again({})
        if not all(self._plane.exchange("exact gradient is finite", is_finite(exact))):
            self.calibration.withdraw(wanted)
            self.calibration.cost.note(time.perf_counter() - started, 1)
            return
        seen = []
        for position in range(passes):
            if position >= len(wanted):
                again({})
                continue
            seen.append(self._interventions.observe(wanted[position], again, partial(self._error, exact=exact)))
        self._plane.exchange("calibration passes are over", None)  # one that fails on a rank counts on none
        for observed in seen:
            if observed is not None:
                self.calibration.note(observed)
        self._microbatches += 1
        self.calibration.cost.update_seconds = learning.update_seconds
        self.calibration.cost.note(time.perf_counter() - started, passes + 1)
        if self._microbatches >= self._rules.microbatches or passes == 0:
            self._fitted()
        self._store()

    def _fitted(self) -> None:
        """Slopes are known."""
        self._controller.learning.use_calibration(self.calibration)
        if self._controller.learning.risk.rules.linear:  # mode paper has none of what follows
            self._finish("")
            return
        held_out = HeldOut(self.calibration, min(MICROBATCHES, self._rules.microbatches))
        self._judging = Judging(self._controller, self._plane, held_out, self._error, is_finite)

    def _judge(self, recorded: Recorded, judging: Judging) -> None:
        learning, shape = self._controller.learning, self._controller.microbatch.shape
        assert learning.exposed is not None and shape is not None, "see _calibrate"
        if not all(self._plane.exchange("plans are known", learning.settled)):
            return  # what was stored has slopes before this run has plans
        if learning.update_seconds is not None:
            self.calibration.cost.update_seconds = learning.update_seconds
        again = partial(gradients_of, self._engine, self._controller, recorded)
        outcome = judging.judge(shape, learning.exposed, again)
        if outcome is Outcome.AGAIN:
            learning.use_calibration(self.calibration)  # its slopes were raised
        elif outcome is not None:
            self._finish("" if outcome is Outcome.HOLDS else str(judging.held_out))
        if not self._done:
            self._store()

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped >= MOST_SKIPPED:
            if self._plane.rank == 0:
                said = "hilore: %d microbatches in a row could not calibrate: nothing is compressed. Calibration needs "
                _log.warning(said + "one forward per engine.backward, and a loss that tells coefficients", MOST_SKIPPED)
            self._finish("calibration was given up")

    def _error(self, near: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
        # the engine averages over ranks what each of them differentiates
        return distance(near, exact) / self._plane.world_size

    def _finish(self, refused: str) -> None:
        """Calibration is over, on all ranks alike. `refused`: why nothing is compressed; "" where plans may."""
        self._done, self._compresses = True, not refused
        if self._plane.rank == 0:
            for line in self.calibration.lines():
                _log.info("hilore: %s", line)
            if self._judging is not None:
                _log.info("hilore: %s", self._judging.held_out)
        learning = self._controller.learning
        if refused:
            learning.refuse(refused)
            self._store()
        else:
            if self._resumed:  # exposures are absolute: those of an earlier run were of other weights, or another scale
                learning.risk.freeze(self._exposures)
            learning.accept()
            self._store()

    # -- audits ----------------------------------------------------------------------------------------------------

    def _add_exact(self, audit: AuditedUpdate, taken: list[Recorded]) -> None:
        """The forwards of one microbatch; every rank is here."""
        counts = self._plane.exchange("audited forwards", len(taken))
        # Under ZeRO-3 each pass gathers parameters. And of a rank that has seen no gradient at its outputs (its loss
        # does not use them) nothing is known, not even that it adds none.
        if min(counts) == 0 or min(counts) < max(counts):
            self._audit = None
            return
        for each in taken:
            audit.add(gradients_of(self._engine, self._controller, each, {}))
        audit.backwards += 1

    def before_step(self) -> None:
        """The update's gradients are complete, the optimizer has not stepped; every rank is here."""
        elsewhere = any(each.complete for each in self._taken)
        if elsewhere:
            self._say_elsewhere()
        audit, backwards = self._audit, self._backwards
        self._taken.clear()  # also forwards that were never differentiated
        self._begun, self._backwards, self._audit = False, 0, None
        if audit is None:
            return
        whole = not elsewhere and audit.backwards == backwards > 0
        if all(self._plane.exchange("audited update is whole", whole)):
            with self._at_work():
                self._compare(audit.exact)

    def _say_elsewhere(self) -> None:
        """What is recorded of such backwards waits for the step: a gradient of the outputs for each microbatch."""
        self._elsewhere = True
        _log.warning(
            "hilore (rank %d): a backward did not end in engine.backward: gradients are not checked any more. What is "
            "compressed stays as it was calibrated, and nothing is where calibration is not over",
            self._plane.rank,
        )

    def _compare(self, added: dict[str, Tensor]) -> None:
        """`added` is used up: one more whole gradient would be held."""
        error, norm = reduced_error(self._engine, added)
        rules, spent = self._controller.learning.risk.rules, self._controller.learning.risk.spent
        (cost,) = sum_over_ranks(self._plane, "audit", [math.fsum(map(rules.cost, spent))])
        if 0 < norm < math.inf:
            audit = Audit(self._controller.update, rules.risk(cost) / norm, error / norm)
            self.audits.append(audit)
            self.calibration.note_audit(audit.predicted, audit.measured)
            self._store()
            self._controller.learning.risk.correction = 1.0 / self.calibration.coherence
            if self._plane.rank == 0:
                said = "hilore: audit of update %d: error %.2e, predicted %.2e"
                _log.info(said, audit.update, audit.measured, audit.predicted)
