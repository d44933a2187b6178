"""Before any plan may compress: its predictions, judged on microbatches of the running job that made none of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from ds_hilore.core.fabric import ControlPlane, sum_over_ranks
from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action, Plan, Shape, UnitId
from ds_hilore.profiling.held_out import HeldOut, Outcome, Treatments
from ds_hilore.profiling.variants import compressions
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.risk import Exposed

_log = logging.getLogger(__name__)

#: Gives the gradient of a microbatch beside the engine under treatments; all ranks in step.
Gradients = Callable[[Treatments], Mapping[str, Any]]


class Judging:
    """Judges the calibration of one engine, microbatch by microbatch, on all ranks in step.

    Args:
        held_out: of the calibration that is judged.
        distance: error of one gradient against another, on the scale of exposures.
        finite: whether a gradient is; microbatches whose exact one is not on some rank judge nothing.
    """

    def __init__(
        self,
        controller: Controller,
        plane: ControlPlane,
        held_out: HeldOut,
        distance: Callable[[Mapping[str, Any], Mapping[str, Any]], float],
        finite: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self.held_out = held_out
        self._learning = controller.learning
        self._planner = controller.parts.planner
        self._plane = plane
        self._distance = distance
        self._finite = finite

    def judge(self, shape: Shape, exposed: Exposed, gradients: Gradients) -> Outcome | None:
        """One microbatch: the exact gradient, and one more for each pass that some rank wants.

        Returns:
            What follows from the round that ends with it; None while it goes on.
        """
        started = time.perf_counter()
        wanted = self.held_out.wanted(self._usable(shape), self._together(shape))
        asked = self._plane.exchange("held-out passes", [len(wanted), self.held_out.out_of_room])
        passes = max(count for count, _ in asked)
        if passes == 0 or any(stops for _, stops in asked):
            return self._close()
        exact = gradients({})
        if not all(self._plane.exchange("exact gradient is finite", self._finite(exact))):
            self.held_out.calibration.cost.note(time.perf_counter() - started, 1)
            return None
        seen = []
        for position in range(passes):
            treatments = wanted[position] if position < len(wanted) else {}
            near = gradients(treatments)  # under ZeRO-3 each pass gathers parameters
            predicted = self._predicted(treatments, exposed)
            if treatments and math.isfinite(predicted):
                seen.append((treatments, predicted, self._distance(near, exact)))
            del near  # one more gradient would be held while the next pass runs
        self._plane.exchange("held-out passes are over", None)  # one that fails on a rank counts on none
        self.held_out.begin()
        for each in seen:
            self.held_out.note(*each)
        self.held_out.calibration.cost.note(time.perf_counter() - started, passes + 1)
        return self._close() if self.held_out.full else None

    def _close(self) -> Outcome:
        measured, predicted = sum_over_ranks(self._plane, "held-out error", self.held_out.squares())
        return self.held_out.close(measured, predicted)

    def _usable(self, shape: Shape) -> list[tuple[UnitId, list[Treatment]]]:
        """Units with the variants that plans may choose, in forward order."""
        measurements = self._learning.measurements
        found = []
        for unit, name in measurements.roster:
            offered = compressions(measurements.classes[name].parts, shape)
            variants = [Treatment(Action.COMPRESS, codecs=codecs) for codecs in offered]
            usable = [variant for variant in variants if measurements.risk(unit, variant) is not None]
            if usable:
                found.append((unit, usable))
        return found

    def _together(self, shape: Shape) -> Treatments:
        """What a plan would compress if risk were nothing, so what memory has room for; of many every second unit, as
        two more gradients are held here."""
        size = self._planner.planning_shape(shape)
        found = self._planner.prepare(size, self._learning.measurements.profiles(size), math.inf)
        plan = found if isinstance(found, Plan) else found.plan
        planned = {unit: Treatment.parse(name) for unit, name in plan.choice.items()}
        compressed = [unit for unit, treatment in planned.items() if treatment.action is Action.COMPRESS]
        return {unit: planned[unit] for unit in (compressed[::2] if len(compressed) > 2 else compressed)}

    def _predicted(self, treatments: Treatments, exposed: Exposed) -> float:
        """The risk of these units together in this microbatch, as a plan would have it."""
        risk = self._learning.measurements.risk
        return math.hypot(*(exposed.of(unit) * (risk(unit, each) or 0.0) for unit, each in treatments.items()))
