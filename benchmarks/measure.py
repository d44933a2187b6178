"""The two processes behind `benchmarks.update_step`: one takes peaks, the other takes times.

    python -m benchmarks.measure peaks SPEC OUT     started with the malloc variables of design fact 20
    python -m benchmarks.measure times SPEC OUT     started without them; reads what `peaks` found

Those variables make physical peaks on CPU mean something and slow memory-heavy methods down.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.bench import Bench, relative_error
from benchmarks.methods import HILORE_FORCED, HILORE_PLANNED, PLAIN_METHODS, TUNED_METHODS, kept_layers
from benchmarks.records import Case, Peak
from ds_hilore.memory.glibc import tight_malloc

NONE, TORCH = Case("none"), Case("torch")
#: "unlimited" is this multiple of the peak without checkpointing.
UNLIMITED = 10


@dataclass(frozen=True)
class Spec:
    """What to measure, as handed to both processes."""

    preset: str
    full_finetuning: bool
    loss: str
    model: str | None
    layers: int | None
    threads: int
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    turns: int

    def bench(self) -> Bench:
        torch.set_num_threads(self.threads)
        path = None if self.model is None else Path(self.model)
        return Bench(self.preset, self.full_finetuning, self.loss, path, self.layers)


@dataclass(frozen=True)
class PeakReport:
    """Peaks by case, `none` and `torch` among them."""

    cases: tuple[Case, ...]
    peaks: dict[str, Peak]

    @property
    def torch_bytes(self) -> int:
        return self.peaks[TORCH.key].peak_bytes

    @property
    def none_bytes(self) -> int:
        return self.peaks[NONE.key].peak_bytes


@dataclass(frozen=True)
class TimeReport:
    """Seconds of each turn by case; gradient errors; plans as letters per layer; seconds of each layer's replay."""

    seconds: dict[str, list[float]]
    gradient_errors: dict[str, float]
    plans: dict[str, str]
    torch_replay_seconds: list[float]
    hilore_replay_seconds: list[float]


def budget_bytes(written: str, torch_bytes: int, none_bytes: int) -> int:
    """A budget of the benchmark in bytes: "1.10x" of torch checkpointing's peak, "phi=0.25", or "unlimited"."""
    if written == "unlimited":
        return UNLIMITED * none_bytes
    if written.startswith("phi="):
        return torch_bytes + int(float(written[4:]) * (none_bytes - torch_bytes))
    if written.endswith("x"):
        return int(float(written[:-1]) * torch_bytes)
    raise ValueError(f'budget "{written}": write "1.10x", "phi=0.25" or "unlimited"')


def take_peaks(spec: Spec, console: Console) -> PeakReport:
    bench = spec.bench()
    bench.learn()
    peaks = {case.key: bench.peak(case) for case in (NONE, TORCH)}
    report = PeakReport((NONE, TORCH), peaks)
    cases = [Case(method) for method in (*PLAIN_METHODS, *HILORE_FORCED) if method in spec.methods]
    planned = [method for method in spec.methods if method in (*TUNED_METHODS, *HILORE_PLANNED)]
    for written in spec.budgets if planned else ():
        limit = budget_bytes(written, report.torch_bytes, report.none_bytes)
        for method in planned:
            case = Case(method, written, limit)
            if method in TUNED_METHODS:
                case = _tuned(bench, case, peaks)
            cases.append(case)
    for case in track([c for c in cases if c.key not in peaks], "peaks", console=console):
        bench.solve(case)
        peaks[case.key] = bench.peak(case)
    return PeakReport((NONE, TORCH, *(case for case in cases if case not in (NONE, TORCH))), peaks)


def _tuned(bench: Bench, case: Case, peaks: dict[str, Peak]) -> Case:
    """Keeps as many layers as the measured peak allows; first k and last k are both tried.

    The search starts where a peak that grows evenly with the layers kept would meet the budget.
    """
    limit = case.budget_bytes or 0
    ways: dict[int, Case] = {}

    def fits(keep: int) -> bool:
        for kept in kept_layers(case.method, keep, bench.layers):
            way = dataclasses.replace(case, kept=kept)
            key = "torch" if not kept else "none" if len(kept) == bench.layers else f"{case.method} {kept}"
            if key not in peaks:
                peaks[key] = bench.peak(way)
            if peaks[key].peak_bytes <= limit:
                ways[keep] = way
                peaks[way.key] = peaks[key]
                return True
        return False

    candidates = [keep for keep in range(bench.layers + 1) if kept_layers(case.method, keep, bench.layers)]
    low, high = peaks[TORCH.key].peak_bytes, peaks[NONE.key].peak_bytes
    guess = bench.layers * (limit - low) / max(1, high - low)
    place = max(0, sum(keep <= guess for keep in candidates) - 1)
    while place > 0 and not fits(candidates[place]):
        place -= 1
    while place + 1 < len(candidates) and fits(candidates[place + 1]):
        place += 1
    if candidates[place] not in ways:  # nothing fits: the least is to checkpoint every layer
        peaks[case.key] = peaks[TORCH.key]
    return ways.get(candidates[place], case)


def take_times(spec: Spec, found: PeakReport, console: Console) -> TimeReport:
    bench = spec.bench()
    bench.learn()
    cases = _with_own_floor(bench, found)
    exact = bench.gradients(NONE)
    errors, plans = {}, {}
    same = {case.key: _same_as(case, bench.layers) for case in cases}
    cases = [case for case in cases if same[case.key] == case.key]
    for case in cases:
        bench.solve(case)
        errors[case.key] = relative_error(bench.gradients(case), exact)
        plans[case.key] = bench.actions(case)
    del exact
    seconds: dict[str, list[float]] = {case.key: [] for case in cases}
    for turn in track(range(spec.turns), "updates", console=console):
        first = turn % len(cases)
        for case in cases[first:] + cases[:first]:
            seconds[case.key].append(bench.update(case))
    theirs, ours = bench.replay_seconds(max(3, spec.turns // 4))
    for key, other in same.items():
        seconds[key], errors[key], plans[key] = seconds[other], errors[other], plans[other]
    return TimeReport(seconds, errors, plans, theirs, ours)


def _same_as(case: Case, layers: int) -> str:
    """Key of the case that does exactly the same: a tuned method that keeps no layer, or all, is timed once."""
    if case.method not in TUNED_METHODS or 0 < len(case.kept) < layers:
        return case.key
    return NONE.key if case.kept else TORCH.key


def _with_own_floor(bench: Bench, found: PeakReport) -> list[Case]:
    """The cases with budgets moved by what this process holds more (or less) than the one that took the peaks."""
    on_cpu = torch.device(bench.engine.device).type == "cpu"
    with tight_malloc() if on_cpu else contextlib.nullcontext():
        bench.update(TORCH)
        shift = bench.peak(TORCH).peak_bytes - found.torch_bytes
    return [
        case if case.budget_bytes is None else dataclasses.replace(case, budget_bytes=case.budget_bytes + shift)
        for case in found.cases
    ]


def read_peaks(path: Path) -> PeakReport:
    data = json.loads(path.read_text())
    cases = tuple(Case(**{**case, "kept": tuple(case["kept"])}) for case in data["cases"])
    return PeakReport(cases, {key: Peak(**peak) for key, peak in data["peaks"].items()})


def read_times(path: Path) -> TimeReport:
    return TimeReport(**json.loads(path.read_text()))


def read_spec(path: Path) -> Spec:
    data: dict[str, Any] = json.loads(path.read_text())
    return Spec(**{**data, "methods": tuple(data["methods"]), "budgets": tuple(data["budgets"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["peaks", "times"])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peaks", type=Path, help="for times: the report of peaks")
    arguments = parser.parse_args()
    spec, console = read_spec(arguments.spec), Console(stderr=True)
    report: PeakReport | TimeReport
    if arguments.what == "peaks":
        report = take_peaks(spec, console)
    else:
        report = take_times(spec, read_peaks(arguments.peaks), console)
    arguments.out.write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
