"""Calibration's interventions: one state group of one unit compressed, all else exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action, UnitId
from ds_hilore.profiling.calibrate import Calibration, Intervention, Observation
from ds_hilore.profiling.variants import components, compressions
from ds_hilore.recovery.encoded import Statistic
from ds_hilore.recovery.unit import UnitCall
from ds_hilore.runtime.controller import Controller

#: A microbatch's gradient beside the engine under the treatments of units by name, and a look at each of their calls.
Again = Callable[[Mapping[UnitId, Treatment], Callable[[UnitCall], None]], Mapping[str, Tensor]]


class Interventions:
    """Those of one engine's units, on the microbatch that has just run."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._pairs: dict[str, dict[tuple[str, str], tuple[tuple[str, str], ...]]] = {}  # by unit class and component

    def wanted(self, calibration: Calibration, microbatches: int) -> list[Intervention]:
        """Args: microbatches: that have calibrated so far."""
        measurements = self._controller.measurements
        units = [(unit, position, name) for position, (unit, name) in enumerate(measurements.roster)]
        shape = self._controller.microbatch.shape
        assert shape is not None, "a microbatch has run"
        self._pairs.clear()
        for name, fits in measurements.classes.items():
            offered = [components(codecs) for codecs in compressions(fits.parts, shape)]
            self._pairs[name] = {key: pairs for each in offered for key, pairs in each.items()}
        return calibration.interventions(microbatches, units, self._pairs)

    def observe(
        self, wanted: Intervention, again: Again, error: Callable[[Mapping[str, Tensor]], float]
    ) -> Observation | None:
        """One pass beside the engine; under ZeRO-3 all ranks make one.

        Args:
            wanted: one of the newest `wanted`.
            error: of a gradient against the exact one.

        Returns:
            None: nothing of it was encoded.
        """
        found: list[Statistic] = []

        def look(call: UnitCall) -> None:
            found.extend(call.statistics)

        unit_class = dict(self._controller.measurements.roster)[wanted.unit]
        pairs = self._pairs[unit_class][(wanted.place.group, wanted.place.codec)]
        near = again({wanted.unit: Treatment(Action.COMPRESS, codecs=pairs)}, look)
        exposed = self._controller.learning.exposed
        if not found or exposed is None:
            return None
        return Observation(
            place=wanted.place,
            unit=wanted.unit,
            microbatch=wanted.microbatch,
            exposure=exposed.of(wanted.unit),
            encoding_error=_mean_error(found),
            gradient_error=error(near),
        )


def _mean_error(found: list[Statistic]) -> float:
    """e of design section 3: root mean square over the tensors of the group."""
    squares = [float(each.squares[0] / each.squares[1]) if float(each.squares[1]) else 0.0 for each in found]
    return math.sqrt(math.fsum(squares) / len(squares))
