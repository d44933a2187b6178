"""The margin learnt from past prediction errors."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.planning.margin import ExposureMargin


def test_before_anything_is_known_the_prior_speaks() -> None:
    margin = ExposureMargin(prior=0.25)
    low, *_, middle, _, high = margin.ratios(5)[0], *margin.ratios(5)[1:]
    assert margin.deviation == pytest.approx(math.log(1.25))
    assert middle == pytest.approx(1.0)
    assert 1 / 1.4 < low < 1 / 1.25 and low * high == pytest.approx(1.0)
    assert ExposureMargin(prior=0.0).ratios(3) == pytest.approx((1.0, 1.0, 1.0))


def test_mean_and_deviation_are_those_of_what_was_seen() -> None:
    rng = random.Random(1)
    offs = [0.4 + 0.3 * rng.gauss(0, 1) for _ in range(2000)]
    margin = ExposureMargin(memory=500.0)
    for off in offs:
        margin.observe(2.0, 2.0 * math.exp(off))
    assert margin.mean == pytest.approx(0.4, abs=0.05)
    assert margin.deviation == pytest.approx(0.3, abs=0.03)
    ratios = margin.ratios(9)
    assert all(low < high for low, high in pairwise(ratios))
    assert fmean(map(math.log, ratios)) == pytest.approx(margin.mean)
    inside = sum(ratios[0] <= math.exp(off) <= ratios[-1] for off in offs) / len(offs)
    assert 0.8 < inside < 0.95  # the outermost of nine stand for a ninth each


def test_the_past_fades() -> None:
    margin = ExposureMargin(memory=10.0)
    for _ in range(100):
        margin.observe(1.0, 5.0)
    for _ in range(100):
        margin.observe(1.0, 1.0)
    assert abs(margin.mean) < 1e-3
    assert margin.weight < 11


def test_what_has_no_logarithm_is_far_off_or_nothing() -> None:
    margin = ExposureMargin()
    for predicted, true in ((0.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (-1.0, 1.0)):
        margin.observe(predicted, true)
    assert margin == ExposureMargin()
    margin.observe(1.0, 0.0)
    assert margin.mean == pytest.approx(-math.log(1e3))
    margin.observe(0.0, 1.0)
    assert margin.mean == pytest.approx(0.0, abs=0.1)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in margin.ratios())


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="memory"):
        ExposureMargin(memory=0)
    with pytest.raises(UsageError, match="at least one ratio"):
        ExposureMargin().ratios(0)
