"""The processes behind `benchmarks.update_step`: they take times of replays, peaks, and times.

    python -m benchmarks.measure replays SPEC OUT   what selective policies save; started without malloc variables
    python -m benchmarks.measure peaks SPEC OUT     started with those of design fact 20; reads what `replays` found
    python -m benchmarks.measure times SPEC OUT     started without them; reads what `peaks` found

Those variables make physical peaks on CPU mean something and slow memory-heavy methods down.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.bench import Bench, relative_error
from benchmarks.methods import (
    HILORE_FORCED,
    HILORE_REPLAYS,
    NONE,
    TORCH,
    TORCH_LOGITS,
    TUNED_METHODS,
    base_of,
    is_budgeted,
    plainest,
)
from benchmarks.records import Case, Peak
from benchmarks.spec import Spec, read_spec
from benchmarks.tuning import Tuner, policy_replays, saved_per_layer
from ds_hilore.cli.statistics import in_turns
from ds_hilore.memory.glibc import tight_malloc

#: Peaks of checkpointing of which the highest counts: budgets refer to it, and a CPU process's peaks wander.
REFERENCES = 3
#: "unlimited" is this multiple of the peak without checkpointing.
UNLIMITED = 10
#: Ends a budget that refers to checkpointing with whole logits.
OF_LOGITS = "+logits"


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
    """Seconds of each turn by case; gradient errors; plans as letters per layer; seconds of each layer's replay.

    `replay_seconds`: by kind of replay, as `Bench.replay_seconds` has them. `codec_seconds`: by case that
    compresses, of each layer.
    """

    seconds: dict[str, list[float]]
    gradient_errors: dict[str, float]
    plans: dict[str, str]
    replay_seconds: dict[str, list[float]]
    codec_seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def budget_bytes(written: str, torch_bytes: int, none_bytes: int, logits_bytes: int | None = None) -> int:
    """A budget of the benchmark in bytes: "1.10x" of torch checkpointing's peak, "1.10x+logits" of its peak with whole
    logits (`logits_bytes`), "phi=0.25", or "unlimited"."""
    if written == "unlimited":
        return UNLIMITED * none_bytes
    if written.startswith("phi="):
        return torch_bytes + int(float(written[4:]) * (none_bytes - torch_bytes))
    if written.endswith("x"):
        return int(float(written[:-1]) * torch_bytes)
    if written.endswith(f"x{OF_LOGITS}") and logits_bytes is not None:
        return int(float(written[: -len(OF_LOGITS) - 1]) * logits_bytes)
    raise ValueError(f'budget "{written}": write "1.10x", "1.10x{OF_LOGITS}", "phi=0.25" or "unlimited"')


def ready(spec: Spec) -> Bench:
    """The run, once it has learnt."""
    torch.set_num_threads(spec.threads)
    bench = Bench(spec)
    bench.learn()
    return bench


def take_replays(spec: Spec) -> dict[str, list[float]]:
    bench = ready(spec)
    return policy_replays(bench)


def take_peaks(spec: Spec, replays: Mapping[str, Sequence[float]], console: Console) -> PeakReport:
    """`replays`: as `take_replays` found them; may be empty where no selective policy is to be tuned."""
    bench = ready(spec)
    plain = [Case(method) for method in spec.methods if not is_budgeted(method)]
    reference = [TORCH_LOGITS] if any(written.endswith(OF_LOGITS) for written in spec.budgets) else []
    plain = list(dict.fromkeys([NONE, TORCH, *reference, *plain]))
    for case in (*plain, *map(Case, HILORE_FORCED), TORCH):  # small allocations find their places
        bench.update(case)
    tuner = Tuner(bench, saved_per_layer(replays))
    for case in (TORCH, *reference):
        tuner.refer(case, max((bench.peak(case) for _ in range(REFERENCES)), key=lambda peak: peak.peak_bytes))
    none_bytes, torch_bytes, *logits_bytes = (tuner.peak(case).peak_bytes for case in (NONE, TORCH, *reference))
    limits = {written: budget_bytes(written, torch_bytes, none_bytes, *logits_bytes) for written in spec.budgets}
    limited = [method for method in spec.methods if is_budgeted(method)]
    cases = plain + [Case(method, written, limit) for written, limit in limits.items() for method in limited]
    found, peaks = [], {}
    for wanted in track(cases, "peaks", console=console):
        case = tuner.tuned(wanted) if base_of(wanted.method) in TUNED_METHODS else wanted
        bench.solve(case)
        found.append(case)
        peaks[case.key] = tuner.peak(case)
    return PeakReport(tuple(found), peaks)


def take_times(spec: Spec, found: PeakReport, console: Console) -> TimeReport:
    bench = ready(spec)
    cases = _with_own_floor(bench, found)
    exact = bench.gradients(NONE)
    errors, plans, codecs = {}, {}, {}
    same = _timed_as(cases, bench.layers)
    cases = [case for case in cases if same[case.key] == case.key]
    policies = sorted({case.policy for case in cases} - {""})
    for case in cases:
        bench.solve(case)
        errors[case.key] = relative_error(bench.gradients(case), exact)
        plans[case.key] = bench.actions(case)
        if "L" in plans[case.key]:
            codecs[case.key] = bench.codec_seconds()
    del exact
    seconds = {case.key: taken for case, taken in in_turns(cases, spec.turns, bench.update, console).items()}
    replays = bench.replay_seconds(("torch", *HILORE_REPLAYS, *policies), max(3, spec.turns // 4))
    for key, other in same.items():
        seconds[key], errors[key], plans[key] = seconds[other], errors[other], plans[other]
    return TimeReport(seconds, errors, plans, replays, codecs)


def _timed_as(cases: Sequence[Case], layers: int) -> dict[str, str]:
    """By key of each case, the key of the one whose times hold for it: what does the same is timed once."""
    first: dict[Case, str] = {}
    return {case.key: first.setdefault(plainest(case, layers), case.key) for case in cases}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["replays", "peaks", "times"])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--replays", type=Path, help="for peaks: the report of replays")
    parser.add_argument("--peaks", type=Path, help="for times: the report of peaks")
    arguments = parser.parse_args()
    spec, console = read_spec(arguments.spec), Console(stderr=True)
    report: dict[str, Any]
    if arguments.what == "replays":
        report = take_replays(spec)
    elif arguments.what == "peaks":
        replays = {} if arguments.replays is None else json.loads(arguments.replays.read_text())
        report = dataclasses.asdict(take_peaks(spec, replays, console))
    else:
        report = dataclasses.asdict(take_times(spec, read_peaks(arguments.peaks), console))
    arguments.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
