"""One more pass before plans are followed for good: does storing pay in the whole update (design section 4)?

A few microbatches run all-R and as planned in turn. Each unit's forward and backward is timed under the variant that
it ran as, so what a variant costs anywhere in the update counts, not only the replay that it avoids. A variant of a
class that does not pay is struck out; if the joint plan is slower than all-R, all-R is the plan. Both are exact, so
nothing but time is at stake; a verdict needs a clear difference, since noise only adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Shape, UnitId
from ds_hilore.profiling.clock import Clock
from ds_hilore.profiling.measure import RECOMPUTE, Measurements
from ds_hilore.recovery.unit import UnitCall

#: Which of four microbatches run all-R, and again. Drifts of the machine meet both kinds alike.
PATTERN = (True, False, False, True)


@dataclass(frozen=True)
class Verdict:
    """What the trial found: seconds per token of both kinds of microbatches, and what is struck out, with reasons."""

    replayed_s: float
    planned_s: float
    struck: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        ratio = self.planned_s / self.replayed_s
        reasons = "; ".join(f"{unit_class} {variant}: {reason}" for unit_class, variant, reason in self.struck)
        return f"planned microbatches take {ratio:.2f} x of all-R's" + (f"; struck out: {reasons}" if reasons else "")


class Trial:
    """Times `microbatches` microbatches and their units. `shape`: of the last one that was timed."""

    def __init__(self, clock: Clock, measurements: Measurements, microbatches: int) -> None:
        self.microbatches = microbatches
        self._clock = clock
        self._measurements = measurements
        self._turn = 0
        self._seconds: dict[bool, list[float]] = defaultdict(list)
        self._whole: tuple[Any, bool, int] | None = None  # of the microbatch being timed: start, all-R?, tokens
        self._unit: tuple[Any, Callable[[float], None]] | None = None  # whose backward is being timed
        self._current: UnitCall | None = None
        self.shape: Shape | None = None

    @property
    def replays(self) -> bool:
        """Whether the next microbatch runs all-R."""
        return self._turn < self.microbatches and PATTERN[self._turn % len(PATTERN)]

    @property
    def over(self) -> bool:
        """Whether every turn was taken and its seconds are known."""
        return sum(len(seconds) for seconds in self._seconds.values()) >= self.microbatches

    def begin(self, shape: Shape) -> None:
        """A microbatch begins, as `replays` says."""
        if self._turn < self.microbatches:
            self.shape = shape
            self._whole = self._clock.start(), self.replays, max(1, shape.tokens)

    @contextmanager
    def forward_of(self, unit: UnitId, treatment: Treatment, shape: Shape) -> Iterator[None]:
        """Around a unit's forward."""
        if self._whole is None:
            yield
            return
        started = self._clock.start()
        yield
        note = partial(self._measurements.note_seconds, unit, treatment.name, shape)
        self._clock.stop(started, lambda seconds: note(seconds, None))

    def unpacked(self, call: UnitCall) -> None:
        """A saved tensor of `call` is wanted. The first one ends the backward of the unit before and begins this one's:
        backward runs through the units one after the other."""
        if call is self._current or self._whole is None:
            return
        self._end_unit()
        self._current = call
        note = partial(self._measurements.note_seconds, call.unit, call.treatment.name, call.shape)
        self._unit = self._clock.start(), lambda seconds: note(None, seconds)

    def end(self) -> None:
        """The backward of the microbatch is over."""
        if self._whole is None:
            return
        self._end_unit()
        started, replays, tokens = self._whole
        seconds = self._seconds[replays]
        self._clock.stop(started, lambda whole: seconds.append(whole / tokens))
        self._turn += 1
        self.abort()

    def abort(self) -> None:
        """The microbatch is not timed to its end."""
        self._whole = self._unit = self._current = None

    def _end_unit(self) -> None:
        if self._unit is not None:
            started, receive = self._unit
            self._clock.stop(started, receive)
            self._unit = None

    def verdict(self) -> Verdict:
        """Strikes out of the measurements what does not pay, and says so."""
        assert self.shape is not None
        replayed, planned = self._seconds[True], self._seconds[False]
        struck: list[tuple[str, str, str]] = []
        slower = median(planned) > median(replayed) and min(planned) > min(replayed)
        for unit_class, variant in self._measurements.timed():
            gain = self._measurements.gain(unit_class, variant, self.shape)
            if gain is None:
                continue
            if slower:
                struck.append((unit_class, variant, "the joint plan is slower than replaying everything"))
            elif gain.seconds < -2 * gain.noise_s:
                struck.append((unit_class, variant, f"it costs {-gain.seconds * 1e3:.1f} ms more than {RECOMPUTE}"))
        for entry in struck:
            self._measurements.strike(*entry)
        return Verdict(median(replayed), median(planned), tuple(struck))
