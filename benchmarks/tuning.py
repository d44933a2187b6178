"""How much each tuned method keeps under a cap, found by measured peaks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.bench import Bench
from benchmarks.methods import NONE, SELECTIVE, TORCH, kept_layers, plainest
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

    def tuned(self, case: Case) -> Case:
        """The case with as many layers kept as its budget allows, none where not even one fits."""
        if case.method == SELECTIVE:
            return self._best_policy(case)
        return self._most_layers(case, self._guess(case, self.peak(NONE).peak_bytes))

    def _best_policy(self, case: Case) -> Case:
        """Of the policies whose measured peak fits, the one that saves most seconds of replays.

        Taken in the order of what they could save; those that cannot beat the best found are not tuned. What a policy
        could save: on the layers that its line gives, as far below its line as any peak was found yet; before any was,
        on one layer more.
        """
        best, most_saved = case, 0.0
        waiting = set(self._saved_seconds)
        slack: int | None = None
        while waiting:
            possible = {policy: self._possible(case, policy, slack) for policy in sorted(waiting)}
            policy = max(possible, key=possible.__getitem__)
            if possible[policy] <= most_saved:
                break
            waiting.remove(policy)
            found = self._most_layers(dataclasses.replace(case, policy=policy), self._guess(case, self._all(policy)))
            saved = len(found.kept) * self._saved_seconds[policy]
            if saved > most_saved:
                best, most_saved = found, saved
            slack = max(slack or 0, self._below_line(policy))
        return best

    def _possible(self, case: Case, policy: str, slack: int | None) -> float:
        """Seconds that a policy saves under the case's budget at best."""
        all_bytes = self._all(policy)
        if slack is None:
            layers = min(self._bench.layers, self._guess(case, all_bytes) + 1)
        else:
            layers = self._guess(dataclasses.replace(case, budget_bytes=(case.budget_bytes or 0) + slack), all_bytes)
        return layers * self._saved_seconds[policy]

    def _below_line(self, policy: str) -> int:
        """By how many bytes a measured peak of the policy falls short of the straight line between none and all."""
        none_bytes, added = self.peak(TORCH).peak_bytes, self._all(policy) - self.peak(TORCH).peak_bytes
        return max(
            none_bytes + added * len(case.kept) // self._bench.layers - peak.peak_bytes
            for case, peak in self._peaks.items()
            if case.policy == policy
        )

    def _all(self, policy: str) -> int:
        """The peak with a selective policy on every layer."""
        return self.peak(Case(SELECTIVE, kept=tuple(range(self._bench.layers)), policy=policy)).peak_bytes

    def _guess(self, case: Case, all_bytes: int) -> int:
        """Layers kept where a peak that grows evenly from none kept to all kept would meet the budget."""
        none_bytes, layers = self.peak(TORCH).peak_bytes, self._bench.layers
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
