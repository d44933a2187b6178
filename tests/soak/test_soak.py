"""The verdict on a soak notices what it is for. The soak itself is a command: `python -m tests.soak`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak.job import Seen
from tests.soak.verdict import DRIFT, FROM, GROWTH, NOISE, SETTLING, complaints, rows

GOOD = [Seen(update, 1000, 900, 500, 910, 64, 3, 6, 0.25) for update in range(300)]


def test_a_good_run_has_no_complaints() -> None:
    assert complaints(0, GOOD) == []
    assert len(list(rows([GOOD, GOOD]))) == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peak": int(1000 * (1 + NOISE)) + 2}, "over its budget"),
        ({"predicted": 1001}, "a plan of"),
    ],
)
def test_one_update_over_its_budget_is_told_once_it_has_settled(changed: dict[str, int], said: str) -> None:
    for place in (SETTLING - 1, SETTLING, 200):
        run = [replace(each, **changed) if each.update == place else each for each in GOOD]
        found = complaints(0, run)
        assert (len(found) == 1 and said in found[0]) if place >= SETTLING else not found


def test_growth_and_drift_are_told() -> None:
    grown = [replace(each, level=int(500 * (1 + 1.5 * GROWTH * (each.update > FROM + 20)))) for each in GOOD]
    assert "resident memory grew" in complaints(0, grown)[0]
    drifted = [replace(each, predicted=int(910 * (1 + 1.5 * DRIFT * (each.update > 150)))) for each in GOOD]
    assert "drifted" in complaints(0, drifted)[0]
