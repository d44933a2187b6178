"""A calibration as JSON, there and back, and against damage."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import Calibration, Observation, Place
from ds_hilore.profiling.calibration_cost import Cost
from ds_hilore.profiling.calibration_layout import Progress, as_dict, from_dict

CODECS = {"dense": (("mlp", "int8:64"), ("residual", "bf16"))}
VALUE = st.one_of(st.floats(0.0, 1e18), st.sampled_from([math.nan, math.inf]))
OBSERVATION = st.builds(
    Observation,
    st.builds(Place, st.sampled_from(["mlp", "residual"]), st.sampled_from(["int8:64", "bf16"]), st.integers(0, 2)),
    st.builds(UnitId, st.sampled_from(["model.layers.0", "block"]), st.integers(0, 3)),
    st.integers(0, 9),
    VALUE,
    VALUE,
    VALUE,
)


def units(count: int) -> list[tuple[UnitId, int, str]]:
    return [(UnitId(f"layers.{k}"), k, "dense") for k in range(count)]


def through_json(calibration: Calibration) -> Calibration:
    return from_dict(json.loads(json.dumps(as_dict(calibration), allow_nan=False)))


def example() -> dict[str, Any]:
    calibration = Calibration(cost=Cost(update_seconds=4.0))
    for wanted in calibration.interventions(0, units(6), CODECS):
        calibration.note(Observation(wanted.place, wanted.unit, 0, 1.0, 0.01, 0.02))
    calibration.cost.note(3.0, 7)
    calibration.note_judged(UnitId("layers.0"), 20, 0.1, 0.2)
    calibration.note_audit(0.01, 0.02)
    return as_dict(calibration)


@given(
    st.lists(OBSERVATION, max_size=30),
    st.lists(st.tuples(st.integers(10, 19), VALUE, VALUE), max_size=5),
    st.lists(st.tuples(st.floats(1e-9, 1.0), st.floats(0.0, 1.0)), max_size=20),
    st.integers(0, 4),
)
@settings(deadline=None)
def test_there_and_back(
    seen: list[Observation],
    judged: list[tuple[int, float, float]],
    audits: list[tuple[float, float]],
    rounds: int,
) -> None:
    """Same fields, same answers, same next interventions; what is not finite is no number afterwards."""
    calibration = Calibration(cost=Cost(update_seconds=100.0))
    for microbatch in range(rounds):
        calibration.cost.note(0.1 * len(calibration.interventions(microbatch, units(7), CODECS)), 3)
    for observation in seen:
        calibration.note(observation)
    for microbatch, predicted, measured in judged:
        calibration.note_judged(UnitId("layers.1"), microbatch, predicted, measured)
    for predicted, measured in audits:
        calibration.note_audit(predicted, measured)
    again = through_json(calibration)
    assert as_dict(again) == as_dict(calibration)
    assert (again.cost, again.audits, again.asked) == (calibration.cost, calibration.audits, calibration.asked)
    assert again.coherence == calibration.coherence
    assert again.places == calibration.places and again.disabled() == calibration.disabled()
    assert again.agreement() == calibration.agreement()
    for place in calibration.places:
        assert again.used(place) == calibration.used(place)
    assert again.interventions(9, units(7), CODECS) == calibration.interventions(9, units(7), CODECS)


def test_an_empty_one_there_and_back() -> None:
    assert through_json(Calibration()) == Calibration()


def test_resumed_rotation_goes_on_where_it_stopped() -> None:
    whole, part = Calibration(), Calibration()
    for microbatch in range(3):
        whole.interventions(microbatch, units(9), CODECS)
        part.interventions(microbatch, units(9), CODECS)
    part = through_json(part)
    for microbatch in range(3, 9):
        assert part.interventions(microbatch, units(9), CODECS) == whole.interventions(microbatch, units(9), CODECS)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("format",), 1, "format"),
        (("bands",), 2, "deeper than there are bands"),
        (("bands",), 0, "bands"),
        (("extra",), 1, "extra"),
        (("cost", "seconds"), -1.0, "seconds"),
        (("cost", "seconds"), math.nan, "seconds"),
        (("cost", "passes"), "3", "passes"),
        (("audits", "weight"), 0.0, "do not belong together"),
        (("audits", "weight"), 17.0, "weight"),
        (("observations", 0, "exposure"), math.inf, "exposure"),
        (("observations", 0, "gradient_error"), 1e19, "gradient_error"),
        (("observations", 0, "microbatch"), 20, "both fitted and judged"),
        (("observations", 0, "microbatch"), True, "microbatch"),
        (("observations", 0, "group"), "mlp\nhilore: all is well", "group"),
        (("observations", 0, "codec"), "", "codec"),
        (("asked", 0, "times"), 0, "times"),
        (("asked", 0, "unit"), "x" * 513, "unit"),
        (("asked", 1), None, "asked"),
    ],
)
def test_damage_is_refused(path: tuple[str | int, ...], value: object, says: str) -> None:
    stored = example()
    from_dict(stored)  # undamaged it is read
    target: Any = stored
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(ValidationError, match=says):
        from_dict(stored)


@pytest.mark.parametrize("key", list(example()))
def test_nothing_may_be_missing(key: str) -> None:
    stored = example()
    del stored[key]
    with pytest.raises(ValidationError, match=key):
        from_dict(stored)


def test_a_unit_listed_twice_is_refused() -> None:
    stored = example()
    stored["asked"].append(stored["asked"][0])
    with pytest.raises(ValidationError, match="listed twice"):
        from_dict(stored)


@pytest.mark.parametrize("change", ["raised", "audit", "microbatches", "fitted", "accepted", "nothing", "last digit"])
def test_ranks_that_learnt_otherwise_are_at_another_point(change: str) -> None:
    """All that ranks learn together counts; what is each one's own, and the last digit of a sum, does not."""

    def learnt() -> Calibration:
        calibration = Calibration()
        calibration.note_audit(0.01, 0.02)
        return calibration

    here, other = learnt(), learnt()
    place = Place("mlp", "int8:64")
    other.note(Observation(place, UnitId("layers.0"), 0, 1.0, 0.01, 0.02))  # a rank's own
    if change == "raised":
        other.raised = 1.5
    elif change == "audit":
        other.note_audit(0.01, 0.02)
    elif change == "last digit":
        other.audits.measured = math.nextafter(other.audits.measured, 1.0)
    counts = [3 + (change == "microbatches"), change != "fitted", change == "accepted"]
    alike = change in ("nothing", "last digit")
    assert (Progress(here, 3, True, False).point == Progress(other, *counts).point) == alike
