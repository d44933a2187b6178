"""Runs faults: on a rank (`strike`), and from outside (`try_fault`), which ends ranks that hang and judges the rest."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ds_hilore
from ds_hilore.core.errors import HiLoReError
from tests.engines import difference
from tests.faults.bench import Bench, bench
from tests.faults.forks import ForkedPool
from tests.faults.records import NEXT, RIGHT, Fault, Gradients, Pair, Plans, Seen
from tests.faults.sites import Strike
from tests.integration.updates import unequal_bits
from tests.ranks import RankFailure

HERE = "tests.faults.driver"
#: Until every rank has its outcome (issue 15).
LIMIT_S = 60.0
#: Relative error of exact gradients, and of those of bf16 state.
EXACT, COMPRESSED = 1e-6, 0.02
#: Times that the next update may have to be tried: a rank that learns late of another's fault starts again.
MOST_TRIES = 3

WRONG = "wrong"


# -- on a rank -----------------------------------------------------------------------------------------------------


def make_benches(stages: tuple[int, ...]) -> None:
    """What takes longest, and is no part of a fault."""
    for stage in stages:
        bench(stage)


def strike(name: str, stages: tuple[int, ...]) -> list[Seen]:
    """One fault under each of its stages, on this rank."""
    from tests.faults.suite import BY_NAME

    return [_strike(BY_NAME[name], bench(stage)) for stage in stages]


def _strike(fault: Fault, pair: Bench) -> Seen:
    armed = fault.times if dist.get_rank() in fault.ranks else 0
    planted = Strike(pair, fault.error, fault.at, armed)
    pair.begin(fault.plan)
    started = time.monotonic()
    with fault.site(pair, planted):
        first, said = _outcome(lambda: fault.run(pair), COMPRESSED if fault.plan is Plans.COMPRESS else EXACT)
    seconds = time.monotonic() - started
    pair.calm()
    if fault.outside and planted.count:
        ds_hilore.restart_update(pair.ours)
    if pair.ours is pair.common:
        pair.force(Plans.MIXED)
    later = _next_update(pair)
    pair.end()
    return Seen(dist.get_rank(), pair.stage, first, later, said, planted.count, seconds)


def _outcome(work: Callable[[], Pair], tolerance: float) -> tuple[str, str]:
    try:
        found, expected = work()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        return type(error).__name__, "".join(traceback.format_exception(error))
    return _verdict(found, expected, tolerance), ""


def _next_update(pair: Bench) -> tuple[str, ...]:
    seen: list[str] = []
    while len(seen) < MOST_TRIES:
        try:
            seen.append(_verdict(pair.update(NEXT), pair.expected(NEXT), EXACT))
            break
        except HiLoReError as error:
            seen.append(type(error).__name__)
        except Exception as error:  # of torch or DeepSpeed, left over from the fault
            seen.append(f"{type(error).__name__}: {error}")
    return tuple(seen)


def _verdict(found: Gradients, expected: Gradients, tolerance: float) -> str:
    if not unequal_bits(found, expected) or _same_where_no_number(found, expected):
        return RIGHT
    error = difference(found, expected) if found.keys() == expected.keys() else float("inf")
    return RIGHT if error <= tolerance else f"{WRONG} by {error:.1e}"


def _same_where_no_number(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(value, expected[name], rtol=EXACT, atol=0.0, equal_nan=True) for name, value in found.items()
    )


# -- from outside --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of one fault: what each rank saw under each stage, and what is wrong with that."""

    fault: Fault
    seen: tuple[Seen, ...] = ()
    hang: str = ""  # stacks of the ranks

    @property
    def complaints(self) -> list[str]:
        """Empty where all is as the fault says."""
        if self.hang:
            return [self.hang]
        return [line for seen in self.seen for line in _complaints(self.fault, seen)]

    @property
    def wrong(self) -> bool:
        """Whether a gradient was silently wrong."""
        return any(WRONG in each for seen in self.seen for each in (seen.first, *seen.later))


def _complaints(fault: Fault, seen: Seen) -> list[str]:
    where = f"{fault.name!r}, ZeRO-{seen.stage}, rank {seen.rank}"
    found, wanted = [], fault.expected(seen.rank)
    if seen.first != wanted:
        found.append(f"{where}: {seen.first}, not {wanted}: {seen.said}")
    if seen.rank in fault.ranks and not seen.struck:
        found.append(f"{where}: it never struck")
    if not seen.later or seen.later[-1] != RIGHT:
        found.append(f"{where}: the next update is not right: {', '.join(seen.later)}")
    if seen.seconds > LIMIT_S:
        found.append(f"{where}: {seen.seconds:.0f} s")
    return found


class Trials:
    """Tries faults one after another in the same two processes, which are replaced where anything is not as it should
    be: what is left of their engines is of no more use.

    Args:
        limit_s: until every rank has its outcome, for each ZeRO stage; then ranks are taken to hang.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._pool = ForkedPool(world=2)
        self._limit_s = limit_s
        self._made: set[int] = set()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def try_fault(self, fault: Fault, stages: tuple[int, ...] = ()) -> Outcome:
        """One fault, under its stages or some of them."""
        stages = stages or fault.stages
        missing = tuple(stage for stage in stages if stage not in self._made)
        if missing:
            self._pool.run(f"{HERE}:make_benches", stages=missing)
            self._made.update(missing)
        try:
            ranks = self._pool.run(
                f"{HERE}:strike", timeout=self._limit_s * len(stages), name=fault.name, stages=stages
            )
        except RankFailure as failure:
            self._made.clear()
            return Outcome(fault, hang=str(failure))
        outcome = Outcome(fault, tuple(seen for rank in ranks for seen in rank))
        if outcome.complaints:
            self._close()
        return outcome

    def _close(self) -> None:
        self._pool.close()
        self._made.clear()
