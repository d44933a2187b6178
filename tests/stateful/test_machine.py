"""A few examples of the state machine; `python -m tests.stateful --examples 300` tries many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool
from tests.stateful.machine import EXCEPTIONS, RESUMED, UPDATES


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    with RankPool(world=1) as pool:
        yield pool


def test_any_order_of_what_hosts_do_gives_the_plain_updates(process: RankPool) -> None:
    (counts,) = process.run("tests.stateful.machine:explore", examples=8, steps=24, timeout=200.0)
    assert counts[UPDATES] >= 5 and counts[RESUMED] > 0 and counts[EXCEPTIONS] > 0, counts
