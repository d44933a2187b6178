"""Time of an update against memory, for every method at many budgets: a CSV and a picture.

    python -m benchmarks.curves --preset quick --out docs/results
    python -m benchmarks.curves --preset full --out docs/results --families plain --turns 2
    python -m benchmarks.claims docs/results/quick.csv

Measured by benchmarks.update_step, one run for each family of curves: "plain" (log-probabilities in chunks for all),
"logits" (whole logits for all) and "prune" (half of the rows dead, and skipped by all: by hilore in replay and backward
as announced, by others because they are left out of the microbatch, where hilore runs too: "+cut"). A family that is
not asked for keeps its rows in the CSV, so that a long measurement can be taken in parts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from benchmarks.claims import judged
from benchmarks.claims import table as claims_table
from benchmarks.curve_plot import draw
from benchmarks.curve_rows import Row, read_rows, replaced, write_rows
from benchmarks.methods import PLAIN_METHODS, TUNED_METHODS, base_of
from benchmarks.records import table
from benchmarks.spec import Spec
from benchmarks.subject import PRESETS, SWEEP
from benchmarks.update_step import measured

_COMPARED = (*PLAIN_METHODS, *TUNED_METHODS, "hilore_exact")


@dataclass(frozen=True)
class Family:
    """Curves that belong together. `budgets`: by preset; of others the last."""

    title: str
    methods: tuple[str, ...]
    few: tuple[str, ...]
    many: tuple[str, ...]
    dead_rows: float = 0.0

    def budgets(self, preset: str) -> tuple[str, ...]:
        """As many as the time of an update of the preset allows."""
        return self.many if preset == "quick" else self.few


_FEW = ("1.00x", "1.10x", "1.20x")
_OF_LOGITS = tuple(f"{multiple}+logits" for multiple in _FEW)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "plain": Family(
            "log-probabilities in chunks", _COMPARED, (*_FEW, "1.10x+logits"), (*SWEEP, "1.00x", "1.10x+logits")
        ),
        "logits": Family(
            "whole logits",
            tuple(f"{method}+logits" for method in _COMPARED),
            _OF_LOGITS,
            (*_OF_LOGITS, *(f"{multiple}x+logits" for multiple in ("1.03", "1.06", "1.14", "1.30")), "unlimited"),
        ),
        "prune": Family(
            "half of the rows dead, and skipped",
            (*(f"{method}+prune" for method in _COMPARED), "hilore_exact+cut"),
            (*_FEW, "1.10x+logits"),
            (*SWEEP, "1.10x+logits"),
            dead_rows=0.5,
        ),
    }
)


def specs(families: list[str], like: Spec) -> dict[str, Spec]:
    """What to measure for each family.

    Args:
        like: gives all that families do not decide; its budgets, where it has any, are taken in place of a family's
            own, and of a family's methods only those that it has too (without suffixes), where it has any.
    """
    return {
        name: Spec(
            preset=like.preset,
            model=like.model,
            layers=like.layers,
            rows=like.rows,
            dead_rows=FAMILIES[name].dead_rows,
            threads=like.threads,
            methods=tuple(m for m in FAMILIES[name].methods if not like.methods or base_of(m) in like.methods),
            budgets=like.budgets or FAMILIES[name].budgets(like.preset),
            turns=like.turns,
        )
        for name in families
    }


def _listed(written: str | None) -> tuple[str, ...]:
    return () if written is None else tuple(written.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--out", type=Path, required=True, help="folder for PRESET.csv and PRESET.png")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--methods", help=f"comma-separated, of {', '.join(_COMPARED)}; none and torch always run")
    parser.add_argument("--budgets", help="comma-separated, in place of each family's own")
    parser.add_argument("--turns", type=int, help="updates per method")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--model", type=Path, help="as for benchmarks.update_step; so are the next two")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int)
    arguments = parser.parse_args()
    if unknown := sorted(set(_listed(arguments.methods)) - set(_COMPARED)):
        parser.error(f"--methods: {', '.join(unknown)} not known here; known: {', '.join(_COMPARED)}")
    preset = PRESETS[arguments.preset]
    like = Spec(
        preset=arguments.preset,
        model=None if arguments.model is None else str(arguments.model),
        layers=arguments.layers,
        rows=arguments.rows,
        threads=arguments.threads,
        methods=_listed(arguments.methods),
        budgets=_listed(arguments.budgets),
        turns=arguments.turns or preset.turns,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    csv_file = arguments.out / f"{arguments.preset}.csv"
    rows = read_rows(csv_file) if csv_file.exists() else []
    console = Console(width=160)
    for family, spec in specs(arguments.families, like).items():
        found = measured(spec)
        console.print(table(found, f"{arguments.preset}, {FAMILIES[family].title}, {spec.turns} turns"))
        rows = replaced(rows, [Row(family, record) for record in found])
        write_rows(rows, csv_file)  # a family that is done is not lost if the next one fails
        titles = {name: each.title for name, each in FAMILIES.items()}
        draw(rows, titles, f"{arguments.preset}: {preset.tokens} tokens", csv_file.with_suffix(".png"))
    console.print(claims_table(judged(rows)))


if __name__ == "__main__":
    main()
