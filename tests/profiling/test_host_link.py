"""What a link to host memory carries."""

from __future__ import annotations

import pytest
import torch

from ds_hilore.profiling import host_link
from ds_hilore.profiling.host_link import PASSES, LinkSpeed, measured
from tests.recovery.links import WatchedLink


def test_the_slower_way_of_the_fastest_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = iter([0.0, 4.0, 5.0, 0.0, 2.0, 5.0, 0.0, 3.0, 4.5])  # there and back: 4, 1; 2, 3; 3, 1.5
    monkeypatch.setattr(host_link.time, "perf_counter", lambda: next(spans))
    link = WatchedLink()
    speed = measured(link, torch.device("cpu"), size=1000)
    assert speed == LinkSpeed(500.0, overlaps=False, rounding=1.001)
    assert link.sent == link.fetched == [1000] * PASSES


def test_what_units_may_send() -> None:
    speed = LinkSpeed(100.0, overlaps=True)
    assert speed.seconds(50) == 0.5
    assert [speed.stride(size, unit_s=1.0) for size in (0, 1, 80, 81, 160, 161)] == [1, 1, 1, 2, 2, 3]
    assert speed.exposed_seconds(50) == 0.0
    assert speed.stride(50, unit_s=0.0) > 10**6  # units that take no time hide nothing


def test_copies_that_overlap_nothing_cost_what_they_take() -> None:
    speed = LinkSpeed(100.0, overlaps=False)
    assert speed.stride(10**6, unit_s=1e-9) == 1 and speed.exposed_seconds(50) == 1.0


def test_host_memory_is_rounded_up() -> None:
    assert LinkSpeed(1.0, True, rounding=2.0).host_bytes(3) == 6
    assert LinkSpeed(1.0, True, rounding=1.5).host_bytes(3) == 5
