"""How much each tuned method keeps under a cap, found by measured peaks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.bench import Bench
from benchmarks.methods import NONE, SELECTIVE, TORCH, base_of, kept_layers, like, plainest
from benchmarks.records import Case, Peak
from benchmarks.selective import POLICIES

#: Replays of each kind, at least, that tell what a policy saves.
REPLAYS = 24


def policy_replays(bench: Bench) -> dict[str, list[float]]:
    """Seconds of each layer's replay, by torch's checkpoint and by each selective policy.

    To be taken in a process without the malloc variables of physical peaks: they slow allocations, not products.
    """
    return bench.replay_seconds((TORCH.method, *POLICIES), updates=math.ceil(REPLAYS / bench.layers))


def saved_per_layer(replays: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Replay seconds that each policy saves in one layer, for those that save any."""
    saved = {
        policy: median(replays[TORCH.method]) - median(replays[policy]) for policy in POLICIES if policy in replays
    }
    return {policy: seconds for policy, seconds in saved.items() if seconds > 0}


class Tuner:
    """Tunes cases of one bench. No peak is measured twice.

    Args:
        saved_seconds: what selective policies save per layer; only these are tried.
    """

    def __init__(self, bench: Bench, saved_seconds: Mapping[str, float]) -> None:
        self._bench = bench
        self._saved_seconds = saved_seconds
        self._peaks: dict[Case, Peak] = {}

    def peak(self, case: Case) -> Peak:
        """The measured peak of what a case does, whatever its budget."""
        same = plainest(case, self._bench.layers)
        if same not in self._peaks:
            self._peaks[same] = self._bench.peak(same)
        return self._peaks[same]

    def refer(self, case: Case, peak: Peak) -> None:
        """Takes a peak that was measured elsewhere for that of `case`."""
        self._peaks[plainest(case, self._bench.layers)] = peak

    def tuned(self, case: Case) -> Case:
        """The case with as many layers kept as its budget allows, none where not even one fits."""
        if base_of(case.method) == SELECTIVE:
            return self._best_policy(case)
        return self._most_layers(case, self._guess(case, self.peak(like(NONE.method, case.method)).peak_bytes))

    def _best_policy(self, case: Case) -> Case:
        """Of the policies whose measured peak fits, the one that saves most seconds of replays.

        A policy is not tuned where it cannot beat the best found: on a layer more than a straight line between its
        peaks gives, or on as many as a policy that holds less could have.
        """
        best, most_saved = case, 0.0
        fitting: dict[int, int] = {}  # layers found to fit, by the peak with the policy on every layer
        for policy in self._in_order(case):
            saved_seconds, all_bytes = self._saved_seconds[policy], self._all(case, policy)
            guess = self._guess(case, all_bytes)
            less = [layers for peak_bytes, layers in fitting.items() if peak_bytes <= all_bytes]
            most_layers = min([guess + 1, self._bench.layers, *less])
            if most_layers * saved_seconds <= most_saved:
                continue
            found = self._most_layers(dataclasses.replace(case, policy=policy), guess)
            fitting[all_bytes] = len(found.kept)
            if len(found.kept) * saved_seconds > most_saved:
                best, most_saved = found, len(found.kept) * saved_seconds
        return best

    def _in_order(self, case: Case) -> list[str]:
        """First what is likely to save most; then, smallest first, policies that hardly fit on a layer."""

        def key(policy: str) -> tuple[bool, float]:
            all_bytes = self._all(case, policy)
            guess = self._guess(case, all_bytes)
            return guess == 0, -guess * self._saved_seconds[policy] if guess else all_bytes

        return sorted(self._saved_seconds, key=key)

    def _all(self, case: Case, policy: str) -> int:
        """The peak with a selective policy on every layer."""
        everywhere = Case(case.method, kept=tuple(range(self._bench.layers)), policy=policy)
        return self.peak(everywhere).peak_bytes

    def _guess(self, case: Case, all_bytes: int) -> int:
        """Layers kept where a peak that grows evenly from none kept to all kept would meet the budget."""
        none_bytes, layers = self.peak(like(TORCH.method, case.method)).peak_bytes, self._bench.layers
        share = ((case.budget_bytes or 0) - none_bytes) / max(1, all_bytes - none_bytes)
        return min(layers, max(0, int(layers * share)))

    def _most_layers(self, case: Case, guess: int) -> Case:
        """The case with most layers kept whose measured peak fits; the search goes up or down from `guess`."""
        layers = self._bench.layers
        candidates = [keep for keep in range(layers + 1) if kept_layers(case.method, keep, layers)]
        place = max(0, sum(keep <= guess for keep in candidates) - 1)
        found = self._fitting(case, candidates[place])
        while found is None and place > 0:
            place -= 1
            found = self._fitting(case, candidates[place])
        while place + 1 < len(candidates):
            place += 1
            more = self._fitting(case, candidates[place])
            if more is None:
                break
            found = more
        return found or dataclasses.replace(case, kept=())  # nothing fits: the least is to checkpoint every layer

    def _fitting(self, case: Case, keep: int) -> Case | None:
        """The first way of keeping `keep` layers that fits."""
        ways: Sequence[tuple[int, ...]] = kept_layers(case.method, keep, self._bench.layers)
        for kept in ways:
            way = dataclasses.replace(case, kept=kept)
            if self.peak(way).peak_bytes <= (case.budget_bytes or 0):
                return way
        return None
