"""The fault suite: no hang, no silently wrong gradient, and a right next update, after every fault of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.driver import Trials
from tests.faults.endings import ENDINGS, Ending, complaints
from tests.faults.records import Fault
from tests.faults.suite import FAULTS

#: Seconds until every rank of a job must have ended (issue 15).
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials(LIMIT_S) as made:
        yield made


@pytest.mark.parametrize(
    "fault", [each for each in FAULTS if not (each.open or each.thorough)], ids=lambda fault: fault.name
)
def test_a_fault_is_survived(trials: Trials, fault: Fault) -> None:
    # where ranks differ each stage has its own ways; else CI takes one, the command all
    stages = fault.stages if len(fault.ranks) == 1 else fault.stages[-1:]
    outcome = trials.try_fault(fault, stages)
    assert not outcome.complaints, "\n".join(outcome.complaints)


@pytest.mark.parametrize("ending", [each for each in ENDINGS if not each.thorough], ids=lambda ending: ending.name)
def test_a_process_that_ends_is_not_waited_for(ending: Ending) -> None:
    """Rank 0 is told, by an error that says so."""
    assert not complaints(ending, LIMIT_S)
