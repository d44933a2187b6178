"""Peaks of planned microbatches, where reading them costs next to nothing: what was foreseen is held to what came. And
what others hold of the device, which a budget of "auto" keeps out of."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ds_hilore.core.budget import BudgetKind
from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Shape, UnitId
from ds_hilore.memory.meter import PeakMeter
from ds_hilore.profiling.measure import Measurements
from ds_hilore.runtime.baseline import BaselineMeter
from ds_hilore.runtime.budget import PhasePeaks, RankPlanner

_log = logging.getLogger(__name__)

#: A budget of "auto" changes in steps of this share of the device, so that few plans serve whatever others do.
STEP = 1 / 64


class PeakWatch:
    """Follows one microbatch at a time; tells the planner, which then leaves more room where a base was too low.

    Idle where the meter's peaks mean nothing in the ordinary course of a run (CPU under glibc's own settings). It never
    resets the meter, which others read too: a peak tells something only where it is a new one, and those that break a
    budget are.
    """

    def __init__(self, meter: PeakMeter, planner: RankPlanner, baseline: BaselineMeter) -> None:
        self._meter = meter
        self._planner = planner
        self._baseline = baseline
        self._highest = 0
        self._shape: Shape | None = None
        self._floor = self._settled = self._forward = self._known = 0

    def floor(self) -> None:
        """A planned microbatch is about to be planned: what is there already is looked at first."""
        if self._meter.exact:
            self._meter.settle()
            self._floor = self._meter.level_bytes()
            self._planner.note_floor(self._floor)
        self._look_at_others()

    def _look_at_others(self) -> None:
        """A sampler beside the training may hold more, or less, after each generation: "auto" is what it leaves."""
        planner = self._planner
        if planner.budget.kind is not BudgetKind.AUTO or not self._baseline.complete:
            return
        self._highest = max(self._highest, self._baseline.result().peak_bytes, self._meter.peak_bytes())
        device = self._meter.device_bytes()
        found = planner.budget.bytes_on(device, 0, self._meter.ceiling_bytes(self._highest))
        step = int(STEP * device)
        if abs(found - planner.budget_bytes) > step:
            planner.set_budget(max(1, found // step) * step)
            _log.info(
                "hilore: others hold another share of the device; the budget is %d bytes now", planner.budget_bytes
            )

    def begin(self, shape: Shape) -> None:
        """The first unit of a planned microbatch is about to run."""
        if self._meter.exact:
            self._shape = shape
            self._known = self._meter.peak_bytes()

    def level_bytes(self) -> int | None:
        """What is held now that forward and loss are over; None where no planned microbatch is followed."""
        if self._shape is None:
            return None
        self._forward = self._new_peak()
        self._settled = self._meter.level_bytes()
        return self._settled

    def _new_peak(self) -> int:
        """The peak if it is higher than any before, else 0."""
        before, self._known = self._known, self._meter.peak_bytes()
        return self._known if self._known > before else 0

    def end(self, measurements: Measurements, treated: Mapping[UnitId, Treatment]) -> None:
        """The backward is over; `treated` says how units were recovered. Of units that are not those of the profile,
        nothing is learnt (two forwards before one backward)."""
        shape, self._shape = self._shape, None
        if shape is None or treated.keys() != {unit for unit, _ in measurements.roster}:
            return
        # what of forward's peak was the units' and what the loss's cannot be told: it is put down to the loss
        peaks = PhasePeaks(shape, 0, self._forward, self._new_peak(), self._floor, self._settled)
        choice = {unit: treatment.name for unit, treatment in treated.items()}
        self._planner.note_peaks(peaks, measurements.profiles(shape), choice)

    def abort(self) -> None:
        """The microbatch failed, or is not followed to its end."""
        self._shape = None
