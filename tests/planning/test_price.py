"""The price of risk: shares add up, equal microbatches share equally, and nobody can trade risk and gain."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.planning.frontier import Frontier, first_frontier
from ds_hilore.planning.price import (
    TABLE_LENGTH,
    Demand,
    PriceAccount,
    TokenAccount,
    cost_of,
    demand_table,
    pot,
    price_of_risk,
    reach_of,
    shares,
)
from tests.planning.planning_problems import decoder

CURVE = ((0.0, 1.0), (1.0, 3.0), (2.0, 4.0), (4.0, 5.0))  # slopes 2, 1, 1/2
seeds = st.integers(0, 1 << 40)
quick = settings(max_examples=150, deadline=None)


def random_demands(rng: random.Random, count: int | None = None) -> list[Demand]:
    demands = []
    for _ in range(count or rng.randint(1, 6)):
        curve = [(0.0, 0.0), *((rng.uniform(0, 1e-3), rng.uniform(0, 2)) for _ in range(rng.randint(0, 6)))]
        exposure = rng.choice((0.0, 1.0, 1.0, math.inf, rng.lognormvariate(0, 1)))
        demands.append(Demand.of(curve, exposure, rng.randint(0, 100)))
    return demands


def seconds_at(demand: Demand, cost: float) -> float:
    """What a microbatch saves with a share of `cost`, steps taken in part."""
    saved = demand.hull[0][1]
    for step in demand.steps():
        part = min(1.0, cost / step.cost)
        saved += part * step.price * step.cost
        cost -= part * step.cost
    return saved


def test_shares_by_hand() -> None:
    calm, violent = Demand.of(CURVE, 1.0), Demand.of(CURVE, 2.0)  # slopes 2, 1, 1/2 and 1/2, 1/4, 1/8 (costs x 4)
    assert [step.price for step in violent.steps()] == [0.5, 0.25, 0.125]
    assert [step.cost for step in violent.steps()] == [4.0, 4.0, 8.0]
    assert shares([calm, violent], 0.0) == [0.0, 0.0]
    assert shares([calm, violent], 1.5) == [1.5, 0.0]
    assert shares([calm, violent], 2.0) == [2.0, 0.0]
    # both would pay 1/2 for the next: 2 and 4 units of it, so 3 are split 1 : 2
    assert shares([calm, violent], 5.0) == pytest.approx([3.0, 2.0])
    assert shares([calm, violent], 8.0) == pytest.approx([4.0, 4.0])
    assert shares([calm, violent], 20.0) == pytest.approx([4.0, 16.0])
    assert shares([calm, violent], 99.0) == pytest.approx([4.0, 16.0])  # nobody has tokens to share the rest by


def test_what_nobody_asks_for_goes_by_tokens() -> None:
    demands = [Demand.of(CURVE, 1.0, tokens=1), Demand.of(CURVE, 1.0, tokens=3)]
    assert shares(demands, 16.0) == pytest.approx([4.0 + 2.0, 4.0 + 6.0])
    assert pot(demands[1:], demand_table(demands), 16.0) == pytest.approx(10.0)


@quick
@given(seed=seeds, total=st.just(0.0) | st.floats(1e-12, 1e-2))
def test_shares_never_add_up_to_more(seed: int, total: float) -> None:
    demands = random_demands(random.Random(seed))
    split = shares(demands, total)
    assert all(share >= 0 for share in split)
    assert math.fsum(split) <= total * (1 + 1e-9)
    if sum(demand.tokens for demand in demands):
        assert math.fsum(split) == pytest.approx(total)
    asked = math.fsum(step.cost for demand in demands for step in demand.steps())
    if asked >= total:
        assert math.fsum(split) == pytest.approx(total)


@quick
@given(seed=seeds, total=st.floats(1e-6, 3e-3))
def test_nobody_can_trade_risk_and_gain(seed: int, total: float) -> None:
    demands = random_demands(random.Random(seed))
    split = shares(demands, total)
    before = sum(seconds_at(demand, share) for demand, share in zip(demands, split))
    for giver, taker in itertools.permutations(range(len(demands)), 2):
        for part in (0.1, 1.0):
            traded = list(split)
            moved = part * split[giver]
            traded[giver] -= moved
            traded[taker] += moved
            after = sum(seconds_at(demand, share) for demand, share in zip(demands, traded))
            assert after <= before + 1e-9


@quick
@given(seed=seeds, total=st.just(0.0) | st.floats(1e-12, 1e-2), ranks=st.integers(1, 4))
def test_ranks_divide_the_whole_and_no_more(seed: int, total: float, ranks: int) -> None:
    """Each rank sees the summed table only; a ladder of prices costs a few per cent of what one rank alone knows."""
    rng = random.Random(seed)
    by_rank = [random_demands(rng) for _ in range(ranks)]
    tables = [demand_table(demands) for demands in by_rank]
    assert {len(table) for table in tables} == {TABLE_LENGTH}
    table = [math.fsum(column) for column in zip(*tables)]
    parts = [pot(demands, table, total) for demands in by_rank]
    assert math.fsum(parts) <= total * (1 + 1e-9)
    everyone = [demand for demands in by_rank for demand in demands]
    if math.fsum(step.cost for demand in everyone for step in demand.steps()) >= total:
        assert math.fsum(parts) == pytest.approx(total)
    best = sum(map(seconds_at, everyone, shares(everyone, total)))
    ours = sum(sum(map(seconds_at, demands, shares(demands, part))) for demands, part in zip(by_rank, parts))
    base = sum(demand.hull[0][1] for demand in everyone)
    assert ours - base >= (best - base) * 0.93 - 1e-12  # a sixteenth of a decade


def test_lambda_is_the_price_at_which_risk_runs_out() -> None:
    table = demand_table([Demand.of(CURVE, 1.0)])
    for total, price in ((0.5, 2.0), (1.5, 1.0), (3.0, 0.5)):
        assert price <= price_of_risk(table, total) * 10 ** (1 / 16) and price_of_risk(table, total) <= price * 1.16
    assert price_of_risk(table, 4.0) == 0.0
    assert price_of_risk(demand_table([]), 0.0) == 0.0


@pytest.mark.parametrize("linear", [False, True])
def test_equal_microbatches_share_equally_and_spend_all(linear: bool) -> None:
    demands = [Demand.of(CURVE, 1.7, 10, linear)] * 4
    for total in (0.3, 3.0, 9.0, 100.0):
        assert shares(demands, total) == pytest.approx([total / 4] * 4)
        account = PriceAccount(demands, total)
        for _ in range(4):
            granted = account.grant()
            assert granted == pytest.approx(total / 4)
            account.spend(granted)
        assert account.left == pytest.approx(0.0, abs=1e-12)


ACCOUNTS: dict[str, Callable[[list[Demand], float], PriceAccount | TokenAccount]] = {
    "price": PriceAccount,
    "tokens": lambda demands, total: TokenAccount(total, max(1, sum(demand.tokens for demand in demands))),
}


@pytest.mark.parametrize("name", ACCOUNTS)
@quick
@given(seed=seeds, total=st.just(0.0) | st.floats(1e-12, 1e-2))
def test_an_account_never_overspends(name: str, seed: int, total: float) -> None:
    """Whatever part of a grant is spent, and whatever the true exposures are."""
    rng = random.Random(seed)
    demands = random_demands(rng)
    account = ACCOUNTS[name](demands, total)
    for demand in demands:
        left = account.left
        if isinstance(account, PriceAccount):
            granted = account.grant(rng.choice((None, 0.0, demand.exposure, rng.uniform(0, 3), math.inf)))
        else:
            granted = account.grant(demand.tokens)
        assert 0 <= granted <= left * (1 + 1e-12)
        account.spend(granted * rng.choice((0.0, 0.5, 1.0)))
    assert account.spent <= total * (1 + 1e-9)


def test_unspent_risk_carries_over() -> None:
    tokens = TokenAccount(8.0, update_tokens=40)
    assert tokens.grant(10) == 2.0
    tokens.spend(0.5)
    assert tokens.grant(10) == 3.5
    tokens.spend(3.5)
    assert tokens.grant(20) == 4.0
    price = PriceAccount([Demand.of(CURVE, 1.0)] * 2, 2.0)
    assert price.grant() == 1.0
    assert price.grant() == 2.0  # the first spent nothing


def test_a_violent_microbatch_leaves_its_share_to_the_others() -> None:
    account = PriceAccount([Demand.of(CURVE, 1.0)] * 3, 3.0)
    assert account.expected() == pytest.approx(1.0)
    assert account.grant(exposure=5.0) == 0.0  # slope 2 / 25: below what the others pay
    assert account.grant() == pytest.approx(1.5)
    account.spend(1.5)
    # calmer than predicted, half the cost of each step: it is given what it can use
    assert account.grant(exposure=math.sqrt(0.5)) == pytest.approx(1.5)
    assert account.grant() == account.left  # one more than was announced


def test_a_grant_can_be_asked_for_what_was_prepared() -> None:
    account = PriceAccount([Demand.of(CURVE, 1.0)] * 2, 4.0)
    assert account.grant(breakpoints=((0.0, 1.0), (1.0, 2.9))) == pytest.approx(1.0)
    assert account.grant() == pytest.approx(4.0)


@pytest.mark.parametrize("linear", [False, True])
def test_grants_become_reaches(linear: bool) -> None:
    assert reach_of(cost_of(0.02, 3.0, linear), 3.0, linear) == pytest.approx(0.02)
    assert reach_of(0.0, 0.0, linear) == math.inf
    assert reach_of(1.0, math.inf, linear) == 0.0
    assert cost_of(0.0, math.inf, linear) == 0.0


@pytest.mark.parametrize("exposure", [1e200, math.inf])
def test_an_exposure_beyond_all_numbers_asks_for_nothing(exposure: float) -> None:
    assert cost_of(1.0, exposure) == math.inf and Demand.of(CURVE, exposure, 3).steps() == []
    assert shares([Demand.of(CURVE, exposure, 3), Demand.of(CURVE, 1.0, 3)], 4.0) == [0.0, 4.0]


def test_a_whole_update_on_frontiers_stays_inside_its_budget() -> None:
    """As the runtime does it: predicted exposures, true ones, decisions by reach; calm microbatches take more."""
    frontier = first_frontier(decoder(24, 4, noise=0.05))
    assert isinstance(frontier, Frontier)
    predicted = [1.0, 0.2, 4.0, 1.0]
    true = [1.3, 0.25, 3.0, 0.7]
    total = 0.015**2
    demands = [Demand.of(frontier.breakpoints, exposure, 100) for exposure in predicted]
    account = PriceAccount(demands, pot(demands, demand_table(demands), total))
    assert account.total == pytest.approx(total)
    saved = []
    for guess, exposure in zip(predicted, true):
        row = frontier.prepare(reach_of(account.expected(), guess))
        granted = account.grant(exposure, row.breakpoints)
        plan = row.decide(reach_of(granted, exposure))
        assert cost_of(plan.risk, exposure) <= granted * (1 + 1e-6)
        account.spend(cost_of(plan.risk, exposure))
        saved.append(plan.saved_seconds - row.prepare_seconds)
    assert account.spent <= total * (1 + 1e-6)
    assert account.spent > 0.5 * total
    assert saved[1] == max(saved) and saved[2] == min(saved)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="exposure"):
        Demand.of(CURVE, math.nan)
    with pytest.raises(UsageError, match="risk cost"):
        PriceAccount([], -1.0)
    with pytest.raises(UsageError, match="risk cost"):
        TokenAccount(1.0, 10).spend(math.inf)
    with pytest.raises(UsageError, match="has tokens"):
        TokenAccount(1.0, 0)
