"""The account of gradient error: what microbatches may spend, and what they are told to be worth."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.types import Shape, UnitId
from ds_hilore.objective.grpo import GRPOLossConfig, token_coefficients
from ds_hilore.objective.reach import CAUSAL, OWN_POSITION, Reach, exposures
from ds_hilore.recovery.encoded import Statistic
from ds_hilore.runtime.forecast import Forecast
from ds_hilore.runtime.risk import Exposed, RiskKeeper, RiskRules, read
from ds_hilore.runtime.update import Coefficients, Source

UNITS = [UnitId("a"), UnitId("b")]
amounts = st.floats(1e-3, 1e3)


def keeper(norm: float = 1.0, **rules: object) -> RiskKeeper:
    made = RiskKeeper(RiskRules(**({"limit": 0.01} | rules)))  # type: ignore[arg-type]
    made.end_update(norm)
    return made


def test_nothing_is_risked_before_a_norm_is_known() -> None:
    made = RiskKeeper(RiskRules(limit=0.01))
    made.observe(Exposed(1.0, 10))
    assert made.expect(10)[0] == 0.0 and not made.active
    made.end_update(2.0)
    assert made.expect(10)[0] > 0


@given(st.lists(amounts, min_size=1, max_size=6), st.integers(1, 4))
def test_the_microbatches_of_an_update_stay_within_its_budget(exposures: list[float], ranks: int) -> None:
    """Whatever their exposures: squares of all ranks add up to no more than the square of the limit."""
    made = keeper(ranks=ranks, microbatches=len(exposures))
    made.observe(Exposed(1.0, 10))
    for exposure in exposures:
        exposed = Exposed(exposure, 10)
        now = made.decide(exposed, UNITS)
        made.note(exposed, now.budget)  # all of it is spent
    assert ranks * sum(risk * risk for risk in made.spent) <= 0.01**2 * (1 + 1e-9)


@given(amounts, amounts)
def test_scaling_the_loss_changes_nothing(norm: float, scale: float) -> None:
    plain, scaled = keeper(norm), keeper(norm * scale)
    plain.observe(Exposed(3.0, 10))
    scaled.observe(Exposed(3.0 * scale, 10))
    assert scaled.expect(10)[0] == pytest.approx(plain.expect(10)[0], rel=1e-9)


def forecast(exposure: float, tokens: int = 10) -> Forecast:
    """Of a microbatch with this exposure."""

    def made(advantage: float) -> Forecast:
        return Forecast(torch.tensor([advantage]).double(), torch.ones(1, tokens), float(tokens), None)

    return made(exposure / made(1.0).exposure)


#: Plans that save 1, 2 and 3 seconds at risks of 1, 2 and 4 per exposure.
POINTS = ((0.0, 0.0), (1.0, 1.0), (4.0, 2.0), (16.0, 3.0))


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=5))
def test_an_announced_update_stays_within_its_budget(exposures: list[tuple[float, float]]) -> None:
    """Whatever was foreseen, and whatever comes."""
    made = keeper(microbatches=len(exposures))
    made.observe(Exposed(1.0, 10))
    made.announce([forecast(foreseen) for foreseen, _ in exposures])
    made.set_price(POINTS)
    for foreseen, true in exposures:
        made.expect(10, forecast(foreseen))
        exposed = Exposed(true, 10)
        made.note(exposed, made.decide(exposed, UNITS).budget)
    assert sum(risk * risk for risk in made.spent) <= 0.01**2 * (1 + 1e-9)


def test_the_price_of_risk_gives_calm_microbatches_what_they_can_use() -> None:
    made = keeper(microbatches=2)
    made.observe(Exposed(1.0, 10))
    made.announce([forecast(1e-3), forecast(1.0)])
    made.set_price(POINTS)
    calm = made.decide(Exposed(1e-3, 10), UNITS)
    assert calm.budget >= 4 * 1e-3 * (1 - 1e-6), "all it can use"
    made.note(Exposed(1e-3, 10), 4e-3)
    violent = made.decide(Exposed(1.0, 10), UNITS)
    assert violent.budget == pytest.approx(math.sqrt(0.01**2 - 4e-3**2))


@pytest.mark.parametrize("advantage", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("count", [10.0, 0.0, -1.0])
def test_a_forecast_of_anything_raises_nothing(advantage: float, count: float) -> None:
    """Ranks that raise leave the others waiting: what foresees nothing is no announcement."""
    made = keeper(microbatches=2)
    made.observe(Exposed(1.0, 10))
    broken = Forecast(torch.tensor([advantage]), torch.ones(1, 10), count, None)
    made.announce([forecast(1.0), broken])
    made.set_price(POINTS)
    reach, _ = made.expect(10, forecast(1.0))
    assert 0 < reach < math.inf
    made.note(Exposed(1.0, 10), made.decide(Exposed(1.0, 10), UNITS).budget)
    assert broken.usable == (0 <= broken.exposure < math.inf)
    if not broken.usable:
        assert made.expect(10, broken) == (0.0, (1.0,))
    made.note(Exposed(1.0, 10), made.decide(Exposed(math.inf, 10), UNITS).budget)
    assert sum(risk * risk for risk in made.spent) <= 0.01**2 * (1 + 1e-9)


@pytest.mark.parametrize("ended", ["stepped", "aborted"])
def test_what_was_foreseen_of_an_update_ends_with_it(ended: str) -> None:
    """Of an update whose microbatches were forced, or never came: neither its prices nor its margin are of the next.
    One that starts again stays announced."""
    made = keeper(microbatches=1)
    made.observe(Exposed(1.0, 10))
    made.announce([forecast(1e-3)])
    made.expect(10, forecast(1e-3))
    made.end_update(1.0) if ended == "stepped" else made.abort()
    assert made.announced == (ended == "aborted")
    before = made.margin.weight
    made.observe(Exposed(5.0, 10))
    assert made.margin.weight == before


def test_a_microbatch_is_compared_with_its_own_forecast_only() -> None:
    made = keeper()
    made.observe(Exposed(1.0, 10))
    made.expect(10)
    made.observe(Exposed(1.0, 10))
    seen = made.margin.weight
    made.observe(Exposed(50.0, 10))  # forced: nothing was expected of it
    assert made.margin.weight == seen > 0


def test_a_forecast_is_the_exposure_at_ratio_1() -> None:
    """Of the coefficients that the loss gives before anything has moved, without a prompt and without KL."""
    advantages, mask = torch.tensor([2.0, -0.5]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    weights = torch.tensor([0.5, 1.0])
    made = Forecast(advantages, mask, 3, weights)
    logps = torch.zeros(2, 3)
    omega = token_coefficients(
        logps, logps, advantages, mask, 3, config=GRPOLossConfig(beta=0.0), weights=weights[:, None]
    )
    seen = read([Coefficients(omega, Source.FORMULA, mask)], [])
    assert made.ready and made.exposure == pytest.approx(seen.exposure) and made.tokens == seen.tokens == 3
    by_token = Forecast(advantages[:, None].expand(2, 3), mask, torch.tensor(3.0), weights)
    assert by_token.exposure == pytest.approx(made.exposure)


def test_calm_microbatches_leave_what_they_do_not_use() -> None:
    made = keeper(microbatches=2)
    made.observe(Exposed(1.0, 10))
    first = made.decide(Exposed(0.1, 10), UNITS)
    made.note(Exposed(0.1, 10), 0.0)
    second = made.decide(Exposed(1.0, 10), UNITS)
    assert second.budget == pytest.approx(math.sqrt(2) * first.budget)


def test_what_may_not_be_used_is_infinitely_exposed() -> None:
    made = keeper()
    now = made.decide(Exposed(2.0, 10, frozenset({UNITS[1]})), UNITS)
    assert now.exposures == {UNITS[0]: 2.0, UNITS[1]: math.inf}
    assert set(made.decide(Exposed(math.inf, 10), UNITS).exposures.values()) == {math.inf}


def test_static_risk_goes_by_the_mean_of_calibration() -> None:
    made = keeper(static=True)
    made.freeze([1.0, 3.0, math.inf])
    made.observe(Exposed(1.0, 10))
    calm, violent = (made.decide(Exposed(exposure, 10), UNITS) for exposure in (0.01, 100.0))
    assert calm == violent and set(calm.exposures.values()) == {2.0}
    assert made.expect(10) == (0.01 / 2.0, (1.0,))


def test_an_update_tells_its_predicted_error() -> None:
    made = keeper(norm=2.0)
    made.note(Exposed(1.0, 10), 0.006)
    made.note(Exposed(1.0, 10), 0.008)
    assert made.end_update(2.0) == pytest.approx(0.01 / 2.0)
    assert made.end_update(2.0) == 0.0


def test_an_update_that_starts_again_has_spent_nothing() -> None:
    made = keeper()
    made.note(Exposed(1.0, 10), 0.006)
    made.abort()
    assert made.end_update(None) == 0.0


@pytest.mark.parametrize("norm", [None, math.nan, math.inf, 0.0])
def test_a_norm_that_says_nothing_is_passed_by(norm: float | None) -> None:
    made = keeper(norm=3.0)
    made.end_update(norm)
    assert made.norm == 3.0


# -- reading -------------------------------------------------------------------------------------------------------


class _Call:
    def __init__(self, unit: UnitId, *squares: float) -> None:
        self.unit = unit
        self.statistics = [Statistic("mlp", "int8", torch.tensor([square, 1.0]).double()) for square in squares]


def test_what_is_read_of_a_microbatch() -> None:
    omega = torch.tensor([[0.5, -1.0, math.nan]])
    seen = [
        Coefficients(omega, Source.FORMULA, torch.tensor([[1, 1, 0]])),
        Coefficients(torch.full((1, 2), 0.25), Source.FORMULA),
    ]
    calls = [_Call(UNITS[0], 0.1, math.nan), _Call(UNITS[1], 0.1, 0.2)]
    parts = [(0.5 + 1 / 2, 1.0), (0.25 + 0.25 / 2, 0.25)]  # each token sees half of the other one at most
    expected = math.hypot(*parts[0], *parts[1])
    assert read(seen, calls) == Exposed(pytest.approx(expected), 4, frozenset({UNITS[0]}))  # type: ignore[arg-type]


def test_units_of_one_microbatch_are_exposed_by_their_reach() -> None:
    """In one copy, with the prompt before the coefficients; a window that holds the row is none."""
    omega = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double()
    shape = Shape(2, 10)
    reaches = {"b": Reach(4), "c": Reach(10), "d": Reach(1)}
    calls = [_Call(UnitId(name)) for name in "abcd"]
    seen = read([Coefficients(omega, Source.FORMULA)], calls, reaches, shape)  # type: ignore[arg-type]
    wide, narrow, own = exposures(omega, (CAUSAL, Reach(4), OWN_POSITION), before=3).tolist()
    assert seen.by_unit == {UnitId("b"): narrow, UnitId("d"): own} and seen.exposure == wide
    now = keeper().decide(seen, [UnitId(name) for name in "abcd"])
    assert [now.exposures[UnitId(name)] for name in "abcd"] == [wide, narrow, wide, own]
    assert len({wide, narrow, own}) == 3
    packed = read([Coefficients(omega.reshape(1, 12), Source.FORMULA)], calls, reaches, shape)  # type: ignore[arg-type]
    assert packed.exposure == pytest.approx(exposures(omega.reshape(1, 12), (CAUSAL,)).item())


def test_coefficients_that_are_not_finite_count_for_all_reaches() -> None:
    calls = [_Call(UnitId("b"))]
    broken = Coefficients(torch.tensor([[1.0, math.nan]]), Source.FORMULA)
    seen = read([broken], calls, {"b": Reach(1)}, Shape(1, 2))  # type: ignore[arg-type]
    assert seen.exposure == seen.of(UnitId("b")) == math.inf


def test_without_coefficients_only_encoded_state_is_read() -> None:
    seen = read([], [_Call(UNITS[0], 0.1), _Call(UNITS[1], math.inf)])  # type: ignore[list-item]
    assert seen == Exposed(math.inf, 0, frozenset({UNITS[1]}))
    assert read([], []) == Exposed(math.inf, 0)


def test_a_coefficient_that_is_not_finite_makes_everything_exact() -> None:
    omega = torch.tensor([[0.5, math.inf]])
    assert read([Coefficients(omega, Source.FORMULA)], []).exposure == math.inf


@given(st.lists(amounts, min_size=1, max_size=6), st.integers(1, 4))
def test_in_paper_mode_risks_add_up_as_they_are(exposures: list[float], ranks: int) -> None:
    """Of all microbatches and ranks to no more than the limit; what audits find changes nothing."""
    made = keeper(ranks=ranks, microbatches=len(exposures), linear=True)
    made.correction = 3.0
    made.observe(Exposed(1.0, 10))
    assert not made.priced
    assert made.expect(10)[0] == pytest.approx(0.01 / ranks / len(exposures) / made.typical / 10, rel=1e-9)
    for exposure in exposures:
        exposed = Exposed(exposure, 10)
        made.note(exposed, made.decide(exposed, UNITS).budget)  # all of it is spent
    assert ranks * sum(made.spent) == pytest.approx(0.01, rel=1e-9)
    assert made.end_update(1.0) == pytest.approx(0.01 / ranks, rel=1e-9)


def test_in_paper_mode_exposure_is_the_sum_over_tokens() -> None:
    """Of every unit, whatever its state reaches; over all losses of the microbatch."""
    omega = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    losses = [Coefficients(omega, Source.FORMULA), Coefficients(-3 * omega, Source.FORMULA, omega > 0)]
    seen = read(losses, [_Call(UNITS[1], 0.1)], {"b": Reach(1)}, Shape(2, 3), linear=True)  # type: ignore[list-item]
    assert seen == Exposed(22.0, 6, frozenset(), {UNITS[1]: 22.0})
