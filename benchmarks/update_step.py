"""One update step, method against method, on the same microbatch.

    python -m benchmarks.update_step                                    # quick: 8 layers of SmolLM2, 512 tokens
    python -m benchmarks.update_step --preset full --json result.json   # the whole model, 2,048 tokens, many budgets
    python -m benchmarks.update_step --methods hilore_all_R --turns 40
    python -m benchmarks.update_step --preset gpu                       # Qwen2.5-3B's shape in bf16, on a GPU

Methods take turns; ratios are taken within a turn and given as medians with bootstrap intervals. Times and physical
peaks come from processes of their own (benchmarks/measure.py). "torch" is torch's non-reentrant checkpointing with the
same loss code: its peak is what "1.10x" and phi refer to, its time what checkpointing costs. `best_k_layers` and
`every_n_layers` keep as many layers as fit the measured peak. `torch_sac` is torch's selective checkpointing with the
fixed policy, on as many layers as fit, that saves most replay seconds (benchmarks/tuning.py). `hilore_exact` follows
the solved plan of the running engine; `hilore_update_aware` and `hilore_static_risk` may compress too, within
--max-gradient-error, and run only where they are asked for. So does `hilore_paper`, which plans and replays as the
paper does: in an engine and processes of its own, against the checkpointing that is measured in those. recovered: share
of what checkpointing costs that is saved, by the clock; counted: the same from the measured seconds of the replays that
a plan leaves (and of its codecs), free of noise elsewhere.

A method's name may have suffixes. "+logits": the loss makes whole logits. "+prune": dead rows (--dead-rows) are
skipped; by hilore in replay and backward, because it was told of them, by all others because they are left out of the
microbatch before the forward, so that their losses are not known. "+cut": they are left out, under hilore too. All
ratios and shares refer to "torch" and "none", on the whole microbatch and with the loss of --loss; methods of hilore
with "+logits" have an engine and processes of their own, which measure those two again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console

from benchmarks.measure import PeakReport, TimeReport, read_peaks, read_times
from benchmarks.methods import (
    LOSSY,
    METHODS,
    NONE,
    SELECTIVE,
    TORCH,
    Suffix,
    announces,
    base_of,
    check_method,
    is_hilore,
    runs_live_rows_only,
)
from benchmarks.records import Case, Record, table
from benchmarks.spec import Spec, engine_of
from benchmarks.subject import PRESETS, sized
from ds_hilore.cli.statistics import Ratio
from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT


def apart(spec: Spec) -> list[Spec]:
    """One for each engine that the methods need; methods that need none of their own are all the first's."""
    by_engine: dict[tuple[bool, bool], list[str]] = {}
    for method in spec.methods:
        by_engine.setdefault(engine_of(method), []).append(method)
    return [dataclasses.replace(spec, methods=tuple(by_engine[engine])) for engine in sorted(by_engine)] or [spec]


def measured(spec: Spec) -> list[Record]:
    """Records of all methods. Ratios and budgets of each refer to the checkpointing of its own processes; that of the
    first is shown."""
    found: list[Record] = []
    for part in apart(spec):
        known = {(record.method, record.budget) for record in found}
        found += [each for each in records(*measure(part)) if (each.method, each.budget) not in known]
    return found


def measure(spec: Spec) -> tuple[PeakReport, TimeReport]:
    """Runs the processes, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        spec_file, replays, peaks, times = (
            Path(folder) / f"{name}.json" for name in ("spec", "replays", "peaks", "times")
        )
        spec_file.write_text(json.dumps(dataclasses.asdict(spec)))
        ordinary = {name: value for name, value in os.environ.items() if name not in TIGHT_ENVIRONMENT}
        worker = [sys.executable, "-m", "benchmarks.measure"]
        known: list[str | Path] = []
        if any(base_of(method) == SELECTIVE for method in spec.methods):
            subprocess.run([*worker, "replays", spec_file, replays], check=True, env=ordinary)
            known = ["--replays", replays]
        subprocess.run([*worker, "peaks", spec_file, peaks, *known], check=True, env={**ordinary, **TIGHT_ENVIRONMENT})
        subprocess.run([*worker, "times", spec_file, times, "--peaks", peaks], check=True, env=ordinary)
        return read_peaks(peaks), read_times(times)


def records(peaks: PeakReport, times: TimeReport) -> list[Record]:
    """Puts both reports together, in the order in which cases were measured."""
    return [_record(case, peaks, times) for case in peaks.cases]


def _record(case: Case, peaks: PeakReport, times: TimeReport) -> Record:
    seconds, peak = times.seconds[case.key], peaks.peaks[case.key]
    ratio = Ratio.of(seconds, times.seconds[TORCH.key])
    to_none = Ratio.of(seconds, times.seconds[NONE.key])
    possible = 1 - Ratio.of(times.seconds[NONE.key], times.seconds[TORCH.key]).median
    headroom = peaks.none_bytes - peaks.torch_bytes
    phi = None if case.budget_bytes is None else (case.budget_bytes - peaks.torch_bytes) / headroom
    return Record(
        case.method,
        case.budget,
        case.budget_bytes,
        phi,
        ratio.median,
        ratio.low,
        ratio.high,
        to_none.median,
        to_none.low,
        to_none.high,
        (1 - ratio.median) / possible,
        counted_share(case, times),
        peak.peak_bytes,
        peak.floor_bytes,
        peak.predicted_peak_bytes,
        times.gradient_errors[case.key],
        dict(Counter(peak.plan)),
        len(seconds),
        case.policy,
    )


def counted_share(case: Case, times: TimeReport) -> float | None:
    """Share of torch's replay seconds that the case does not spend on replays. None where replays are not timed, or
    are those of live rows only.

    What forward spends on keeping is on the clock only: a selective policy's catching of outputs, too.
    """
    if base_of(case.method) == "deepspeed" or announces(case.method) or runs_live_rows_only(case.method):
        return None
    ours = is_hilore(case.method)
    kinds = {"R": "hilore", "A": "hilore_attention"} if ours else {"R": "torch", "S": case.policy}
    spent = sum(
        times.replay_seconds[kinds[letter]][layer]
        for layer, letter in enumerate(times.plans[case.key])
        if letter in kinds
    )
    spent += sum(times.codec_seconds.get(case.key, ()))
    return 1 - spent / sum(times.replay_seconds["torch"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--full-finetuning", action="store_true", help="train all parameters instead of LoRA")
    parser.add_argument("--loss", choices=["chunked", "logits"], default="chunked", help="log-probabilities of all")
    parser.add_argument(
        "--methods",
        help=f"comma-separated; none and torch always run; of {', '.join(METHODS)}; each may be followed by "
        f"+{', +'.join(suffix.value for suffix in Suffix)}",
    )
    parser.add_argument(
        "--budgets", help='comma-separated: "1.10x" of torch\'s peak, "1.10x+logits", "phi=0.25", "unlimited"'
    )
    parser.add_argument("--dead-rows", type=float, default=0.0, help="share of the rows with advantage 0")
    parser.add_argument("--turns", type=int, help="updates per method")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--model", type=Path, help="a local transformers model; default: SmolLM2-135M from its package")
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    parser.add_argument("--rows", type=int, help="sequences per microbatch")
    parser.add_argument("--max-gradient-error", type=float, default=0.01, help=f"for {', '.join(LOSSY)}")
    parser.add_argument("--json", type=Path, help="write the records there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    preset = sized(arguments.preset, arguments.layers, arguments.rows)
    by_default = tuple(method for method in METHODS if method not in LOSSY)
    methods = by_default if arguments.methods is None else tuple(arguments.methods.split(","))
    try:
        for method in methods:
            check_method(method)
    except ValueError as error:
        sys.exit(str(error))
    spec = Spec(
        preset=arguments.preset,
        full_finetuning=arguments.full_finetuning,
        loss=arguments.loss,
        model=None if arguments.model is None else str(arguments.model),
        layers=arguments.layers,
        rows=arguments.rows,
        dead_rows=arguments.dead_rows,
        max_gradient_error=arguments.max_gradient_error,
        threads=arguments.threads,
        methods=methods,
        budgets=preset.budgets if arguments.budgets is None else tuple(arguments.budgets.split(",")),
        turns=arguments.turns or preset.turns,
    )
    found = measured(spec)
    kind = "full fine-tuning" if spec.full_finetuning else "LoRA r=16 on all projections"
    title = f"{spec.preset}: {preset.tokens} tokens, {kind}, {spec.loss} loss, {spec.turns} turns"
    title += f", {spec.dead_rows:.0%} of the rows dead" if spec.dead_rows else ""
    Console(width=None if sys.stdout.isatty() else 160).print(table(found, title))
    if arguments.json is not None:
        report = {"spec": dataclasses.asdict(spec), "records": [dataclasses.asdict(record) for record in found]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
