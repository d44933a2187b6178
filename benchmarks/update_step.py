"""One update step, method against method, on the same microbatch in one process.

    python -m benchmarks.update_step --preset quick
    python -m benchmarks.update_step --preset quick --full-finetuning --json result.json

Methods take turns; ratios are taken within a turn and given as medians with bootstrap intervals. Peaks are physical
(design fact 20) and come from turns of their own. "checkpointing" is torch's non-reentrant one with the same loss code;
"hilore all-R" replays every unit, "hilore all-H" stores every unit, "hilore BUDGET" follows its plan.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ds_hilore
from benchmarks.statistics import Ratio
from benchmarks.subject import PRESETS, Batch, Preset, engine_for, policy
from ds_hilore.core.types import Action
from ds_hilore.memory.glibc import tight_malloc, trim
from ds_hilore.memory.meter import peak_meter
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.runtime.controller import Stage
from examples.arithmetic.model import convert_packaged_model, default_cache_dir, packaged_model

BASE = "checkpointing"
LOSS = GRPOLossConfig()


@dataclass(frozen=True)
class Record:
    """What one method cost. `bitwise`: gradients are the same bits as without checkpointing."""

    method: str
    time_ratio: float
    time_low: float
    time_high: float
    peak_bytes: int
    floor_bytes: int
    bitwise: bool


class Bench:
    """One engine, one microbatch, several ways to recover saved state."""

    def __init__(self, engine: Any, batch: Batch, budget: str) -> None:
        self.engine = engine
        self.batch = batch
        self.methods: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            "no checkpointing": engine.hilore.paused,
            BASE: lambda: engine.hilore.host_checkpointing(partial(checkpoint, use_reentrant=False)),
            "hilore all-R": lambda: self._forced(Action.RECOMPUTE),
            "hilore all-H": lambda: self._forced(Action.STORE),
            f"hilore {budget}": contextlib.nullcontext,
        }

    def learn(self) -> None:
        """The first updates of a run: two that replay and measure, one that stores, then a solved plan."""
        hilore = self.engine.hilore
        while hilore.stage is not Stage.PLANNED:
            self.update(list(self.methods)[-1])
        self.update(list(self.methods)[-1])
        hilore.parts.planner.wait(timeout_s=60)

    @contextlib.contextmanager
    def _forced(self, action: Action) -> Iterator[None]:
        self.engine.hilore.force(action)
        try:
            yield
        finally:
            self.engine.hilore.force(None)

    def update(self, method: str, before_step: Callable[[], None] | None = None) -> float:
        """Seconds of forward, loss, backward and optimizer step."""
        batch, engine = self.batch, self.engine
        with self.methods[method]():
            started = _now()
            logps = engine(batch.ids, batch.mask)
            tokens = batch.mask.sum()
            loss = ds_hilore.grpo_loss(logps, batch.old_logps, batch.advantages, batch.mask, tokens, config=LOSS)
            engine.backward(loss)
            if before_step is not None:
                before_step()
            engine.step()
            return _now() - started

    def gradients(self, method: str) -> list[Tensor]:
        found: list[Tensor] = []
        parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
        self.update(method, lambda: found.extend(p.grad.clone() for p in parameters))
        return found

    def peak(self, method: str) -> tuple[int, int]:
        """(peak, level before) in bytes."""
        meter = peak_meter(self.engine.device)
        self.update(method)
        trim()
        meter.reset()
        floor = meter.level_bytes()
        self.update(method)
        return meter.peak_bytes(), floor


def measure(bench: Bench, turns: int, console: Console) -> list[Record]:
    """The run learns its plan; then gradients, times and peaks, in turns of their own."""
    bench.learn()
    exact = bench.gradients("no checkpointing")
    bitwise = {name: _same(bench.gradients(name), exact) for name in bench.methods}
    del exact
    times: dict[str, list[float]] = {name: [] for name in bench.methods}
    names = list(bench.methods)
    for turn in track(range(turns), "updates", console=console):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(bench.update(name))
    on_cpu = torch.device(bench.engine.device).type == "cpu"
    with tight_malloc() if on_cpu else contextlib.nullcontext():
        peaks = {name: bench.peak(name) for name in names}
    records = []
    for name in names:
        ratio = Ratio.of(times[name], times[BASE])
        records.append(Record(name, ratio.median, ratio.low, ratio.high, *peaks[name], bitwise[name]))
    return records


def table(records: list[Record], title: str) -> Table:
    base = next(record for record in records if record.method == BASE)
    shown = Table(title=title)
    for column in ("method", "time / checkpointing [95 %]", "peak", "peak - floor, x checkpointing", "gradients"):
        shown.add_column(column)
    for r in records:
        above = (r.peak_bytes - r.floor_bytes) / (base.peak_bytes - base.floor_bytes)
        ratio = str(Ratio(r.time_ratio, r.time_low, r.time_high))
        shown.add_row(
            r.method, ratio, f"{r.peak_bytes / 1e6:.0f} MB", f"{above:.2f}", "bitwise" if r.bitwise else "DIFFER"
        )
    return shown


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--full-finetuning", action="store_true", help="train all parameters instead of LoRA")
    parser.add_argument("--turns", type=int, default=40, help="updates per method")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a local transformers model; default: SmolLM2-135M from its package")
    parser.add_argument("--budget", default="1.0x", help="memory_budget of the planned method")
    parser.add_argument("--json", type=Path, help="write the records there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    torch.set_num_threads(arguments.threads)
    preset: Preset = PRESETS[arguments.preset]
    path = arguments.model
    if path is None:
        path = packaged_model(default_cache_dir())
        convert_packaged_model(path)
    model, vocabulary = policy(path, preset, arguments.full_finetuning)
    bench = Bench(engine_for(model, arguments.budget), Batch.random(preset, vocabulary, seed=0), arguments.budget)
    records = measure(bench, arguments.turns, console)
    kind = "full fine-tuning" if arguments.full_finetuning else "LoRA r=16 on all projections"
    console.print(table(records, f"{arguments.preset}: {preset.tokens} tokens, {kind}, {arguments.turns} turns"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(record) for record in records], indent=1) + "\n")


if __name__ == "__main__":
    main()
