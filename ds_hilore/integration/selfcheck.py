"""The self-check: the first updates that follow plans against the plain model, in the running job.

Of one microbatch of each, what the engine's own backward gives every parameter on this rank is sketched as it comes
(sketch.py), before ranks reduce it. Right after that the microbatch is differentiated once more beside the engine
(beside.py), its units under torch's own checkpoint function, and sketched too; no gradient is held.

NOTE [Self-check rules]
S1  A fault in one unit's state reaches the gradients of that unit and of those before it, never of those behind. So
    the unit that is named is the last one in forward order that is off. A fault that only reaches the unit's input
    gradient shows first in the unit before.
S2  A parameter is judged by how far it is off, relative to the gradient of its whole unit: single parameters may have
    one that is zero but for rounding (a bias of keys), which no two orders of summation share.
S3  Exact plans run the plain model's operations in its order, so they have its bits in every dtype. What adds up in
    another order (pruned units, several forwards, compiled modules) may differ by roundings of the parameters' dtype.
S4  Where plans compress, the whole gradient is judged, by the error that was predicted.
S5  What looks wrong is first compared with a second pass of the plain model: kernels that do not give the same twice
    are no fault of a plan. A model whose forward does not give the same outputs again is not checked at all.
S6  Parameters that the loss reaches by other paths than the engine's outputs are left out (other_paths.py); where
    one of them belongs to a unit, nothing can be told.
S7  Ranks decide everything together: what is asked of one is asked of all, and all raise the same error, or none.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ds_hilore.core.errors import GradientMismatch
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.treatment import REPLAYED
from ds_hilore.core.types import Action
from ds_hilore.integration.beside import Recording, outputs_of, recording
from ds_hilore.integration.exact_gradient import trainable
from ds_hilore.integration.gradient_difference import Difference, UnitNorms
from ds_hilore.integration.other_paths import mark_leaving, reached_otherwise
from ds_hilore.integration.plain_gradient import TOO_LARGE, PlainGradient, Taken, plain_gradient, roundings
from ds_hilore.integration.sketch import GradientTap, Sketcher, Sketches
from ds_hilore.memory.refused import refused_bytes
from ds_hilore.recovery.routing import is_compiled
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.microbatch import Microbatch
from ds_hilore.runtime.parts import Stage

_log = logging.getLogger(__name__)

#: The first update that can follow a plan: the ones before measure.
FIRST_UPDATE = 2
#: Updates that could have been checked, and were not, after which there are no more attempts; the last one is checked
#: even if it replays everything.
PATIENCE = 20
#: Why an update is passed over without a word: ranks are still learning.
_LEARNING = "plans are not followed yet"

#: Relative difference of exact plans: norms of this size are below what any sum in float32 is right to.
EXACT_BOUND = 1e-6
#: Predictions are root mean squares over microbatches; one alone may be this many times as far off (S4).
LOSSY_MARGIN = 5.0
#: Two passes of the plain model differ by as much as each of them differs from the plan's, and chance is uneven (S5).
NOISE_MARGIN = 5.0


class Leaving:
    """What the result of a forward leaves through, as through a `Recording`."""

    def __init__(self, check: SelfCheck, made: Recording, first: bool, state: list[tuple[int, int]]) -> None:
        self._check, self._made, self._first, self._state = check, made, first, state

    def leaving(self, result: Any) -> Any:
        return self._check.left(result, self._made, self._first, self._state)


class SelfCheck:
    """Follows one engine until `updates` of its planned updates were checked; `over` from then on.

    Memory: the gradient at the outputs is held from the backward of the checked microbatch until its check, and the
    outputs are made once more; asked for before (`_short_of`). Else a check needs no more than replaying everything.

    Attributes:
        updates: that were checked.
        largest: relative difference so far, over all ranks.
        seconds: what all of it took on this rank.
        passed_over: why an update was not checked, the newest reason; "" where all were.
    """

    def __init__(self, engine: Any, controller: Controller, plane: ControlPlane, updates: int) -> None:
        self.updates, self.largest, self.seconds, self.passed_over = 0, 0.0, 0.0, ""
        self._engine = engine
        self._controller = controller
        self._plane = plane
        self._left = updates
        self._asked = 0  # updates of which ranks have asked each other whether to check them
        self._sketcher = Sketcher()
        self._compiled = any(is_compiled(module) for module in engine.module.modules())
        self._too_large = False  # a check found no memory on this rank; the others do not know yet
        self._restart()

    def _restart(self) -> None:
        self._batch: Microbatch | None = None  # the first of the update, once its forward has begun
        self._due = False  # it is checked
        self._taken: list[Taken] = []
        self._found = Sketches(self._sketcher)  # of what the engine gave to parameters
        self._otherwise: set[str] = set()  # parameters that get more than what came through its outputs

    @property
    def over(self) -> bool:
        return self._left == 0

    # -- told by the host ------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[Leaving | None]:
        """Around a forward of the engine; its result must leave through what this gives, where it gives anything."""
        if self.over:
            yield None
            return
        first = self._batch is None
        if first:
            self._batch = self._controller.microbatch
        elif self._batch is not self._controller.microbatch:
            self._taken.clear()  # its backward did not come through the engine: nothing more is held for it
        follows = self._controller.update >= FIRST_UPDATE or self._controller.progress()["forced"]
        if not (follows if first else self._due and self._taken):
            yield None
            return
        state = self._buffers()
        with recording(self._engine, self._controller.context.rng_tracker) as made:
            yield Leaving(self, made, first, state)

    def left(self, result: Any, made: Recording, first: bool, state: list[tuple[int, int]]) -> Any:
        """A forward has given `result`. Of the first one of an update all ranks say whether it is checked."""
        if first:
            reason = self._reason(result, made, state)
            told = self._plane.exchange("self-check", [reason, self._is_planned()])
            self._due = self._decide(told)
        if not self._due:
            return result
        taken = Taken.of(made.taken[-1], outputs_of(result), self._sketcher)
        self._taken.append(taken)
        self._note_other_paths(taken.arguments)
        left = made.leaving(result)
        mark_leaving(outputs_of(left), self)
        return left

    def _note_other_paths(self, tensors: Iterable[Tensor]) -> None:
        self._otherwise |= reached_otherwise(tensors, trainable(self._engine.module), self)

    def _decide(self, told: list[list[Any]]) -> bool:
        """Whether the update is checked, from every rank's reason not to, and whether it follows a plan that tells."""
        self._asked += any(reason != _LEARNING for reason, _ in told)
        if self._asked > PATIENCE:
            self._end()
            return False
        tells = any(planned for _, planned in told) or self._asked == PATIENCE
        return self._agreed([reason for reason, _ in told]) and tells

    @contextmanager
    def backward(self, loss: Any) -> Iterator[None]:
        """The engine's backward runs inside."""
        if not self._due:
            yield
            return
        self._note_other_paths([loss] if isinstance(loss, Tensor) else [])
        tap = GradientTap(trainable(self._engine.module), self._found.add)
        tap.open_for_engine()
        try:
            yield
        finally:
            tap.close()
        self._controller.learning.disturbed()  # its peak is not the plan's

    def backward_done(self) -> None:
        """The backward of a microbatch is over; every rank is here.

        Raises:
            GradientMismatch: on every rank.
        """
        if not self._due:
            return
        started = time.perf_counter()
        try:
            self._check()
        finally:
            self.seconds += time.perf_counter() - started
        batch = self._batch
        self._restart()
        self._batch = batch  # of the update's microbatches no other is checked

    def end_update(self) -> None:
        """The optimizer has stepped; every rank is here."""
        if self._due:
            self.passed_over = "the backward did not come through engine.backward"
        self._restart()

    def abort(self, error: BaseException | None = None) -> None:
        """The update starts again."""
        if self._due and error is not None and refused_bytes(error) is not None:
            self._too_large = True
        self._restart()

    # -- whether ---------------------------------------------------------------------------------------------------

    def _reason(self, result: Any, made: Recording, state: list[tuple[int, int]]) -> str:
        """Why the microbatch whose forward is over cannot be checked on this rank; "": it can."""
        forced = self._controller.progress()["forced"]
        if self._controller.learning.stage is not Stage.PLANNED and not forced:
            return _LEARNING
        if len(made.taken) != 1:
            return f"a forward of the engine called its module {len(made.taken)} times"
        if self._buffers() != state:
            return "the model's forward changes its buffers, so it cannot run a second time"
        outputs = outputs_of(result)
        if not outputs:
            return "no output of the engine needs a gradient"
        return self._short_of(sum(output.numel() * output.element_size() for output in outputs))

    def _short_of(self, output_bytes: int) -> str:
        """What is missing for the gradient at the outputs and for outputs of a second forward, beside the plan."""
        if self._too_large:
            return TOO_LARGE
        meter, plan = self._controller.parts.meter, self._controller.plan
        free = meter.free_bytes()
        baseline = self._controller.learning.baseline
        replayed = baseline.result().peak_bytes if baseline.complete else 0
        needed = max(0, max(plan.peak_bytes, replayed) - meter.level_bytes()) + 2 * output_bytes
        if free is None or free >= needed:
            return ""
        return f"it might need {needed:,} bytes, and {free:,} are free"

    def _is_planned(self) -> bool:
        return any(treatment != REPLAYED for treatment in self._controller.microbatch.treated.values())

    def _buffers(self) -> list[tuple[int, int]]:
        return [(buffer.data_ptr(), buffer._version) for buffer in self._engine.module.buffers()]

    def _agreed(self, reasons: list[str]) -> bool:
        """Whether no rank has a reason to pass this update over; what is found is the same on all ranks."""
        if TOO_LARGE in reasons:
            self.passed_over = TOO_LARGE
            self._end()
            return False
        wrong = [reason for reason in reasons if reason]
        self.passed_over = wrong[0] if wrong else self.passed_over
        return not wrong

    # -- one microbatch --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        taken = [each for each in self._taken if each.recorded.complete]
        told = self._plane.exchange("self-check begins", [self._unfit(taken), len(taken)])
        if not self._agreed([reason for reason, _ in told]):
            return
        if len({count for _, count in told}) > 1:
            self.passed_over = "ranks made different numbers of forwards"
            return
        again = partial(plain_gradient, self._engine, self._controller, taken, self._sketcher)
        exact = again()
        norms = UnitNorms([unit.name for unit in self._controller.microbatch.treated], exact.found.norms())
        reason = exact.reason if math.isfinite(norms.whole) else exact.reason or "the exact gradient is not finite"
        seen = Difference(0.0, 0.0, "", "")
        if not reason:
            judge = norms.compressed if self._compresses() else norms.exact
            off = self._found.distances(exact.found)
            known = {name: distance for name, distance in off.items() if name not in self._otherwise}
            seen = judge(known, self._allowed(norms.whole, exact, taken))
        told = self._plane.exchange("self-check sees", [reason, norms.whole > 0, seen.wrong])
        if not self._agreed([why for why, _, _ in told]):
            return
        if not any(tells for _, tells, _ in told):
            self.passed_over = "the exact gradient is zero on every rank"
            return
        if any(wrong for _, _, wrong in told):
            second = again()
            if not self._agreed(self._plane.exchange("self-check sees again", second.reason)):
                return
            noise = norms.by_unit(second.found.distances(exact.found)).values()
            allowed = NOISE_MARGIN * max((off for off, _ in noise), default=0.0)
            seen = replace(seen, allowed=max(seen.allowed, allowed))
        self._tell(seen)

    def _unfit(self, taken: list[Taken]) -> str:
        """Why the microbatch whose backward is over cannot be checked after all; "": it can."""
        if not taken:
            return "no gradient came to the engine's outputs in engine.backward"
        units = tuple(f"{unit.name}." for unit in self._controller.microbatch.treated)
        if any(name.startswith(units) for name in self._otherwise):
            return "the loss reaches units of the model by other paths than its outputs"
        if any(each.edited for each in taken):
            return "what the model was called with was written into after its forward"
        if self._compresses() and self._predicted() is None:
            return "it compresses, and nobody predicted its error"
        return ""

    def _compresses(self) -> bool:
        return Action.COMPRESS in self._controller.microbatch.ran.values()

    def _predicted(self) -> float | None:
        """The error that this rank's plan was predicted to add to its own gradient, absolute: predictions are of the
        mean over ranks. The microbatch is the first of its update."""
        spent = self._controller.learning.risk.spent
        return spent[0] * self._plane.world_size if len(spent) == 1 else None

    def _allowed(self, whole: float, exact: PlainGradient, taken: list[Taken]) -> float:
        """S3, S4. `whole`: norm of the exact gradient."""
        batch, bound = self._controller.microbatch, EXACT_BOUND
        if batch.prunes or batch.continued or len(taken) > 1 or self._compiled or not exact.repeats:
            bound = max(bound, roundings(self._engine.module, taken))
        predicted = self._predicted() if self._compresses() else None
        if not predicted or whole == 0:
            return bound
        return bound + LOSSY_MARGIN * predicted * float(taken[0].recorded.loss_scale) / whole

    def _tell(self, seen: Difference) -> None:
        """S7.

        Raises:
            GradientMismatch: some rank's difference is more than is allowed.
        """
        treated = {unit.name: treatment.name for unit, treatment in self._controller.microbatch.treated.items()}
        told = self._plane.exchange("self-check found", [*seen.payload(), treated.get(seen.unit, "")])
        found = [Difference(*each[:-1]) for each in told]
        self.largest = max(self.largest, *(each.relative for each in found))
        rank = max(range(len(found)), key=lambda k: found[k].excess)
        if found[rank].wrong:
            raise GradientMismatch(
                f"self-check of update {self._controller.update}: the gradient of rank {rank} is "
                f"{found[rank].described(told[rank][-1])}. The optimizer has not stepped. Please report it; until the "
                'cause is found, train with "hilore": {"enabled": false}'
            )
        self.updates += 1
        self._asked = 0
        self._left -= 1
        if self.over:
            self._end()

    def _end(self) -> None:
        complete, self._left, self._sketcher = self._left == 0, 0, Sketcher()
        if self._plane.rank != 0:
            return
        if self.updates:
            said = "hilore: self-check: %d updates had the plain model's gradients, %s; it took %.1f s"
            how = f"at most {self.largest:.1e} off" if self.largest else "to the last bit"
            _log.info(said, self.updates, how, self.seconds)
        if not complete:
            _log.warning("hilore: self-check: gradients are not checked any more: %s", self.passed_over)
