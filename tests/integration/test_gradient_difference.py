"""Which unit and parameter a difference of gradients is put down to, and when it is one."""

from __future__ import annotations

import json
import math

import pytest

from ds_hilore.integration.gradient_difference import Difference, UnitNorms

UNITS = ["layers.0", "layers.1", "layers.2"]
NORMS = {f"layers.{k}.{name}": norm for k in range(3) for name, norm in (("a", 3.0), ("b", 4.0))} | {"head": 1.0}


def test_the_last_unit_that_is_off_is_named_with_its_worst_parameter() -> None:
    """S1: what is wrong in a unit's state is wrong in all units before it, more so perhaps."""
    off = {"layers.0.a": 5.0, "layers.1.a": 1e-5, "layers.1.b": 2e-5, "layers.2.a": 1e-7, "head": 0.0}
    found = UnitNorms(UNITS, NORMS).exact(off, 1e-6)
    assert (found.unit, found.parameter) == ("layers.1", "layers.1.b")
    assert found.wrong and found.relative == pytest.approx(2e-5 / 5.0)


def test_a_parameter_counts_by_the_gradient_of_its_unit() -> None:
    """S2: one whose gradient is zero but for rounding is off by any multiple of itself."""
    norms = UnitNorms(UNITS, NORMS | {"layers.1.bias": 1e-9})
    assert not norms.exact({"layers.1.bias": 1e-9}, 1e-6).wrong
    assert norms.exact({"layers.1.bias": 1e-4}, 1e-6).wrong


def test_where_nothing_is_wrong_the_farthest_is_told() -> None:
    found = UnitNorms(UNITS, NORMS).exact({"layers.0.a": 1e-7, "layers.2.a": 5e-8, "head": 0.0}, 1e-6)
    assert not found.wrong and found.unit == "layers.0" and found.relative == pytest.approx(2e-8)


def test_a_unit_within_a_unit_is_the_one_that_is_named() -> None:
    norms = UnitNorms(["tower", "tower.layers.0"], {"tower.norm": 1.0, "tower.layers.0.a": 1.0})
    assert norms.exact({"tower.layers.0.a": 1.0}, 1e-6).unit == "tower.layers.0"


def test_compressed_plans_are_judged_as_a_whole() -> None:
    """S4: single units may be off by more."""
    norms = UnitNorms(UNITS, NORMS)
    off = {"layers.0.a": 0.3, "layers.1.a": 0.4}
    found = norms.compressed(off, 0.06)
    assert found.relative == pytest.approx(0.5 / math.sqrt(3 * 25 + 1)) and not found.wrong
    assert norms.compressed(off, 0.05).wrong and found.parameter == "layers.1.a"


def test_gradients_of_zero() -> None:
    norms = UnitNorms(UNITS, {})
    assert norms.exact({"layers.0.a": 0.0}, 1e-6).relative == 0.0
    assert norms.exact({"layers.0.a": 1e-30}, 1e-6).wrong
    assert norms.exact({}, 1e-6) == Difference(0.0, 1e-6, "", "")
    assert norms.compressed({"layers.0.a": 1.0}, 0.1).wrong


def test_ranks_can_tell_each_other() -> None:
    told = Difference(math.inf, 1e-6, "layers.1", "layers.1.a").payload()
    again = Difference(*json.loads(json.dumps(told, allow_nan=False)))
    assert again.wrong and again.unit == "layers.1"


@pytest.mark.parametrize(("treatment", "cause"), [("H", "stored"), ("R:attention", "replay"), ("L:mlp=int8", "error")])
def test_the_cause_goes_by_the_treatment(treatment: str, cause: str) -> None:
    said = Difference(0.1, 1e-6, "layers.1", "layers.1.a").described(treatment)
    assert f"unit layers.1 ({treatment})" in said and "layers.1.a" in said and cause in said
    assert "no unit" in Difference(0.1, 1e-6, "", "head").described("")
