"""Peaks of the all-R update that "1.0x" means, taken phase by phase so that the planner knows where they stand."""

from __future__ import annotations

from contextlib import ExitStack

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Shape
from ds_hilore.memory.glibc import tight_malloc
from ds_hilore.memory.meter import CpuMeter, PeakMeter
from ds_hilore.runtime.budget import Baseline, PhasePeaks


class BaselineMeter:
    """Follows one update. Runs in the second one, when optimizer state exists.

    On CPU the allocator is told to give freed memory back meanwhile, without which resident size means nothing
    (design fact 20); that slows this one update down. A process that was started so is measured as it is: planned
    updates will run in the same heap.
    """

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter
        self._phases: list[PhasePeaks] = []
        self._peak = 0
        self._shape: Shape | None = None
        self._floor = self._settled = self._ran = self._ceiling = 0
        self._forward = 0
        self._loss = 0
        self._settings = ExitStack()
        self.complete = False

    def begin(self, shape: Shape) -> None:
        """The first unit of a microbatch is about to run."""
        if self.complete:
            return
        if self._shape is None and not self._phases:
            if isinstance(self._meter, CpuMeter) and not self._meter.exact:
                self._settings.enter_context(tight_malloc())
            self._meter.settle()
        self._peak = max(self._peak, self._meter.peak_bytes() if self._phases else 0)
        self._shape = shape
        self._meter.reset()
        self._floor = self._meter.level_bytes()
        self._forward = self._ran = 0

    def unit_ran(self) -> None:
        """A unit's forward is over: what comes after the last one is the loss's."""
        if self._shape is not None:
            self._forward = self._meter.peak_bytes()
            self._ran = self._meter.level_bytes()

    def backward_begins(self) -> None:
        """The final plan was just applied."""
        if self._shape is not None:
            self._loss = self._meter.peak_bytes()
            self._forward = self._forward or self._loss
            self._settled = self._meter.level_bytes()
            self._meter.reset()

    def end(self) -> None:
        """The backward of the microbatch is over."""
        if self._shape is None:
            return
        backward = self._meter.peak_bytes()
        levels = self._floor, self._settled, self._ran
        self._phases.append(PhasePeaks(self._shape, self._forward, self._loss, backward, *levels))
        self._peak = max(self._peak, self._forward, self._loss, backward)
        self._shape = None
        self._meter.reset()

    def step_done(self) -> None:
        """The optimizer has stepped."""
        if self._phases and not self.complete:
            self._peak = max(self._peak, self._meter.peak_bytes())
            self._ceiling = self._meter.ceiling_bytes(self._peak)
            self.complete = True
            self._settings.close()

    def abort(self) -> None:
        """The update failed: measure the next one instead."""
        if not self.complete:
            self._phases.clear()
            self._shape = None
            self._peak = 0
            self._settings.close()

    def result(self) -> Baseline:
        """What was measured.

        Raises:
            UsageError: before `step_done`.
        """
        if not self.complete:
            raise UsageError("the all-R peak is not known yet: it is that of the second update")
        return Baseline(self._peak, tuple(self._phases), self._meter.device_bytes(), self._ceiling)
