"""The judgement of training parity: each limit alone, what the plants do to a run, and what cannot be judged."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parity import Limits, Pair, judge

ALIKE = tuple(
    Pair(seed, exact=30.0 + seed, hilore=30.0 + seed + shift, cosines=(0.99999, 0.99995), compressed=0.4)
    for seed, shift in enumerate((0.3, -0.9, 0.4))
)


def cosine_of(error: float) -> float:
    """Of a gradient with the same plus an orthogonal error of this relative size."""
    return 1 / math.sqrt(1 + error * error)


def test_runs_that_end_alike_pass() -> None:
    verdict = judge(ALIKE)
    assert verdict.passed
    assert verdict.mean_difference == pytest.approx(-0.2 / 3)
    assert verdict.worst_difference == pytest.approx(-0.9)
    assert verdict.lowest_cosine == 0.99995
    assert verdict.lines()[-1] == "the same, within the limits"


@pytest.mark.parametrize(
    "change, word",
    [
        ({"hilore": ALIKE[0].exact + 2.4}, "mean"),
        ({"hilore": ALIKE[0].exact - 2.4}, "below"),
        ({"hilore": math.nan}, "mean"),
        ({"hilore": math.nan}, "below"),
        ({"cosines": (0.99999, 0.9989)}, "cosine"),
        ({"cosines": (math.nan, 0.99999)}, "cosine"),
        ({"cosines": ()}, "probe"),
        ({"compressed": 0.0}, "nothing was compressed"),
    ],
)
def test_one_seed_off_one_limit_is_enough(change: dict[str, object], word: str) -> None:
    verdict = judge((dataclasses.replace(ALIKE[0], **change), *ALIKE[1:]))  # type: ignore[arg-type]
    assert any(word in reason for reason in verdict.reasons)
    assert verdict.lines()[-1].startswith("NOT the same")


def test_a_seed_far_below_is_not_hidden_by_another_far_above() -> None:
    lifted = [dataclasses.replace(pair, hilore=pair.exact + shift) for pair, shift in zip(ALIKE, (-2.1, 2.1, 0.0))]
    assert [("below" in reason) for reason in judge(lifted).reasons] == [True]


def test_planted_sign_fails_by_gradients_alone() -> None:
    flipped = [dataclasses.replace(pair, cosines=tuple(-each for each in pair.cosines)) for pair in ALIKE]
    assert not judge(flipped).passed


def test_planted_sign_fails_by_scores_alone() -> None:
    """What would have been learnt is unlearnt: scores are judged without a look at gradients."""
    assert not judge([dataclasses.replace(pair, hilore=pair.exact / 2) for pair in ALIKE]).passed


@pytest.mark.parametrize("honest", [0.0025, 0.005, 0.01])
def test_planted_codec_fails_where_the_honest_one_passes(honest: float) -> None:
    """20 times the error of a plan that uses a quarter of what is allowed, or more of it."""
    probed = [dataclasses.replace(pair, cosines=(cosine_of(honest),)) for pair in ALIKE]
    planted = [dataclasses.replace(pair, cosines=(cosine_of(20 * honest),)) for pair in ALIKE]
    assert judge(probed).passed
    assert not judge(planted).passed


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_seeds_prove_nothing(count: int) -> None:
    assert not judge(ALIKE[:count]).passed
    assert not judge((ALIKE[0],) * 3).passed  # the same seed again


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(0.99, 1)),
        min_size=3,
        max_size=6,
    )
)
def test_the_limits_are_the_whole_of_it(found: list[tuple[float, float]]) -> None:
    pairs = [Pair(seed, 20.0, 20.0 + shift, (cosine,), 0.1) for seed, (shift, cosine) in enumerate(found)]
    limits, shifts = Limits(), [pair.difference for pair in pairs]
    within = (
        abs(sum(shifts) / len(shifts)) <= limits.mean_points - 1e-9
        and min(shifts) >= -limits.worst_points
        and min(cosine for _, cosine in found) >= limits.cosine
    )
    beyond = (
        abs(sum(shifts) / len(shifts)) > limits.mean_points + 1e-9
        or min(shifts) < -limits.worst_points
        or min(cosine for _, cosine in found) < limits.cosine
    )
    assert judge(pairs).passed if within else not (beyond and judge(pairs).passed)
