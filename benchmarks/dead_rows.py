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

from rich.console import Console
from rich.table import Table

from benchmarks.batches import with_dead_rows, with_lengths
from benchmarks.bench import SOLVED_S, Bench, relative_error
from benchmarks.methods import NONE, TORCH
from benchmarks.records import Case
from benchmarks.spec import Spec
from benchmarks.subject import PRESETS
from ds_hilore.cli.statistics import Ratio, in_turns
from ds_hilore.core.budget import BudgetKind, MemoryBudget


def cases(bench: Bench, budget: float) -> list[Case]:
    """Checkpointing, none, every layer replayed, and a plan at `budget` of the run's own all-R peak; each with and
    without what is dead."""
    planned = int(budget * bench.engine.hilore.learning.baseline.result().peak_bytes)
    plain = [NONE, TORCH, Case("hilore_all_R"), Case("hilore_exact", f"{budget:.2f}x", planned)]
    return [each for case in plain for each in (case, Case(f"{case.method}+prune", case.budget, case.budget_bytes))]


def report(bench: Bench, found: list[Case], turns: int, console: Console) -> Table:
    """Takes all times and errors."""
    for case in found:  # plans are solved, and what pruning has to be shown (rule P2) is shown
        bench.update(case)
        bench.engine.hilore.parts.planner.wait(timeout_s=SOLVED_S)
        bench.update(case)
    exact = bench.gradients(NONE)
    errors, layers = {}, {}
    for case in found:
        errors[case.key] = relative_error(bench.gradients(case), exact)
        layers[case.key] = bench.actions(case)
    seconds = {case.key: taken for case, taken in in_turns(found, turns, bench.update, console).items()}
    table = Table()
    for column in ("method", "time / checkpointing [95 %]", "time / none [95 %]", "layers", "gradient"):
        table.add_column(column, no_wrap=True)
    for key, taken in seconds.items():
        ratios = [str(Ratio.of(taken, seconds[base.key])) for base in (TORCH, NONE)]
        error = "bitwise" if errors[key] == 0 else f"{errors[key]:.1e}"
        counts = " ".join(f"{layers[key].count(letter)}{letter}" for letter in sorted(set(layers[key])))
        table.add_row(key, *ratios, counts, error)
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
    bench = Bench(Spec("quick", layers=arguments.layers, rows=arguments.rows))
    # with something to store, a trial times whole variants
    bench.engine.hilore.parts.planner.budget = MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, arguments.budget)
    uniform = arguments.lengths == "uniform"
    bench.learn()
    bench.use(with_lengths(bench.batch) if uniform else with_dead_rows(bench.batch, arguments.dead))
    bench.use(bench.on_policy())
    table = report(bench, cases(bench, arguments.budget), arguments.turns, Console(stderr=True))
    rows, tokens = bench.batch.ids.shape
    what = "lengths uniform in 10 to 100 %" if uniform else f"{arguments.dead:.0%} of the rows dead"
    table.title = f"{bench.layers} layers, {rows} rows of {tokens} tokens, {what}, {arguments.turns} turns"
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
