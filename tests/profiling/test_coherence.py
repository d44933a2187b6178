"""The factor that audits fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.profiling.coherence import Coherence

ERROR = st.floats(1e-6, 1.0)


def after(*audits: tuple[float, float]) -> float:
    coherence = Coherence()
    for predicted, measured in audits:
        coherence.note(predicted, measured)
    return coherence.factor


def test_nothing_known_is_orthogonal() -> None:
    assert Coherence().factor == 1.0


def test_one_audit_counts_as_much_as_the_prior() -> None:
    """Squares: (3^2 + 1) / 2."""
    assert after((0.01, 0.03)) == pytest.approx(math.sqrt(5))


@given(st.floats(0.5, 5.0), st.lists(ERROR, min_size=60, max_size=80))
@settings(deadline=None)
def test_a_steady_factor_is_found(truth: float, predictions: list[float]) -> None:
    """But for the prior, which keeps a weight of 1 in 17."""
    found = after(*((predicted, truth * predicted) for predicted in predictions))
    assert found**2 == pytest.approx((16 * truth**2 + 1) / 17, rel=0.03)


@given(st.lists(st.tuples(ERROR, ERROR), min_size=1, max_size=20), st.floats(1e-6, 1e6))
@settings(deadline=None)
def test_unit_of_errors_does_not_matter(audits: list[tuple[float, float]], scale: float) -> None:
    assert after(*((scale * p, scale * m) for p, m in audits)) == pytest.approx(after(*audits))


def test_the_past_fades() -> None:
    """An audit's square counts 15/16 of what it did after each later one."""
    low, high = (0.01, 0.01), (0.01, 0.02)
    for audits in ([low] * 40 + [high] * 8, [high] * 8 + [low] * 40):
        weights = [(15 / 16) ** age for age in reversed(range(len(audits)))]
        squares = sum(weight * (m / p) ** 2 for weight, (p, m) in zip(weights, audits))
        assert after(*audits) == pytest.approx(math.sqrt((squares + 1) / (sum(weights) + 1)))
    assert after(*[high] * 8, *[low] * 40) < 1.1
    assert after(*[low] * 40, *[high] * 8) > 1.4


@given(st.integers(1, 300))
@settings(deadline=None)
def test_no_run_of_perfect_audits_frees_the_budget(count: int) -> None:
    assert 0.24 < after(*[(0.01, 0.0)] * count) < 1


def test_rounding_noise_of_updates_that_hardly_compressed_counts_for_little() -> None:
    assert after(*[(0.01, 0.01)] * 10, (1e-9, 1e-6)) == pytest.approx(1.0, abs=1e-6)


def test_an_audit_that_says_nothing_teaches_nothing() -> None:
    untold = [(0.0, 0.1), (math.nan, 0.1), (0.1, math.nan), (math.inf, 0.1), (0.1, math.inf), (1e-200, 0.1)]
    assert after(*untold) == 1.0
