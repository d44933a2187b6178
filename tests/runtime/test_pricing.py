"""The price of risk over ranks: one lambda, parts that add up, and nobody who cannot take part holds the others up."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import UnitId
from ds_hilore.planning.price import Demand
from ds_hilore.runtime.pricing import demanded, split
from ds_hilore.runtime.risk import Exposed, RiskKeeper, RiskRules
from tests.runtime.test_risk import forecast

LIMIT, TOKENS = 0.01, 10
UNITS = [UnitId("a")]
#: Plans that save 1, 2 and 3 seconds at risks of 1, 2 and 4 per exposure.
POINTS = ((0.0, 0.0), (1.0, 1.0), (4.0, 2.0), (16.0, 3.0))
amounts = st.floats(1e-6, 1e3)
T = TypeVar("T")


class _Plane:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, world_size: int, meeting: threading.Barrier, table: dict[int, Any]) -> None:
        self.rank, self.world_size = rank, world_size
        self._meeting, self._table = meeting, table

    def exchange(self, what: str, payload: Any) -> list[Any]:
        self._table[self.rank] = payload
        self._meeting.wait(10)
        answers = [self._table[rank] for rank in range(self.world_size)]
        self._meeting.wait(10)
        return answers


def on_ranks(count: int, body: Callable[[_Plane], T]) -> list[T]:
    meeting, table = threading.Barrier(count), dict[int, Any]()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, [_Plane(rank, count, meeting, table) for rank in range(count)]))


def keeper(ranks: int, microbatches: int, norm: float = 1.0) -> RiskKeeper:
    made = RiskKeeper(RiskRules(limit=LIMIT, ranks=ranks, microbatches=microbatches))
    made.end_update(norm)
    made.observe(Exposed(1.0, TOKENS))
    return made


def run(plane: _Plane, foreseen: Sequence[float], points: Sequence[tuple[float, float]] = POINTS) -> RiskKeeper:
    """One announced update that comes as it was foreseen, each microbatch with all the risk that it can use."""
    made = keeper(plane.world_size, len(foreseen))
    made.announce([forecast(exposure) for exposure in foreseen])
    made.set_price(points, plane)  # type: ignore[arg-type]
    for exposure in foreseen:
        made.expect(TOKENS, forecast(exposure))
        exposed = Exposed(exposure, TOKENS)
        made.note(exposed, min(made.decide(exposed, UNITS).budget, 4 * exposure))
    return made


def squares(keepers: Sequence[RiskKeeper]) -> float:
    return math.fsum(risk * risk for made in keepers for risk in made.spent)


def test_a_calm_rank_takes_what_a_violent_one_leaves() -> None:
    calm, violent = on_ranks(2, lambda plane: run(plane, [2e-3] if plane.rank == 0 else [10.0]))
    assert calm.price == violent.price is not None and calm.price > 0
    own = LIMIT / math.sqrt(2)
    assert calm.spent[0] == pytest.approx(4 * 2e-3) and calm.spent[0] > own, "all that it can use, more than its half"
    assert violent.spent[0] < own
    assert squares([calm, violent]) == pytest.approx(LIMIT**2)


@given(st.lists(st.lists(amounts, min_size=1, max_size=4), min_size=2, max_size=3))
@settings(deadline=None, max_examples=40)
def test_all_ranks_together_stay_within_the_budget(exposures: list[list[float]]) -> None:
    keepers = on_ranks(len(exposures), lambda plane: run(plane, exposures[plane.rank]))
    assert len({made.price for made in keepers}) == 1
    assert squares(keepers) <= LIMIT**2 * (1 + 1e-9)


@pytest.mark.parametrize("why", ["no plans", "no norm", "no numbers"])
def test_a_rank_that_cannot_take_part_keeps_its_share(why: str) -> None:
    def body(plane: _Plane) -> RiskKeeper:
        if plane.rank == 0:
            return run(plane, [1e-3, 5.0])
        if why == "no norm":
            made = RiskKeeper(RiskRules(limit=LIMIT, ranks=2, microbatches=1))
            made.announce([forecast(1.0)])
            made.set_price(POINTS, plane)  # type: ignore[arg-type]
            return made
        return run(plane, [math.nan if why == "no numbers" else 1.0], () if why == "no plans" else POINTS)

    one, other = on_ranks(2, body)
    assert one.price is not None and other.price is None
    for made in (one, other):
        assert squares([made]) <= LIMIT**2 / 2 * (1 + 1e-9)


def test_what_starts_again_is_split_as_before() -> None:
    def body(plane: _Plane) -> tuple[float, float, float | None]:
        made = keeper(2, 1)
        made.announce([forecast(1e-3 if plane.rank == 0 else 10.0)])
        made.set_price(POINTS, plane)  # type: ignore[arg-type]
        exposed = Exposed(1e-3 if plane.rank == 0 else 10.0, TOKENS)
        before = made.decide(exposed, UNITS).budget
        made.note(exposed, before)
        made.abort()
        return before, made.decide(exposed, UNITS).budget, made.price

    for before, after, price in on_ranks(2, body):
        assert before == after and price is not None


def test_a_microbatch_that_runs_as_forced_is_not_the_next_ones_demand() -> None:
    made = keeper(1, 3)
    made.announce([forecast(5.0), None, forecast(1e-3)])
    made.set_price(POINTS)
    made.pass_by(Exposed(5.0, TOKENS))
    made.pass_by(None)
    reach, _ = made.expect(TOKENS, forecast(1e-3))
    assert reach == pytest.approx(LIMIT / 1e-3), "nobody else is left to leave risk to"


def test_without_plans_nothing_is_demanded() -> None:
    assert demanded([1.0, None], [3, 4], ()) == []
    assert [demand.exposure for demand in demanded([1.0, None], [3, 4], POINTS)] == [1.0, math.inf]


@pytest.mark.parametrize("own", [math.inf, 1e300])
def test_numbers_that_cannot_be_added_up_take_no_part(own: float) -> None:
    huge = Demand.of([(0.0, 0.0), (1e300, 1e-300)], 1.0)
    assert on_ranks(2, lambda plane: split(plane, [huge], own)) == [None, None]  # type: ignore[arg-type]
