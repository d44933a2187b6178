"""One more pass before plans are followed for good: does storing pay in the whole update (design section 4)?

A few microbatches run all-R and as planned in turn. Each unit's forward and backward is timed under the variant that
it ran as, so what a variant costs anywhere in the update counts, not only the replay that it avoids. A variant of a
class that does not pay is struck out; if the joint plan is slower than all-R, all-R is the plan. Both are exact, so
nothing but time is at stake; a verdict needs a clear difference, since noise only adds.

Before plans compress, a trial has turns of a third kind: exact plans, and plans that compress. There it is the other
way round: what is approximate must have shown that it is faster than both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from statistics import median
from typing import Any

from ds_hilore.core.treatment import INPUT_OFFLOADED, Treatment
from ds_hilore.core.types import Action, Shape, UnitId
from ds_hilore.profiling.clock import Clock
from ds_hilore.profiling.measure import RECOMPUTE, Measurements
from ds_hilore.recovery.unit import UnitCall


class Turn(Enum):
    """How a microbatch of a trial runs."""

    REPLAYED = "all-R"
    EXACT = "exact plan"
    COMPRESSED = "compressing plan"


#: Microbatches in a row of which none encoded anything (risk forbade it) after which a trial of compression gives up.
MOST_IDLE = 16
#: Turns, and again. Drifts of the machine meet all kinds alike.
PATTERN = (Turn.REPLAYED, Turn.EXACT, Turn.EXACT, Turn.REPLAYED)
COMPRESSING = (Turn.REPLAYED, Turn.EXACT, Turn.COMPRESSED, Turn.COMPRESSED, Turn.EXACT, Turn.REPLAYED)


@dataclass(frozen=True)
class Verdict:
    """What the trial found.

    Attributes:
        replayed_s, planned_s: seconds per token of microbatches that ran all-R, and as planned with exact actions.
        struck: what is struck out, with reasons: (class, variant, reason).
        compressed_s: seconds per token of microbatches that compressed; None where none did.
        compression: why plans may not compress; "" where they may, or that could not be tried.
    """

    replayed_s: float
    planned_s: float
    struck: tuple[tuple[str, str, str], ...]
    compressed_s: float | None = None
    compression: str = ""

    def __str__(self) -> str:
        said = [f"planned microbatches take {self.planned_s / self.replayed_s:.2f} x of all-R's"]
        if self.compressed_s is not None:
            said.append(f"those that compress {self.compressed_s / self.replayed_s:.2f} x")
        reasons = "; ".join(f"{unit_class} {variant}: {reason}" for unit_class, variant, reason in self.struck)
        return ", ".join(said) + (f"; struck out: {reasons}" if reasons else "")


class Trial:
    """Times `microbatches` microbatches, at least one of each kind (0: none), and their units. `shape`: of the last one
    that was timed."""

    def __init__(
        self, clock: Clock, measurements: Measurements, microbatches: int, pattern: tuple[Turn, ...] = PATTERN
    ) -> None:
        self.microbatches = max(microbatches, len(set(pattern))) if microbatches else 0
        self.compresses = Turn.COMPRESSED in pattern
        self._pattern = pattern
        self._clock = clock
        self._measurements = measurements
        self._turn = 0
        self._idle = 0  # microbatches since the last turn that was taken
        self._timed = 0
        self._seconds: dict[Turn, list[float]] = defaultdict(list)
        self._whole: tuple[Any, Turn, int] | None = None  # of the microbatch being timed: start, its turn, tokens
        self._unit: tuple[Any, Callable[[float], None]] | None = None  # whose backward is being timed
        self._current: UnitCall | None = None
        self.shape: Shape | None = None

    @property
    def turn(self) -> Turn | None:
        """How the next microbatch, or the one that is timed, runs; None once every turn was taken."""
        return self._pattern[self._turn % len(self._pattern)] if self._turn < self.microbatches else None

    @property
    def over(self) -> bool:
        """Whether every turn was taken and its seconds are known."""
        return self.turn is None and sum(len(seconds) for seconds in self._seconds.values()) == self._timed

    def begin(self, shape: Shape) -> None:
        """A microbatch begins, as `turn` says."""
        if self.turn is not None:
            self.shape = shape
            self._whole = self._clock.start(), self.turn, max(1, shape.tokens)

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

    def end(self, encoded: bool = False) -> None:
        """The backward of the microbatch is over.

        Args:
            encoded: some unit's state was, whether risk then allowed its use or not. Where nothing was, a turn that is
                to compress has told nothing, and is taken again.
        """
        if self._whole is None:
            return
        self._end_unit()
        started, turn, tokens = self._whole
        self.abort()
        if turn is Turn.COMPRESSED and not encoded:
            self._idle += 1
            if self._idle >= MOST_IDLE:
                self._turn = self.microbatches
            return
        seconds = self._seconds[turn]
        self._timed += 1
        self._clock.stop(started, lambda whole: seconds.append(whole / tokens))
        self._idle = 0
        self._turn += 1

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
        replayed, planned, compressed = (self._seconds[turn] for turn in Turn)
        struck: list[tuple[str, str, str]] = []
        slower = _slower(planned, replayed)
        for unit_class, variant in self._measurements.timed():
            gain = self._measurements.gain(unit_class, variant, self.shape)
            if gain is None or variant == INPUT_OFFLOADED.name:  # which is for its bytes, and may cost time
                continue
            if slower and Treatment.parse(variant).action is not Action.COMPRESS:
                struck.append((unit_class, variant, "the joint plan is slower than replaying everything"))
            elif gain.seconds < -2 * gain.noise_s:
                struck.append((unit_class, variant, f"it costs {-gain.seconds * 1e3:.1f} ms more than {RECOMPUTE}"))
        for entry in struck:
            self._measurements.strike(*entry)
        return Verdict(
            median(replayed),
            median(planned),
            tuple(struck),
            median(compressed) if compressed else None,
            self._against_compression(),
        )

    def _against_compression(self) -> str:
        compressed = self._seconds[Turn.COMPRESSED]
        if not compressed:
            return ""
        others = [turn.value for turn in (Turn.REPLAYED, Turn.EXACT) if not _faster(compressed, self._seconds[turn])]
        return f"it is not faster than {' and '.join(others)}" if others else ""


def _slower(one: Sequence[float], other: Sequence[float]) -> bool:
    """Clearly so: noise only adds."""
    return median(one) > median(other) and min(one) > min(other)


def _faster(one: Sequence[float], other: Sequence[float]) -> bool:
    return median(one) < median(other)
