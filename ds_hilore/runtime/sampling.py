"""What the one stored unit of a class tells: bytes and seconds of its attention kernel, of state groups, of codecs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ds_hilore.codecs.base import Codec
from ds_hilore.codecs.registry import codec_named
from ds_hilore.core.treatment import STORED, Treatment
from ds_hilore.core.types import Action
from ds_hilore.profiling.clock import Clock
from ds_hilore.profiling.measure import Measurements
from ds_hilore.recovery.bundle import storages
from ds_hilore.recovery.encoded import Shelf
from ds_hilore.recovery.unit import UnitCall

#: The operator whose outputs replays may be handed.
OPERATOR = "attention"
#: How a unit runs that is sampled.
SAMPLED = Treatment(Action.STORE, keeps=(OPERATOR,))
SAMPLED_WHOLE = STORED  # where replays are handed nothing
#: The first pass through a codec compiles, and wakes threads up.
PASSES = 2


class Sampler:
    """Fills `measurements.classes[...].parts` from sampled units.

    Args:
        codecs: names of those that plans may use; () for none.
    """

    def __init__(self, clock: Clock, measurements: Measurements, codecs: tuple[str, ...]) -> None:
        self._clock = clock
        self._measurements = measurements
        self._codecs: list[Codec] = [codec_named(name) for name in codecs]
        self._seconds: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a call of the operator."""
        started = self._clock.start()
        yield
        self._clock.stop(started, self._seconds.append)

    def note(self, call: UnitCall, shelved: list[Shelf]) -> None:
        """The forward of a sampled unit is over; `shelved` is what of its state can be encoded."""
        parts = self._measurements.fits_of(call.unit_class).parts
        if call.outputs is not None and call.outputs.outputs:
            operator = parts.operator(OPERATOR)
            operator.held.note(call.shape, sum(storages(call.outputs.held()).values()))
            self._seconds, seconds = [], self._seconds
            self._clock.stop(self._clock.start(), lambda _: operator.seconds.note(call.shape, sum(seconds)))
        by_group: dict[str, list[Shelf]] = defaultdict(list)
        for shelf in shelved:
            by_group[shelf.group].append(shelf)
        for group, found in by_group.items():
            parts.group(group).note(call.shape, sum(storages([shelf.base.tensor for shelf in found]).values()))
            for codec in self._codecs:
                if all(codec.supports(shelf.base.tensor.dtype) for shelf in found):
                    self._try(call, group, codec, found)

    def _try(self, call: UnitCall, group: str, codec: Codec, found: list[Shelf]) -> None:
        """Encodes and decodes a group; nothing of it is kept but what it cost."""
        fits = self._measurements.fits_of(call.unit_class).parts.codec(group, codec.name)
        for last in range(PASSES):
            note = last == PASSES - 1
            started = self._clock.start()
            payloads = [codec.encode(shelf.base.tensor) for shelf in found]
            self._clock.stop(started, partial(fits.encode.note, call.shape) if note else lambda seconds: None)
            started = self._clock.start()
            for payload in payloads:
                codec.decode(payload)
            self._clock.stop(started, partial(fits.decode.note, call.shape) if note else lambda seconds: None)
        fits.held.note(call.shape, sum(payload.nbytes for payload in payloads))
        for payload in payloads:
            fits.note_error(float(payload.relative_error))
