"""Planning that fails in an update must not take the run with it: replaying everything needs no plan, and is exact."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ds_hilore.core.types import Plan

_log = logging.getLogger(__name__)

_Planning = TypeVar("_Planning", bound=Callable[..., Any])


def or_replay(planning: _Planning) -> _Planning:
    """A method that gives a plan, or something to plan with: where it raises, a plan that replays every unit.

    What a planner in the background does of itself (planning/background.py). Said once for each method of an object,
    whose `outlived` holds their names.
    """

    @functools.wraps(planning)
    def given(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return planning(self, *args, **kwargs)
        except Exception as error:
            if planning.__name__ not in self.outlived:
                self.outlived.add(planning.__name__)
                said = "hilore: planning failed (%s: %s); every unit is replayed wherever it does. Please report this"
                _log.warning(said, type(error).__name__, error, exc_info=error)
            return Plan()

    return given  # type: ignore[return-value]
