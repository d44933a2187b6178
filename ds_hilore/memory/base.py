"""What the device holds besides the units' own state, at the fullest moments of a microbatch of any size.

The planner's rows (NOTE [Memory rows] of planning/problem.py) each start from such a base: parameters, gradients,
optimizer state and buckets, which stay (the floor), and workspace of forward, loss and backward, which grows with the
microbatch. Integers in, integers out; bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ds_hilore.core.types import Shape


@dataclass(frozen=True)
class BaseObservation:
    """What one microbatch was seen to need. Each row's bytes: its peak less what the units held and worked on there.

    Args:
        tokens: positions of the microbatch.
        floor: level before its forward.
        forward, loss, backward: device bytes at the fullest moment of the row, units' part taken out, floor included.
        settled: level when backward begins, units' part taken out.
        between: level between two units of the forward, units' part taken out.
    """

    tokens: int
    floor: int
    forward: int
    loss: int
    backward: int
    settled: int = 0
    between: int = 0

    def raised(self, count: int) -> BaseObservation:
        """The same over a floor that is higher by `count` bytes."""
        return BaseObservation(
            self.tokens,
            self.floor + count,
            self.forward + count,
            self.loss + count,
            self.backward + count,
            self.settled + count,
            self.between + count,
        )


@dataclass(frozen=True)
class Line:
    """constant + slope * tokens, in bytes."""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, tokens: int) -> int:
        return math.ceil(self.constant + self.slope * tokens)


@dataclass(frozen=True)
class BaseBytes:
    """Base of each row by number of tokens. Never below what was observed (`fit`)."""

    floor: int = 0
    forward: tuple[Line, ...] = (Line(),)
    loss: tuple[Line, ...] = (Line(),)
    backward: tuple[Line, ...] = (Line(),)
    settled: tuple[Line, ...] = (Line(),)
    between: tuple[Line, ...] = (Line(),)

    @classmethod
    def fit(cls, observations: Iterable[BaseObservation]) -> BaseBytes:
        """The base that covers every observation.

        With one number of tokens seen, workspace is taken to stay the same below it (a chunked loss does) and to grow
        in proportion above it (attention masks, norms' temporaries do): too much in both directions, never too little
        where workspace is between the two. With several, it grows along a line through their envelope.
        """
        seen = list(observations)
        if not seen:
            return cls()
        # One floor for all, so that what was measured is what is foreseen, though later microbatches start higher.
        floor = max(o.floor for o in seen)
        return cls(
            floor,
            _cover([(o.tokens, o.forward - floor) for o in seen]),
            _cover([(o.tokens, o.loss - floor) for o in seen]),
            _cover([(o.tokens, o.backward - floor) for o in seen]),
            _cover([(o.tokens, o.settled - floor) for o in seen]),
            _cover([(o.tokens, o.between - floor) for o in seen]),
        )

    def at(self, shape: Shape) -> tuple[int, int, int]:
        """Bases of the forward, loss and backward rows for a microbatch of this shape."""
        return self._at(self.forward, shape), self._at(self.loss, shape), self._at(self.backward, shape)

    def settled_at(self, shape: Shape) -> int:
        """What is to be there when the backward of a microbatch of this shape begins, units' part aside."""
        return self._at(self.settled, shape)

    def between_at(self, shape: Shape) -> int:
        """What is to be there between two units in the forward of such a microbatch, units' part aside."""
        return self._at(self.between, shape)

    def _at(self, lines: tuple[Line, ...], shape: Shape) -> int:
        return max(0, self.floor + max(line.at(shape.tokens) for line in lines))


def _cover(points: list[tuple[int, int]]) -> tuple[Line, ...]:
    """Lines of which the highest is at or above every point (tokens, bytes), whatever its tokens.

    Bytes may be negative: the units' part is itself an upper bound.
    """
    by_tokens: dict[int, int] = {}
    for tokens, found in points:
        by_tokens[tokens] = max(found, by_tokens.get(tokens, found))
    most = max(by_tokens.values())
    if len(by_tokens) == 1:
        (tokens,) = by_tokens
        return Line(most), Line(slope=max(0, most) / max(1, tokens))
    slope = max(0.0, _slope(by_tokens))
    constant = max(found - slope * tokens for tokens, found in by_tokens.items())
    return (Line(constant, slope),)


def _slope(points: dict[int, int]) -> float:
    """Least squares."""
    middle = sum(points) / len(points)
    mean = sum(points.values()) / len(points)
    spread = sum((tokens - middle) ** 2 for tokens in points)
    return sum((tokens - middle) * (found - mean) for tokens, found in points.items()) / spread
