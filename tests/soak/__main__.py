"""A soak on two ranks: python -m tests.soak [--updates 2000] [--model quick]

Prints a row for each part of the run and rank: level of the process after updates (median), largest peak, budgets,
updates over their budget and the worst of them, measured over predicted peak (median), share of units stored, share of
rows dead. Exit code 1: memory grew, a budget was not kept, or predictions drifted.
"""

from __future__ import annotations

import argparse
import time

from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT
from tests.ranks import RankPool
from tests.soak.job import KINDS, Seen
from tests.soak.verdict import HEAD, complaints, rows

#: Seconds that an update may take on a machine that is busy with other things.
LIMIT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs many updates of random shapes, budgets and dead rows.")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--model", choices=[*KINDS], default="tiny")
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="of ZeRO")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches of an update")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, default=100, help="updates of a row")
    given = parser.parse_args()
    run = {"model": given.model, "stage": given.stage, "accumulation": given.accumulation, "seed": given.seed}
    ranks: list[list[Seen]] = [[], []]
    started = time.monotonic()
    print(" | ".join(HEAD), flush=True)
    with RankPool(env=dict(TIGHT_ENVIRONMENT)) as pool:
        for first in range(0, given.updates, given.part):
            count = min(given.part, given.updates - first)
            parts = pool.run("tests.soak.job:advance", timeout=LIMIT_S * (count + 20), count=count, **run)
            for known, part in zip(ranks, parts):
                known.extend(part)
            for row in rows(parts):
                print(" | ".join(row), flush=True)
    wrong = [line for rank, seen in enumerate(ranks) for line in complaints(rank, seen)]
    for line in wrong:
        print(line)
    verdict = f"{len(wrong)} not as they should be" if wrong else "memory flat, budgets kept, predictions without drift"
    print(f"{given.updates} updates on two ranks in {time.monotonic() - started:.0f} s: {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
