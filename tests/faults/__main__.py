"""Tries every fault and says what became of it: python -m tests.faults [WORDS ...]

Without WORDS all faults, with them those whose names hold all of them. Exit code 1: something is not as the suite says.
"""

from __future__ import annotations

import argparse
import textwrap
import time

from tests.faults.driver import LIMIT_S, Trials
from tests.faults.suite import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries the faults of the suite on two ranks.")
    parser.add_argument("words", nargs="*", help="only faults whose names hold all of these words")
    parser.add_argument("--stage", type=int, action="append", default=[], help="only these ZeRO stages")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which ranks count as hanging")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if all(word in f"{fault.place.value}: {fault.name}" for word in given.words)]
    failed, started = 0, time.monotonic()
    with Trials(given.limit) as trials:
        for fault in chosen:
            for stage in (each for each in fault.stages if not given.stage or each in given.stage):
                begun = time.monotonic()
                outcome = trials.try_fault(fault, (stage,))
                failed += bool(outcome.complaints)
                verdict = "not as it should be" if outcome.complaints else "as it should be"
                seconds = time.monotonic() - begun
                print(f"{seconds:5.1f} s  ZeRO-{stage}  {fault.place.value}: {fault.name}: {verdict}", flush=True)
                for line in outcome.complaints:
                    print(textwrap.indent(line, "        "), flush=True)
    print(f"{len(chosen)} faults, {failed} not as they should be, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
