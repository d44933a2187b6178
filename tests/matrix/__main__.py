"""Runs cells of the compatibility matrix on two ranks, and writes what came of them.

python -m tests.matrix                                  # all cells
python -m tests.matrix --cells 3,17                     # some of them
python -m tests.matrix --write docs/compatibility.md    # all, and the page
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.matrix.report import is_sound, page
from tests.matrix.settings import cells, name
from tests.ranks import RankFailure, RankPool

#: Seconds that a cell may take on both ranks.
LIMIT_S = 120.0


def run_cells(numbers: list[int]) -> dict[int, str]:
    """Results by number of the cell: that of both ranks where they are the same, else of each."""
    found, pool, known = {}, RankPool(2), cells()
    try:
        for number in numbers:
            try:
                results = pool.run("tests.matrix.cell:run_cell", timeout=LIMIT_S, **known[number])
            except RankFailure as failure:
                results = [f"FAILED: {str(failure).strip().splitlines()[-1]}"]
            found[number] = " / ".join(dict.fromkeys(results))
            print(f"{number:3d} {name(known[number])}: {found[number]}", flush=True)
    finally:
        pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", help="numbers, comma-separated; default: all")
    parser.add_argument("--write", type=Path, help="write the page there")
    arguments = parser.parse_args()
    if arguments.cells and arguments.write:
        parser.error("the page holds all cells: leave out --cells")
    numbers = [int(each) for each in arguments.cells.split(",")] if arguments.cells else list(range(len(cells())))
    found = run_cells(numbers)
    if arguments.write:
        arguments.write.write_text(page(found))
    sys.exit(0 if all(map(is_sound, found.values())) else 1)


if __name__ == "__main__":
    main()
