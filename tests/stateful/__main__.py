"""Tries many examples of the state machine: python -m tests.stateful [--examples 300] [--seed 1]

Prints what was done. Exit code 1, with the shortest failing rules that were found: something is not as in DeepSpeed
without checkpointing.
"""

from __future__ import annotations

import argparse
import random

from tests.ranks import RankFailure, RankPool


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries random orders of what hosts do with an engine.")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--steps", type=int, default=50, help="most rules of an example")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for all of it")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    arguments = {"examples": given.examples, "steps": given.steps, "number": seed, "shrink": True}
    with RankPool(world=1) as process:
        try:
            (counts,) = process.run("tests.stateful.machine:explore", timeout=given.limit, **arguments)
        except RankFailure as failure:
            print(f"seed {seed}: {failure}")
            return 1
    print(f"seed {seed}, {given.examples} examples of up to {given.steps} rules: nothing differs in any bit")
    for what, count in counts.most_common():
        print(f"{count:8d}  {what}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
