"""Tries every fault and says what became of it: python -m tests.faults [WORDS ...]

Without WORDS all faults, with them those whose names hold all of them. Exit code 1: something is not as the suite says.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Callable
from functools import partial

from tests.faults.driver import LIMIT_S, Trials
from tests.faults.endings import ENDINGS, complaints
from tests.faults.records import Fault, Place
from tests.faults.suite import FAULTS


def _meant(given: argparse.Namespace, title: str) -> bool:
    return all(word in title for word in given.words)


def _complaints(trials: Trials, fault: Fault, stage: int) -> list[str]:
    return trials.try_fault(fault, (stage,)).complaints


def _tell(title: str, attempt: Callable[[], list[str]]) -> bool:
    """Prints what became of one case. Gives whether that is not as it should be."""
    begun = time.monotonic()
    found = attempt()
    verdict = "not as it should be" if found else "as it should be"
    print(f"{time.monotonic() - begun:5.1f} s  {title}: {verdict}", flush=True)
    for line in found:
        print(textwrap.indent(line, "        "), flush=True)
    return bool(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries the faults of the suite on two ranks.")
    parser.add_argument("words", nargs="*", help="only faults whose names hold all of these words")
    parser.add_argument("--stage", type=int, action="append", default=[], help="only these ZeRO stages")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which ranks count as hanging")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if _meant(given, f"{fault.place.value}: {fault.name}")]
    endings = [ending for ending in ENDINGS if _meant(given, f"{Place.PROCESSES.value}: {ending.name}")]
    endings = [ending for ending in endings if not given.stage or ending.stage in given.stage]
    failed, started = 0, time.monotonic()
    with Trials(given.limit) as trials:
        for fault in faults:
            for stage in (each for each in fault.stages if not given.stage or each in given.stage):
                found = partial(_complaints, trials, fault, stage)
                failed += _tell(f"ZeRO-{stage}  {fault.place.value}: {fault.name}", found)
    for ending in endings:
        found = partial(complaints, ending, given.limit)
        failed += _tell(f"ZeRO-{ending.stage}  {Place.PROCESSES.value}: {ending.name}", found)
    count = len(faults) + len(endings)
    print(f"{count} kinds of faults, {failed} cases not as they should be, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
