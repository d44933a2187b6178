"""A planner, a solver, a clock or a meter that fails or says what is not so: plans may be poor, gradients are right."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ds_hilore.core.types import Plan, UnitId
from ds_hilore.planning.frontier import Frontier
from ds_hilore.planning.problem import Infeasible
from ds_hilore.runtime.parts import Stage
from tests.faults.bench import Bench, hilore_engine
from tests.faults.records import Fault, Pair, Place, update
from tests.faults.sites import calls, replaced

Patch = Callable[[], AbstractContextManager[object]]

#: Updates after which every engine follows plans: two to measure, one for the sample.
MOST_UPDATES = 12
#: How long a solver may be waited for, which no update does.
WAIT_S = 20.0

ALWAYS_SOLVE = {"ds_hilore.runtime.budget:gap": lambda plan: 1.0}


def own(bench: Bench, **block: Any) -> Any:
    """An engine of the fault's own that plans for itself."""
    return bench.borrow(hilore_engine(bench.stage, **{"memory_budget": "1000x", **block}))


def until_planned(bench: Bench) -> None:
    """Updates until all ranks follow plans."""
    for number in range(MOST_UPDATES):
        bench.update(number)
        if bench.ours.hilore.stage is Stage.PLANNED:
            return
    raise AssertionError(f"no plan after {MOST_UPDATES} updates")


def solved_by(solver: Callable[..., Any] | None, **block: Any) -> Callable[[Bench], Pair]:
    """Whatever the solver's process does in the background, updates go on."""
    by = {} if solver is None else {"ds_hilore.planning.refine:apart": lambda function, *given: solver(*given)}

    def run(bench: Bench) -> Pair:
        with replaced({**ALWAYS_SOLVE, **by})():
            own(bench, **block)
            until_planned(bench)
            bench.update(0)
            if solver is not never_ends:
                assert bench.ours.hilore.parts.planner.wait(WAIT_S)
            bench.update(1)
            return update(bench)

    return run


def child_that(returncode: int, stdout: bytes) -> Callable[[Bench], Pair]:
    """The solver's process ends otherwise than it should."""

    def run(bench: Bench) -> Pair:
        ended = SimpleNamespace(returncode=returncode, stdout=stdout, stderr=b"planted")
        process = SimpleNamespace(run=lambda *_, **__: ended)
        with replaced({"ds_hilore.planning.apart:subprocess": process})():
            return solved_by(None)(bench)

    return run


def raises(frontier: Frontier, limits: Any) -> Frontier:
    raise RuntimeError("planted: the solver broke")


def never_ends(frontier: Frontier, limits: Any) -> Frontier:
    time.sleep(3.0)
    raise TimeoutError("planted: the solver took too long")


def infeasible(frontier: Frontier, limits: Any) -> Infeasible:
    return Infeasible(1 << 60, "backward", None, 0)


def nothing(frontier: Frontier, limits: Any) -> None:
    return None


def _with_plans(frontier: Frontier, change: Callable[[Plan], Plan]) -> Frontier:
    rows = [
        replace(row, plan=change(row.plan), points=tuple(change(point) for point in row.points))
        for row in frontier.rows
    ]
    return Frontier(frontier.problem, tuple(rows))


def unknown_variants(frontier: Frontier, limits: Any) -> Frontier:
    return _with_plans(frontier, lambda plan: replace(plan, choice=dict.fromkeys(plan.choice, "X:nonsense")))


def unknown_codecs(frontier: Frontier, limits: Any) -> Frontier:
    return _with_plans(frontier, lambda plan: replace(plan, choice=dict.fromkeys(plan.choice, "L:mlp=int7")))


def other_units(frontier: Frontier, limits: Any) -> Frontier:
    def change(plan: Plan) -> Plan:
        return replace(plan, choice={UnitId(f"not.{unit.name}"): name for unit, name in plan.choice.items()})

    return _with_plans(frontier, change)


def stores_everything(frontier: Frontier, limits: Any) -> Frontier:
    """Over its budget: the guard and the watch of peaks have the last word."""
    return _with_plans(frontier, lambda plan: replace(plan, choice=dict.fromkeys(plan.choice, "H")))


def compresses(frontier: Frontier, limits: Any) -> Frontier:
    """Where only exact actions are allowed."""
    return _with_plans(frontier, lambda plan: replace(plan, choice=dict.fromkeys(plan.choice, "L:mlp=bf16")))


def no_rows(frontier: Frontier, limits: Any) -> Frontier:
    return Frontier(frontier.problem, ())


def learning_under(patch: Patch, **block: Any) -> Callable[[Bench], Pair]:
    """All of an engine's measuring, and updates by the plans that come of it, with something amiss."""

    def run(bench: Bench) -> Pair:
        with patch():
            own(bench, **block)
            for number in range(6):
                bench.update(number)
            return update(bench)

    return run


def planned(bench: Bench) -> Pair:
    """An engine that follows plans, when the fault strikes."""
    own(bench)
    until_planned(bench)
    bench.ours.hilore.parts.planner.replan()
    return update(bench)


def small_budget(bench: Bench) -> Pair:
    own(bench, memory_budget="2MB")
    until_planned(bench)
    return update(bench)


def other_budgets(bench: Bench) -> Pair:
    """The budget changes in every update, on each rank otherwise."""
    own(bench)
    until_planned(bench)
    for share in (0, 1 << 60, 1):
        bench.ours.hilore.parts.planner.set_budget(share + dist.get_rank())
        bench.update(share % 3)
    return update(bench)


def clock(of: Callable[[], float]) -> Patch:
    """`time.perf_counter` as measurements read it."""
    return replaced({"ds_hilore.profiling.clock:time": SimpleNamespace(perf_counter=of)})


def wild() -> Callable[[], float]:
    made = random.Random(3)
    return lambda: made.uniform(-1e6, 1e6)


def backwards() -> Callable[[], float]:
    return lambda: -time.perf_counter()


def jumping_wall_clock() -> AbstractContextManager[object]:
    """A daemon sets the time: years back, and years on."""
    made = random.Random(4)
    return replaced({"time:time": lambda: made.uniform(0, 4e9)})()


def meter(**says: Callable[..., Any]) -> Patch:
    """Memory figures of this process are what they cannot be."""
    return replaced({f"ds_hilore.memory.meter:CpuMeter.{name}": given for name, given in says.items()})


def _says(value: int) -> Callable[..., int]:
    return lambda self, *_: value


def _fault(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(name, Place.PLANNING, run=run, **{"stages": (2,), **more})


FAULTS: tuple[Fault, ...] = (
    _fault("a solver that raises", solved_by(raises)),
    _fault("a solver that takes too long", solved_by(never_ends)),
    _fault("a solver to which nothing fits", solved_by(infeasible), thorough=True),
    _fault("a solver that gives nothing", solved_by(nothing), thorough=True),
    _fault("a solver that gives no rows", solved_by(no_rows), thorough=True),
    _fault("a solver's plan of variants that there are not", solved_by(unknown_variants)),
    _fault("a solver's plan of codecs that there are not", solved_by(unknown_codecs), thorough=True),
    _fault("a solver's plan of other units", solved_by(other_units), thorough=True),
    _fault("a solver's plan over its budget", solved_by(stores_everything, memory_budget="1.0x"), thorough=True),
    _fault("a solver's plan that compresses where nothing may be", solved_by(compresses)),
    _fault("a solver's process that is killed", child_that(-9, b"")),
    _fault("a solver's process that answers nonsense", child_that(0, b"nonsense"), thorough=True),
    Fault(
        "an exception while a plan is chosen",
        Place.PLANNING,
        calls("ds_hilore.runtime.budget:first_frontier"),
        planned,
        at=0,
        stages=(2, 3),
    ),
    Fault(
        "an exception while the final plan is decided",
        Place.PLANNING,
        calls("ds_hilore.runtime.budget:RankPlanner._pressure"),
        planned,
        stages=(2, 3),
    ),
    _fault("a budget below what replaying everything needs", small_budget, stages=(2, 3), thorough=True),
    _fault("budgets that change in every update", other_budgets, stages=(2, 3), thorough=True),
    _fault(
        "a clock that runs backwards",
        learning_under(clock(backwards()), planner={"trial_microbatches": 4}),
        thorough=True,
    ),
    _fault("a clock that jumps", learning_under(clock(wild()), planner={"trial_microbatches": 4})),
    _fault(
        "a clock that stands still",
        learning_under(clock(lambda: 1.0), planner={"trial_microbatches": 4}),
        thorough=True,
    ),
    _fault(
        "a clock that gives NaN",
        learning_under(clock(lambda: math.nan), planner={"trial_microbatches": 4}),
        thorough=True,
    ),
    _fault("a wall clock that jumps by years", learning_under(jumping_wall_clock), thorough=True),
    _fault("a meter that says 0", learning_under(meter(peak_bytes=_says(0), level_bytes=_says(0))), thorough=True),
    _fault("a meter that says more than there is", learning_under(meter(peak_bytes=_says(1 << 62))), thorough=True),
    _fault("a meter whose peak is below its level", learning_under(meter(peak_bytes=_says(1))), thorough=True),
    _fault("a device of which nothing is free", learning_under(meter(free_bytes=_says(0)))),
)
