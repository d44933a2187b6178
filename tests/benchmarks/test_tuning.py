"""The tuner against every possibility, on made-up peaks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import pytest

from benchmarks.bench import Bench
from benchmarks.methods import NONE, SELECTIVE, TORCH, kept_layers
from benchmarks.records import Case, Peak
from benchmarks.selective import POLICIES
from benchmarks.tuning import Tuner, policy_replays, saved_per_layer

LAYERS = 6
TORCH_BYTES, LAYER_BYTES = 1000, 100
#: Bytes that a policy holds per layer, and the seconds of a replay that are left; one saves nothing.
BYTES = dict(zip(POLICIES, (12, 15, 27, 60, 70, 95, 130), strict=True))
SECONDS = dict(zip(POLICIES, (0.9, 0.75, 0.65, 0.6, 1.05, 0.2, 0.1), strict=True))


class FakeBench:
    """Peaks grow evenly, but what the last layer holds is in its own backward's workspace anyway."""

    layers = LAYERS

    def __init__(self) -> None:
        self.measured: list[Case] = []

    def peak(self, case: Case) -> Peak:
        self.measured.append(case)
        return Peak(self.bytes_of(case), 0, None, "")

    def bytes_of(self, case: Case) -> int:
        kept = range(LAYERS) if case == NONE else case.kept
        held = len(kept) - (LAYERS - 1 in kept)
        return TORCH_BYTES + held * (BYTES[case.policy] if case.policy else LAYER_BYTES)

    def replay_seconds(self, kinds: Sequence[str], updates: int) -> dict[str, list[float]]:
        return {kind: [1.0 if kind == "torch" else SECONDS[kind]] * LAYERS for kind in kinds}


def tuner_of(bench: FakeBench) -> Tuner:
    usable = cast(Bench, cast(Any, bench))
    return Tuner(usable, saved_per_layer(policy_replays(usable)))


def seconds_saved(case: Case) -> float:
    return len(case.kept) * (1 - SECONDS[case.policy]) if case.kept else 0.0


@pytest.mark.parametrize("limit", [900, 1000, 1010, 1030, 1100, 1240, 1333, 1500, 1700, 9000])
def test_the_best_policy_under_the_cap_is_the_best_of_all(limit: int) -> None:
    bench = FakeBench()
    found = tuner_of(bench).tuned(Case(SELECTIVE, "budget", limit))
    ways = [
        Case(SELECTIVE, kept=kept, policy=policy)
        for policy, keep in product(POLICIES, range(LAYERS + 1))
        for kept in kept_layers(SELECTIVE, keep, LAYERS)
    ]
    best = max((seconds_saved(way) for way in ways if bench.bytes_of(way) <= limit), default=0.0)
    assert seconds_saved(found) == pytest.approx(best)
    assert bench.bytes_of(found) <= max(limit, TORCH_BYTES)
    assert bool(found.policy) == bool(found.kept)
    assert found.budget == "budget" and found.budget_bytes == limit


@pytest.mark.parametrize("method, most", [("best_k_layers", 4), ("every_n_layers", 4)])
def test_the_most_layers_that_fit_are_kept(method: str, most: int) -> None:
    tuner = tuner_of(FakeBench())
    assert len(tuner.tuned(Case(method, "b", TORCH_BYTES + 3 * LAYER_BYTES)).kept) == most


def test_no_peak_is_measured_twice() -> None:
    bench = FakeBench()
    tuner = tuner_of(bench)
    for limit in (1000, 1100, 1300, 1600, 9000):
        for method in ("best_k_layers", SELECTIVE):
            tuner.peak(tuner.tuned(Case(method, str(limit), limit)))
    assert len(bench.measured) == len(set(bench.measured))
    assert {NONE, TORCH} <= set(bench.measured)


def test_policies_that_save_nothing_are_not_tried() -> None:
    bench = FakeBench()
    tuner_of(bench).tuned(Case(SELECTIVE, "b", 1240))
    tried = {case.policy for case in bench.measured if case.policy}
    assert "every_second_product" not in tried
    assert len(tried) > 1
