"""What rows without an advantage, and short ones, cost an update: method against method, on the same microbatch.

    python -m benchmarks.dead_rows                      # half of the rows have advantage 0
    python -m benchmarks.dead_rows --lengths uniform    # all rows live, 10 to 100 % of the longest
    python -m benchmarks.dead_rows --layers 30 --rows 16 --turns 6

beta is 0, so a row without an advantage cannot change the model. "+prune" leaves out what is dead: other methods by
cutting dead rows out of the microbatch before the forward (its losses are then not all known), hilore by announcing the
microbatch. `hilore_exact` plans at --budget of its own all-R peak. Methods take turns; ratios to torch's non-reentrant
checkpointing of the whole microbatch are taken within a turn. Errors are ||g - g_none|| / ||g_none||.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import ds_hilore
from benchmarks.bench import SOLVED_S, Bench, relative_error
from benchmarks.methods import NONE, TORCH
from benchmarks.records import Case
from benchmarks.subject import PRESETS, Batch
from ds_hilore.cli.statistics import Ratio
from ds_hilore.core.budget import BudgetKind, MemoryBudget

SHORTEST = 0.1


@dataclass(frozen=True)
class Way:
    """A method on a microbatch. `announced`: hilore is told which rows are live."""

    name: str
    case: Case
    batch: Batch
    announced: bool = False


def with_dead_rows(batch: Batch, dead: float) -> Batch:
    """Every so many rows get advantage 0."""
    rows = len(batch.advantages)
    chosen = torch.arange(rows, device=batch.ids.device) * dead % 1 < dead
    return dataclasses.replace(batch, advantages=torch.where(chosen, 0.0, batch.advantages))


def with_lengths(batch: Batch, shortest: float) -> Batch:
    """Rows end evenly between `shortest` and all of their tokens; what lies behind is padding on the right."""
    rows, columns = batch.mask.shape
    share = torch.linspace(shortest, 1.0, rows, device=batch.ids.device)
    ends = (share * columns).ceil().long()
    mask = torch.arange(columns, device=batch.ids.device) < ends[:, None]
    # short rows are responses from their beginning, or the prompt would be all there is of them
    return dataclasses.replace(batch, mask=mask & (batch.mask | (ends <= columns - columns // 2)[:, None]))


def on_policy(bench: Bench, batch: Batch) -> Batch:
    """Old log-probabilities are those of the model: ratios are 1, no token is clipped."""
    with torch.no_grad():
        return dataclasses.replace(batch, old_logps=bench.engine(batch.ids, batch.mask).detach())


def live_rows(batch: Batch) -> Batch:
    """The microbatch without the rows that have no gradient."""
    live = (batch.advantages != 0) & batch.mask.any(1)
    return Batch(batch.ids[live], batch.mask[live], batch.old_logps[live], batch.advantages[live])


class DeadRows:
    """Runs updates of one engine under each way."""

    def __init__(self, bench: Bench, batch: Batch, budget: float) -> None:
        self.bench = bench
        self._count = batch.mask.sum()
        hilore = bench.engine.hilore
        planned = Case("hilore_exact", f"{budget:.2f}x", int(budget * hilore.learning.baseline.result().peak_bytes))
        replayed = Case("hilore_all_R")
        cut = live_rows(batch)
        self.ways = [
            Way("none", NONE, batch),
            Way("torch", TORCH, batch),
            Way("none+prune", NONE, cut),
            Way("torch+prune", TORCH, cut),
            Way("hilore_all_R", replayed, batch),
            Way("hilore_all_R+prune", replayed, batch, announced=True),
            Way("hilore_exact", planned, batch),
            Way("hilore_exact+prune", planned, batch, announced=True),
        ]

    def update(self, way: Way) -> float:
        """Seconds of one update."""
        self._prepare(way)
        return self.bench.update(way.case)

    def gradients(self, way: Way) -> list[Tensor]:
        self._prepare(way)
        return self.bench.gradients(way.case)

    def _prepare(self, way: Way) -> None:
        self.bench.batch, self.bench.count = way.batch, self._count
        if way.announced:
            batch = way.batch
            ds_hilore.begin_microbatch(batch.advantages, batch.mask, self._count, engine=self.bench.engine)

    def warm(self) -> None:
        """Plans are solved, and what pruning has to be shown (rule P2) is shown."""
        for way in self.ways:
            self.update(way)
            self.bench.engine.hilore.parts.planner.wait(timeout_s=SOLVED_S)
            self.update(way)


def report(found: DeadRows, turns: int, console: Console) -> Table:
    """Takes all times and errors."""
    found.warm()
    exact = found.gradients(found.ways[0])
    errors, layers = {}, {}
    for way in found.ways:
        errors[way.name] = relative_error(found.gradients(way), exact)
        layers[way.name] = found.bench.actions(way.case)
    seconds: dict[str, list[float]] = {way.name: [] for way in found.ways}
    for turn in track(range(turns), "updates", console=console):
        first = turn % len(found.ways)
        for way in found.ways[first:] + found.ways[:first]:
            seconds[way.name].append(found.update(way))
    table = Table()
    for column in ("method", "time / checkpointing [95 %]", "time / none [95 %]", "layers", "gradient"):
        table.add_column(column, no_wrap=True)
    for name, taken in seconds.items():
        ratios = [str(Ratio.of(taken, seconds[base])) for base in (TORCH.method, NONE.method)]
        error = "bitwise" if errors[name] == 0 else f"{errors[name]:.1e}"
        counts = " ".join(f"{layers[name].count(letter)}{letter}" for letter in sorted(set(layers[name])))
        table.add_row(name, *ratios, counts, error)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dead", type=float, default=0.5, help="share of the rows with advantage 0")
    parser.add_argument("--lengths", choices=["equal", "uniform"], default="equal", help="uniform: no row is dead")
    parser.add_argument("--budget", type=float, default=1.1, help="of hilore's own all-R peak")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=PRESETS["quick"].turns)
    arguments = parser.parse_args()
    bench = Bench("quick", False, "chunked", None, arguments.layers, arguments.rows)
    # with something to store, a trial times whole variants
    bench.engine.hilore.parts.planner.budget = MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, arguments.budget)
    uniform = arguments.lengths == "uniform"
    bench.learn()
    batch = with_lengths(bench.batch, SHORTEST) if uniform else with_dead_rows(bench.batch, arguments.dead)
    table = report(DeadRows(bench, on_policy(bench, batch), arguments.budget), arguments.turns, Console(stderr=True))
    rows, tokens = batch.ids.shape
    what = "lengths uniform in 10 to 100 %" if uniform else f"{arguments.dead:.0%} of the rows dead"
    table.title = f"{bench.layers} layers, {rows} rows of {tokens} tokens, {what}, {arguments.turns} turns"
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
