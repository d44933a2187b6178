"""Exact training against training with compressed state: the same seeds, prompts and rollout settings.

    python -m benchmarks.training_parity --preset short --out docs/results
    python -m benchmarks.training_parity --out docs/results                        # the longer one: about two hours
    python -m benchmarks.training_parity --preset short --plant sign               # must fail; so must --plant codec
    python -m benchmarks.training_parity --preset short --plant codec --exact-from docs/results/parity_short.json

SmolLM2-135M learns by GRPO to answer arithmetic, string and logic tasks, once with exact gradients and once within
--max-gradient-error, for several seeds. Both runs of a seed go at the same time, one core each. It fails (exit status
1) unless final scores on fixed prompts agree and gradients of fixed probe batches keep their direction
(benchmarks/parity.py says how nearly). A planted fault shows that it can fail: negated advantages, or codecs that are
20 times as far off as they say, from the end of calibration on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.parity import Limits, Pair, Verdict, judge
from benchmarks.parity_plot import draw
from benchmarks.parity_run import PLANTS, Report, Spec, report_of
from benchmarks.tasks import KINDS
from examples.arithmetic.model import convert_packaged_model, default_cache_dir, packaged_model

SEEDS = (0, 1, 2)
_SHORT = Spec(
    seed=0,
    error=0.0,
    updates=40,
    layers=None,
    tasks=tuple(KINDS),
    groups=2,
    group_size=4,
    max_new_tokens=6,
    validation=36,
    look_every=10,
    learning_rate=2e-4,
    budget="1.03x",
    calibration=4,
)
PRESETS: Mapping[str, Spec] = MappingProxyType(
    {
        "short": _SHORT,
        "long": replace(_SHORT, updates=60, groups=4, group_size=8, max_new_tokens=12, validation=96, calibration=8),
    }
)


@dataclass(frozen=True)
class Runs:
    """The two runs of a seed."""

    exact: Report
    hilore: Report

    def pair(self, seed: int) -> Pair:
        last = max(self.exact.scores)
        return Pair(
            seed,
            self.exact.scores[last],
            self.hilore.scores[last],
            tuple(self.hilore.cosines.values()),
            self.hilore.compressed,
        )


def run(spec: Spec) -> Report:
    """One run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "spec.json", Path(folder) / "report.json"
        asked.write_text(json.dumps(dataclasses.asdict(spec)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "benchmarks.parity_run", str(asked), str(out)]
        subprocess.run(command, check=True, env=environment)
        return report_of(json.loads(out.read_text()))


def run_all(spec: Spec, seeds: Sequence[int], error: float, jobs: int, known: Mapping[int, Report]) -> dict[int, Runs]:
    """Both runs of every seed, `jobs` at a time, but for exact ones that are known."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {}
        for seed in seeds:  # next to each other, so that both of a seed meet the same machine
            exact = None if seed in known else pool.submit(run, replace(spec, seed=seed, error=0.0, plant=""))
            waiting[seed] = exact, pool.submit(run, replace(spec, seed=seed, error=error))
        return {
            seed: Runs(known[seed] if exact is None else exact.result(), hilore.result())
            for seed, (exact, hilore) in waiting.items()
        }


def known_exact(path: Path | None, spec: Spec) -> dict[int, Report]:
    """Exact runs of an earlier result, by seed; it must have had the same settings."""
    if path is None:
        return {}
    before = json.loads(path.read_text())
    asked = json.loads(json.dumps(dataclasses.asdict(replace(spec, plant=""))))
    differs = [name for name, value in asked.items() if before["spec"].get(name) != value and name != "plant"]
    if differs:
        sys.exit(f"{path.name} is of other settings: {', '.join(differs)}; leave --exact-from out")
    return {int(seed): report_of(runs["exact"]) for seed, runs in before["runs"].items()}


def table(found: Mapping[int, Runs]) -> Table:
    shown = Table(title="final score on fixed prompts, in points; seconds of a whole run")
    columns = ("seed", "before", "exact", "hilore", "difference", "lowest cosine", "units compressed", "exact s")
    for column in (*columns, "hilore s", "of these checks"):
        shown.add_column(column, justify="right")
    for seed, runs in found.items():
        pair = runs.pair(seed)
        shown.add_row(
            str(seed),
            f"{runs.exact.scores[0]:.2f}",
            f"{pair.exact:.2f}",
            f"{pair.hilore:.2f}",
            f"{pair.difference:+.2f}",
            f"{min(pair.cosines):.6f}" if pair.cosines else "-",
            f"{pair.compressed:.0%}",
            f"{runs.exact.seconds:.0f}",
            f"{runs.hilore.seconds:.0f}",
            f"{runs.hilore.check_seconds:.0f}",
        )
    return shown


def write(folder: Path, name: str, spec: Spec, found: Mapping[int, Runs], verdict: Verdict, seconds: float) -> None:
    """NAME.json and NAME.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "spec": dataclasses.asdict(spec),
        "limits": dataclasses.asdict(Limits()),
        "verdict": {**dataclasses.asdict(verdict), "passed": verdict.passed},
        "seconds": seconds,
        "runs": {seed: dataclasses.asdict(runs) for seed, runs in found.items()},
    }
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(
        {seed: (runs.exact, runs.hilore) for seed, runs in found.items()},
        "planted fault: " + spec.plant if spec.plant else "exact against compressed state",
        folder / f"{name}.png",
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="long")
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--seeds", help=f"comma-separated; default {','.join(map(str, SEEDS))}")
    parser.add_argument("--tasks", help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--max-gradient-error", type=float, default=0.01)
    parser.add_argument("--budget", help='memory of an update, as "1.03x": little, so that compressing is of use')
    parser.add_argument("--plant", choices=PLANTS, default="", help="a fault that must make it fail")
    parser.add_argument("--exact-from", type=Path, help="an earlier result, to take its exact runs from")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes one core and about 2 GB")
    parser.add_argument("--out", type=Path, help="folder for JSON and plot")
    arguments = parser.parse_args()
    unknown = sorted(set((arguments.tasks or "").split(",")) - {"", *KINDS})
    if unknown:
        parser.error(f"no such task: {', '.join(unknown)}; known: {', '.join(KINDS)}")
    return arguments


def spec_of(arguments: argparse.Namespace) -> Spec:
    given = {
        "layers": arguments.layers,
        "updates": arguments.updates,
        "tasks": None if arguments.tasks is None else tuple(arguments.tasks.split(",")),
        "budget": arguments.budget,
    }
    known = {name: value for name, value in given.items() if value is not None}
    return replace(PRESETS[arguments.preset], plant=arguments.plant, **known)


def main() -> None:
    arguments = parse_arguments()
    spec = spec_of(arguments)
    seeds = SEEDS if arguments.seeds is None else tuple(int(seed) for seed in arguments.seeds.split(","))
    convert_packaged_model(packaged_model(default_cache_dir()))
    known = known_exact(arguments.exact_from, spec)
    started = time.perf_counter()
    found = run_all(spec, seeds, arguments.max_gradient_error, arguments.jobs, known)
    seconds = time.perf_counter() - started
    verdict = judge([runs.pair(seed) for seed, runs in found.items()])
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(found))
    console.print(*verdict.lines(), f"took {seconds / 60:.1f} minutes", sep="\n")
    if arguments.out is not None:
        name = "_".join(part for part in ("parity", arguments.preset, spec.plant) if part)
        write(arguments.out, name, spec, found, verdict, seconds)
    sys.exit(0 if verdict.passed else 1)


if __name__ == "__main__":
    main()
