"""The tables of docs/reliability.md say what the suite tries, and name tests that there are."""

from __future__ import annotations

import re

import pytest

from tests.faults import table
from tests.faults.elsewhere import ELSEWHERE
from tests.faults.endings import ENDINGS
from tests.faults.records import Fault, Place
from tests.faults.suite import FAULTS
from tests.ranks import ROOT


def test_faults_have_names_of_their_own() -> None:
    names = [*(fault.name for fault in FAULTS), *(ending.name for ending in ENDINGS), *ELSEWHERE]
    assert len(set(names)) == len(names)


def test_there_are_at_least_sixty_kinds() -> None:
    assert len([fault for fault in FAULTS if not (fault.open or fault.thorough)]) >= 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_record_makes_sense(fault: Fault) -> None:
    assert fault.stages and set(fault.stages) <= {0, 1, 2, 3} and fault.ranks in ((0, 1), (0,), (1,))
    assert fault.name == fault.name.strip() and "|" not in fault.name


def test_every_fault_is_in_the_table() -> None:
    text = table.faults()
    assert all(f"| {each.name} " in text for each in (*FAULTS, *ENDINGS))
    assert all(f"### {place.value}\n" in text for place in Place)


def test_the_summary_adds_up() -> None:
    figures = dict(re.findall(r"^\| (.+?) \| (\d+) \|$", table.summary(), re.MULTILINE))
    kinds = ("right result", "an error on every rank, then a right next update")
    gone = "the process of a rank ends, and the other is told by an error"
    assert sum(int(figures[kind]) for kind in (*kinds, gone)) == int(figures["kinds of faults, on two ranks"])


@pytest.mark.parametrize("test", ELSEWHERE.values())
def test_tests_elsewhere_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
