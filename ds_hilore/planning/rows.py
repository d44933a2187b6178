"""The rows of a problem as running slacks, so that one change of one unit is tried in microseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_hilore.planning.options import Option
from ds_hilore.planning.problem import RISK_TOLERANCE, Problem

#: Slack of a row that does not apply: more than any device has.
_UNBOUND = 1 << 62


class Rows:
    """Bytes and risk left in every row under the options picked so far (NOTE [Memory rows] in problem.py).

    Only a search aid: what it leads to is judged by `evaluate`.
    """

    def __init__(self, problem: Problem, picked: Sequence[Option]) -> None:
        self._problem = problem
        self.picked = list(picked)
        self._risk_left: float | None = None  # not summed up since the last change
        count = len(self.picked)
        held = sum(option.held_bytes for option in self.picked)
        self._others = problem.in_flight - 1
        elsewhere = self._others * held
        self._loss_left = _UNBOUND
        self._forward_left = [_UNBOUND] * count
        # M2 implies M1 where encoding needs no more than the loss
        encoding = max([option.forward_bytes for options in problem.options for option in options])
        self._forward_counts = (
            problem.prepared is None and problem.base_forward_bytes + encoding > problem.base_loss_bytes
        )
        if problem.prepared is None:
            self._loss_left = problem.budget_bytes - problem.base_loss_bytes - held - elsewhere
        if self._forward_counts:
            left = problem.budget_bytes - problem.base_forward_bytes - elsewhere
            for position, option in enumerate(self.picked):
                left -= option.held_bytes
                self._forward_left[position] = left - option.forward_bytes
        grads = sum(unit.grad_bytes for unit in problem.units)
        left = problem.budget_bytes - problem.base_backward_bytes - elsewhere - grads
        self._backward_left = [0] * count
        for position, option in enumerate(self.picked):
            self._backward_left[position] = left - option.own_backward_bytes
            left += problem.units[position].grad_bytes - option.backward_held_bytes
        self._host_left = problem.host_budget_bytes - sum(option.host_bytes for option in self.picked)
        self._converting = sum(option.converting_bytes for option in self.picked)
        self._conversions = sum(option.converts for option in self.picked)

    @property
    def loss_left(self) -> int:
        """Bytes left at the loss; more than any device has where the loss is over."""
        return self._loss_left

    @property
    def risk_left(self) -> float:
        if self._risk_left is None:
            limit = self._problem.risk_limit * (1 + RISK_TOLERANCE)
            self._risk_left = limit - math.fsum([option.risk_cost for option in self.picked])
        return self._risk_left

    def headroom(self) -> int:
        """Bytes that could be held by the first unit without breaking a row."""
        return min(self._loss_left, *self._forward_left, *self._backward_left)

    def fits(self, position: int, option: Option) -> bool:
        """Whether every row that holds now still holds when the unit at `position` becomes `option`."""
        now = self.picked[position]
        grown = option.held_bytes - now.held_bytes
        elsewhere = self._others * grown
        if grown + elsewhere > self._loss_left or option.host_bytes - now.host_bytes > self._host_left:
            return False
        if self._forward_counts and not self._forward_fits(position, option):
            return False
        if option.own_backward_bytes - now.own_backward_bytes + elsewhere > self._backward_left[position]:
            return False
        later = position + 1
        grown_backward = option.backward_held_bytes - now.backward_held_bytes + elsewhere
        if later < len(self.picked) and grown_backward > min(self._backward_left[later:]):
            return False
        if elsewhere and position and elsewhere > min(self._backward_left[:position]):
            return False
        if option.risk_cost > now.risk_cost and option.risk_cost - now.risk_cost > self.risk_left:
            return False
        return self._conversion_fits(now, option)

    def put(self, position: int, option: Option) -> None:
        """Makes the unit at `position` become `option`."""
        now = self.picked[position]
        grown = option.held_bytes - now.held_bytes
        grown_backward = option.backward_held_bytes - now.backward_held_bytes
        if self._others:
            self._hold_elsewhere(self._others * grown)
        self._loss_left -= grown
        if self._forward_counts:
            self._forward_left[position:] = [left - grown for left in self._forward_left[position:]]
            self._forward_left[position] -= option.forward_bytes - now.forward_bytes
        later = position + 1
        self._backward_left[later:] = [left - grown_backward for left in self._backward_left[later:]]
        self._backward_left[position] -= option.own_backward_bytes - now.own_backward_bytes
        self._host_left -= option.host_bytes - now.host_bytes
        self._converting += option.converting_bytes - now.converting_bytes
        self._conversions += option.converts - now.converts
        if option.risk_cost != now.risk_cost:
            self._risk_left = None
        self.picked[position] = option

    def _forward_fits(self, position: int, option: Option) -> bool:
        now = self.picked[position]
        grown = option.held_bytes - now.held_bytes
        elsewhere = self._others * grown
        grown += elsewhere
        if grown + option.forward_bytes - now.forward_bytes > self._forward_left[position]:
            return False
        if elsewhere > min(self._forward_left[:position], default=elsewhere):
            return False
        return grown <= min(self._forward_left[position + 1 :], default=grown)

    def _hold_elsewhere(self, grown: int) -> None:
        """The other microbatches in flight hold that much more, whatever this one does."""
        self._loss_left -= grown
        self._forward_left = [left - grown for left in self._forward_left]
        self._backward_left = [left - grown for left in self._backward_left]

    def _conversion_fits(self, now: Option, option: Option) -> bool:
        if self._conversions + option.converts - now.converts == 0:
            return True
        converting = self._converting + option.converting_bytes - now.converting_bytes
        problem = self._problem
        return problem.base_backward_bytes + converting + problem.conversion_bytes <= problem.budget_bytes
