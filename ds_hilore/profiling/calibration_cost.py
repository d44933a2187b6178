"""What calibration may cost: a number of updates (K3 of calibrate.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_hilore.core.errors import UsageError


@dataclass
class Cost:
    """What calibration took and may take, on this rank: planned for `PLANNED_UPDATES` updates' time, so that it stays
    below that of `MOST_UPDATES`.

    Attributes:
        seconds: of all passes, exact ones included.
        passes: gradients computed in that time.
        slowest: seconds of one pass, of the slowest microbatch.
        update_seconds: of one update of training; None: not known, nothing is capped.
    """

    MOST_UPDATES = 30.0
    PLANNED_UPDATES = 24.0  # an update may be found to take less later on, and a pass more

    seconds: float = 0.0
    passes: int = 0
    slowest: float = 0.0
    update_seconds: float | None = None

    def note(self, seconds: float, passes: int) -> None:
        """One microbatch took this long for so many gradients.

        Raises:
            UsageError: that is impossible.
        """
        if not (0 <= seconds < math.inf and passes >= 1):
            raise UsageError(f"{passes} passes cannot have taken {seconds} s")
        self.seconds += seconds
        self.passes += passes
        self.slowest = max(self.slowest, seconds / passes)

    @property
    def updates(self) -> float | None:
        """Seconds as a number of updates; None where those were not timed."""
        return self.seconds / self.update_seconds if self.update_seconds else None

    @property
    def passes_left(self) -> float:
        """Passes that still fit; infinite without a cap. Each may take as long as the slowest so far (K3)."""
        if not self.update_seconds:
            return math.inf
        each = self.slowest if self.passes else self.update_seconds
        left = self.PLANNED_UPDATES * self.update_seconds - self.seconds
        return math.inf if each == 0 else max(0.0, left / each)
