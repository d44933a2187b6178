"""How much each tuned method keeps under a cap, found by measured peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.bench import Bench
from benchmarks.methods import NONE, SELECTIVE, TORCH, kept_layers, plainest
from benchmarks.records import Case, Peak
from benchmarks.selective import POLICIES


@dataclass(frozen=True)
class PolicyCost:
    """One selective policy: the peak with it on every layer, and the replay seconds that it saves per layer."""

    peak_bytes: int
    saved_seconds: float


class Tuner:
    """Tunes cases of one bench. No peak is measured twice."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._peaks: dict[Case, Peak] = {}
        self._costs: dict[str, PolicyCost] = {}

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

        Seconds are those of timed replays in this process. Policies are taken in the order of what they could save, and
        one that could not beat the best found, with a layer more than its peaks let expect, is not tuned.
        """
        best, most_saved = case, 0.0
        guesses = {policy: self._guess(case, cost.peak_bytes) for policy, cost in self._policy_costs().items()}
        possible = {
            policy: min(guess + 1, self._bench.layers) * self._policy_costs()[policy].saved_seconds
            for policy, guess in guesses.items()
        }
        for policy in sorted(possible, key=possible.__getitem__, reverse=True):
            if possible[policy] <= most_saved:
                break
            found = self._most_layers(dataclasses.replace(case, policy=policy), guesses[policy])
            saved = len(found.kept) * self._policy_costs()[policy].saved_seconds
            if saved > most_saved:
                best, most_saved = found, saved
        return best

    def _policy_costs(self) -> dict[str, PolicyCost]:
        if not self._costs:
            every = tuple(range(self._bench.layers))
            replays = self._bench.replay_seconds(("torch", *POLICIES), updates=1)
            for policy in POLICIES:
                saved = median(replays["torch"]) - median(replays[policy])  # over layers: one replay of each
                peak = self.peak(Case(SELECTIVE, kept=every, policy=policy))
                self._costs[policy] = PolicyCost(peak.peak_bytes, saved)
        return self._costs

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
