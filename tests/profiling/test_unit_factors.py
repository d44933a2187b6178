"""Factors of single units: planted ones are found, scatter is not taken for one."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import Calibration, Observation, Place
from ds_hilore.profiling.unit_factors import STEP, unit_factors, variances

UNITS = [UnitId(f"layers.{k}") for k in range(12)]


def _scattered(deviations: list[float], scatter: float, count: int, seed: int) -> dict[UnitId, list[float]]:
    drawn = random.Random(seed)
    return {
        unit: [own + drawn.gauss(0, scatter) for _ in range(count)] for unit, own in zip(UNITS, deviations, strict=True)
    }


@given(st.integers(0, 10_000))
def test_planted_deviations_are_found_to_a_step(seed: int) -> None:
    drawn = random.Random(seed)
    planted = [drawn.uniform(-1, 1) for _ in UNITS]
    found = unit_factors(_scattered(planted, 0.01, 3, seed))
    for unit, own in zip(UNITS, planted, strict=True):
        assert abs(math.log(found[unit]) - own) < math.log(STEP)


def test_scatter_alone_hardly_makes_factors() -> None:
    """Over many draws: on average far less than half of what the means of units scatter."""
    shrunk, raw = [], []
    for seed in range(100):
        residuals = _scattered([0.0] * len(UNITS), 0.5, 3, seed)
        found = unit_factors(residuals)
        shrunk += [math.log(found.get(unit, 1.0)) ** 2 for unit in UNITS]
        raw += [fmean(values) ** 2 for values in residuals.values()]
    assert fmean(shrunk) < 0.25 * fmean(raw)


def test_a_unit_that_was_seen_more_often_keeps_more_of_its_own() -> None:
    residuals = _scattered([-1.0, 1.0] * 6, 1.0, 4, seed=3)
    often, once = UNITS[0], UNITS[2]
    residuals[often], residuals[once] = [-1.0] * 40, [-1.0]
    found = unit_factors(residuals)
    assert found[often] < found[once] < 1


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), max_size=6))
@settings(deadline=None)
def test_variances_are_never_negative_and_need_several_of_both(groups: list[list[float]]) -> None:
    within, between = variances(groups)
    assert within >= 0 and between >= 0
    if len(groups) < 2 or all(len(values) == 1 for values in groups):
        assert (within, between) == (0, 0)


def test_balanced_variances_are_those_of_the_textbook() -> None:
    groups = [[1.0, 3.0], [4.0, 6.0], [9.0, 7.0]]  # means 2, 5, 8; within: 2; of means: 9
    assert variances(groups) == (pytest.approx(2.0), pytest.approx(9.0 - 2.0 / 2))


def test_calibration_multiplies_the_slope_of_a_place_by_them() -> None:
    """Two units of one band, the second four times as sensitive; the third was never seen."""
    calibration, place = Calibration(), Place("mlp", "bf16")
    for microbatch in range(8):
        for unit, slope in ((UNITS[0], 1.0), (UNITS[1], 4.0)):
            error = slope * (1 + 0.01 * (-1) ** microbatch)
            calibration.note(Observation(place, unit, microbatch, 1.0, 0.1, 0.1 * error))
    calm, steep, unseen = (calibration.risk(0, 3, {("mlp", "bf16"): 0.1}, unit) for unit in UNITS[:3])
    shared = calibration.risk(0, 3, {("mlp", "bf16"): 0.1})
    assert calm is not None and steep is not None and unseen == shared is not None
    assert calm < shared < steep
    assert steep / calm == pytest.approx(4.0, rel=2 * (STEP - 1))
