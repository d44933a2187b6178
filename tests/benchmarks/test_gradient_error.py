"""What the benchmark of gradient error demands, and how it puts ranks together."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.gradient_error import Found, shortcomings
from benchmarks.gradient_error_rank import agreement_of
from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import Judgement

GOOD = Found(
    audits=tuple((0.008, measured) for measured in (0.006, 0.019, 0.004, 0.009, 0.008, 0.01, 0.005, 0.007)),
    compressed=(0.3, 0.2),
    over_units=0.9,
    over_microbatches=0.8,
    judgements=72,
    calibration_updates=20.0,
    calibration=("calibration: done",),
)


def test_nothing_is_wrong_where_all_limits_are_met() -> None:
    assert shortcomings(GOOD, error=0.01, updates=8) == []


@pytest.mark.parametrize(
    "change, word",
    [
        ({"audits": GOOD.audits[:7]}, "7 of 8"),
        ({"audits": ()}, "0 of 8"),
        ({"audits": ((0.008, 0.0125),) * 8}, "mean"),
        ({"audits": (*GOOD.audits[:7], (0.008, 0.0201))}, "largest"),
        ({"audits": (*GOOD.audits[:7], (0.008, float("nan")))}, "mean"),
        ({"compressed": (0.0, 0.0)}, "nothing was compressed"),
        ({"over_units": 0.69}, "over units"),
        ({"over_microbatches": None}, "over microbatches is unknown"),
    ],
)
def test_each_limit_is_demanded(change: dict[str, object], word: str) -> None:
    said = shortcomings(dataclasses.replace(GOOD, **change), error=0.01, updates=8)  # type: ignore[arg-type]
    assert any(word in reason for reason in said)


def test_what_a_stage_gave_survives_json() -> None:
    assert Found.of(json.loads(json.dumps(dataclasses.asdict(GOOD)))) == GOOD


def test_units_of_all_ranks_are_judged_together_and_microbatches_apart() -> None:
    low, high = UnitId("layers.0", 0), UnitId("layers.1", 0)

    def judged(unit: UnitId, number: int, predicted: float, measured: float) -> Judgement:
        return Judgement(unit, number, predicted, measured)

    # over units both ranks agree with the prediction; microbatch 4 of the second rank is not that of the first
    first = [judged(low, 4, 1.0, 1.0), judged(high, 4, 2.0, 3.0)]
    second = [judged(low, 4, 5.0, 0.1), judged(high, 4, 6.0, 0.2)]
    found = agreement_of([first, second])
    assert found.count == 4
    assert found.units == pytest.approx(1.0)
    assert found.microbatches == pytest.approx(-1.0)
