"""From measured peaks to plans."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.budget import BudgetKind, MemoryBudget
from ds_hilore.core.treatment import REPLAYED, STORED, Treatment, UniformPlan, treatment_of
from ds_hilore.core.types import Action, Shape, Solver, UnitId, UnitProfile, Variant
from ds_hilore.planning.background import BackgroundPlanner
from ds_hilore.planning.frontier import Prepared, gap
from ds_hilore.planning.paper import PaperPrepared
from ds_hilore.planning.problem import evaluate
from ds_hilore.planning.program import SolverLimits
from ds_hilore.runtime.budget import (
    Baseline,
    PhasePeaks,
    RankPlanner,
    all_units,
    loss_leads,
    round_up,
    shape_class,
)
from ds_hilore.runtime.risk import RiskNow

COUNT = st.integers(1, 1 << 22)
TEN, TWENTY = Shape(2, 5), Shape(4, 5)


@given(COUNT)
def test_rounding_up_adds_less_than_an_eighth(count: int) -> None:
    size = round_up(count)
    assert count <= size and 8 * (size - count) < count
    assert round_up(size) == size


@given(COUNT, COUNT)
def test_rounding_up_is_monotone(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert round_up(low) <= round_up(high)


@given(st.integers(4, 21))
def test_there_are_few_classes(power: int) -> None:
    start = 1 << power
    assert len({round_up(count) for count in range(start + 1, 2 * start + 1, max(1, start >> 10))}) <= 8


@given(COUNT, COUNT)
def test_every_shape_fits_into_its_class(segments: int, length: int) -> None:
    size = shape_class(Shape(segments, length))
    assert size.segments >= segments and size.length >= length
    assert shape_class(size) == size
    if segments <= 16:  # the rows of a microbatch are few, and stay as they are
        assert size.segments == segments


def test_shape_class_of_nothing() -> None:
    assert shape_class(Shape(0, 0)) == Shape(0, 0)


# ------------------------------------------------------------------------------------------------ calibration


@st.composite
def measured(draw: st.DrawFn) -> tuple[tuple[UnitProfile, ...], Baseline]:
    """Units, and an all-R baseline whose peaks are at least what the units hold."""
    units = []
    for number in range(draw(st.integers(1, 6))):
        inputs, state = draw(st.integers(0, 50)), draw(st.integers(0, 400))
        seconds = draw(st.integers(1, 100)) / 7
        units.append(
            UnitProfile(
                UnitId(f"u{number}"),
                f"class{draw(st.integers(0, 2))}.{inputs}.{state}.{seconds}",
                (
                    Variant("R", Action.RECOMPUTE, inputs, workspace_bytes=state),
                    Variant("H", Action.STORE, inputs + state, saved_seconds=seconds),
                ),
            )
        )
    needs = sum(u.variant("R").held_bytes for u in units)
    forward = needs + draw(st.integers(0, 1000))
    backward = needs + max(u.variant("R").workspace_bytes for u in units) + draw(st.integers(0, 1000))
    step = draw(st.integers(0, 3000))
    phase = PhasePeaks(TEN, forward, forward, backward)
    return tuple(units), Baseline(max(forward, backward, step), (phase,), 10**9)


MB = 10**6


def planner(budget: MemoryBudget, solver: Solver = Solver.GREEDY) -> RankPlanner:
    return RankPlanner(budget, solver, SolverLimits(1.0, 0.01))


def calibrated(units: tuple[UnitProfile, ...], baseline: Baseline, budget: MemoryBudget) -> RankPlanner:
    made = planner(budget)
    made.calibrate(baseline, {phase.shape: units for phase in baseline.phases})
    return made


def multiple(value: float) -> MemoryBudget:
    return MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, value)


@given(measured())
@settings(max_examples=150, deadline=None)
def test_the_predicted_peak_of_all_r_is_the_measured_one(case: tuple[tuple[UnitProfile, ...], Baseline]) -> None:
    units, baseline = case
    made = calibrated(units, baseline, multiple(1.0))
    made.plan_for(TEN, units)
    problem = made.problem_for(TEN)
    assert problem is not None
    (phase,) = baseline.phases
    peaks = {peak.row.value: peak.bytes for peak in evaluate(problem, {}).peaks}
    assert peaks == {"forward": phase.forward, "loss": phase.loss, "backward": phase.backward}


@given(measured(), st.floats(1.0, 3.0))
@settings(max_examples=100, deadline=None)
def test_plans_keep_to_the_budget(case: tuple[tuple[UnitProfile, ...], Baseline], factor: float) -> None:
    units, baseline = case
    made = calibrated(units, baseline, multiple(factor))
    plan = made.plan_for(TEN, units)
    assert plan.peak_bytes <= made.budget_bytes == int(factor * baseline.peak_bytes)
    assert made.infeasible is None  # "1.0x" and more always holds all-R


@given(measured(), st.integers(2, 4), st.floats(1.0, 3.0))
@settings(max_examples=100, deadline=None)
def test_with_several_microbatches_in_flight(
    case: tuple[tuple[UnitProfile, ...], Baseline], in_flight: int, factor: float
) -> None:
    """The peaks hold the inputs of all of them, so that the rest is what it is with one."""
    units, alone = case
    (phase,) = alone.phases
    more = (in_flight - 1) * sum(u.variant("R").held_bytes for u in units)
    phases = (PhasePeaks(TEN, phase.forward + more, phase.loss + more, phase.backward + more),)
    baseline = Baseline(alone.peak_bytes + more, phases, 10**9)
    made = planner(multiple(factor))
    made.calibrate(baseline, {TEN: units}, in_flight)
    plan = made.plan_for(TEN, units)
    problem = made.problem_for(TEN)
    assert problem is not None and problem.in_flight == in_flight
    assert plan.peak_bytes <= made.budget_bytes and made.infeasible is None
    peaks = {peak.row.value: peak.bytes for peak in evaluate(problem, {}).peaks}
    assert peaks == {row: getattr(phases[0], row) for row in ("forward", "loss", "backward")}


def layers(count: int, inputs: int, state: int) -> tuple[UnitProfile, ...]:
    variants = (
        Variant("R", Action.RECOMPUTE, inputs, workspace_bytes=state),
        Variant("H", Action.STORE, inputs + state, saved_seconds=1.0),
    )
    return tuple(UnitProfile(UnitId(f"u{k}"), "Layer", variants) for k in range(count))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 300), st.integers(0, 500), st.integers(0, 500), st.data())
@settings(max_examples=100, deadline=None)
def test_more_budget_never_stores_fewer_layers(
    count: int, inputs: int, state: int, loss: int, backward: int, data: st.DataObject
) -> None:
    units = layers(count, inputs, state)
    needs = count * inputs
    phase = PhasePeaks(TEN, needs + loss, needs + loss, needs + state + backward)
    baseline = Baseline(max(phase.loss, phase.backward), (phase,), 10**9)
    most = (count + 1) * state + loss + backward
    extras = sorted(data.draw(st.lists(st.integers(0, most), min_size=2, max_size=5)))
    stored = []
    for extra in extras:
        made = calibrated(units, baseline, MemoryBudget(BudgetKind.BYTES, baseline.peak_bytes + extra))
        stored.append(made.plan_for(TEN, units).count(Action.STORE))
    assert stored == sorted(stored)


def test_layers_stored_by_hand() -> None:
    units = layers(8, inputs=10, state=90)
    baseline = Baseline(1000, (PhasePeaks(TEN, 900, 900, 1000),), 10**9)
    counts = [
        calibrated(units, baseline, MemoryBudget(BudgetKind.BYTES, budget)).plan_for(TEN, units).count(Action.STORE)
        for budget in (1000, 1089, 1090, 1629, 1630)
    ]
    # Loss row: 900 + 90 k for k stored layers. Backward row: 830 stay, all inputs are 80, and where the last k layers
    # are stored the last one's backward begins with 910 + 90 k; all-R needs a workspace of 90 in the place of one.
    assert counts == [1, 1, 2, 7, 8]


def test_layers_stored_by_hand_with_three_in_flight() -> None:
    units = layers(8, inputs=10, state=90)
    baseline = Baseline(1000, (PhasePeaks(TEN, 900, 900, 1000),), 10**9)
    counts = []
    for budget in (1179, 1180, 1449, 1450, 3069, 3070):
        made = planner(MemoryBudget(BudgetKind.BYTES, budget))
        made.calibrate(baseline, {TEN: units}, in_flight=3)
        counts.append(made.plan_for(TEN, units).count(Action.STORE))
    # Of the 1000 bytes in backward 3 * 80 are inputs and 90 a workspace: 670 stay. Where the last k layers are stored,
    # the last one's backward begins with 670 + 3 * (80 + 90 k).
    assert counts == [0, 1, 1, 2, 7, 8]


def test_all_phases_of_the_baseline_are_kept_to() -> None:
    """The row that binds may come from another microbatch than the largest one."""
    small, large = profile_of(1), profile_of(2)
    baseline = Baseline(700, (PhasePeaks(TEN, 700, 700, 300), PhasePeaks(TWENTY, 500, 500, 600)), 10**9)
    made = planner(multiple(1.0))
    made.calibrate(baseline, {TEN: small, TWENTY: large})
    bases = []
    for shape, profile in ((TEN, small), (TWENTY, large)):
        made.plan_for(shape, profile)
        problem = made.problem_for(shape)
        assert problem is not None
        bases.append((problem.base_loss_bytes, problem.base_backward_bytes))
    assert bases == [(700 - 10, 300 - 100), (700 - 10, 600 - 2 * 100)]


def test_a_peak_above_what_was_foreseen_makes_plans_leave_more_room() -> None:
    units = profile_of(1)
    made = planner(multiple(2.0))
    made.calibrate(Baseline(700 * MB, (PhasePeaks(TEN, 690 * MB, 690 * MB, 700 * MB),), 10**12), {TEN: units})
    first = made.plan_for(TEN, units)
    made.note_peaks(PhasePeaks(TEN, 690 * MB, 690 * MB, 700 * MB), units, {})  # as foreseen
    assert made.plan_for(TEN, units) is first
    made.note_peaks(PhasePeaks(TEN, 690 * MB, 690 * MB, 750 * MB), units, {})
    assert made.plan_for(TEN, units).peak_bytes - first.peak_bytes == 50 * MB


def profile_of(scale: int) -> tuple[UnitProfile, ...]:
    variants = (
        Variant("R", Action.RECOMPUTE, 10 * scale, workspace_bytes=90 * scale),
        Variant("H", Action.STORE, 100 * scale, saved_seconds=1.0 * scale),
    )
    return (UnitProfile(UnitId("u"), "Layer", variants),)


def test_where_not_even_all_r_fits() -> None:
    units = profile_of(1)
    baseline = Baseline(1000, (PhasePeaks(TEN, 900, 900, 1000),), 10**9)
    made = calibrated(units, baseline, MemoryBudget(BudgetKind.BYTES, 800))
    plan = made.plan_for(TEN, units)
    assert dict(plan.actions) == {UnitId("u"): Action.RECOMPUTE} and dict(plan.choice) == {UnitId("u"): "R"}
    assert made.infeasible is not None and made.infeasible.missing_bytes == 200
    assert "200 more than the budget of 800" in str(made.infeasible) and "backward" in str(made.infeasible)
    made.calibrate(baseline, {TEN: profile_of(1)})
    assert made.infeasible is None  # of what was calibrated last


def test_shares_of_the_device() -> None:
    baseline = Baseline(1000, (PhasePeaks(TEN, 900, 900, 1000),), 10**6)
    made = calibrated(profile_of(1), baseline, MemoryBudget(BudgetKind.DEVICE_SHARE, 0.5))
    assert made.budget_bytes == 500_000


def knapsack() -> tuple[UnitProfile, ...]:
    """Units of which greedy takes the densest, and the best plan the two others."""
    return tuple(
        UnitProfile(
            UnitId(name),
            name,
            (Variant("R", Action.RECOMPUTE, 0), Variant("H", Action.STORE, state, saved_seconds=seconds)),
        )
        for name, state, seconds in (("a", 60, 7.0), ("b", 50, 5.0), ("c", 50, 5.0))
    )


def test_a_refined_plan_takes_the_place_of_the_first_one() -> None:
    units = knapsack()
    baseline = Baseline(900, (PhasePeaks(TEN, 900, 900, 900),), 10**9)
    made = planner(MemoryBudget(BudgetKind.BYTES, 1000), Solver.HIGHS)
    made.calibrate(baseline, {TEN: units})
    first = made.plan_for(TEN, units)
    assert made.wait(60)
    refined = made.plan_for(TEN, units)
    assert refined.saved_seconds == 10.0 >= first.saved_seconds
    assert gap(refined) <= 0.01
    # a plan of an earlier calibration is no answer to the next one
    made.calibrate(Baseline(990, (PhasePeaks(TEN, 990, 990, 990),), 10**9), {TEN: units})
    assert made.plan_for(TEN, units).saved_seconds == 0.0
    made.close()


def test_a_first_plan_that_is_certified_is_not_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundPlanner, "submit", lambda *_: pytest.fail("nothing is left to gain"))
    units = profile_of(1)
    made = planner(multiple(1.0), Solver.HIGHS)
    made.calibrate(Baseline(1000, (PhasePeaks(TEN, 900, 900, 1000),), 10**9), {TEN: units})
    assert made.plan_for(TEN, units).saved_seconds > 0
    made.close()


def test_more_on_the_device_than_foreseen_replays_units() -> None:
    units = tuple(replace(profile_of(MB)[0], unit=UnitId(f"u{k}")) for k in range(3))
    made = planner(multiple(1.5))
    held = 3 * 10 * MB
    phase = PhasePeaks(TEN, 900 * MB, 900 * MB, 1000 * MB, floor=500 * MB, settled=600 * MB)
    made.calibrate(Baseline(1000 * MB, (phase,), 10**12), {TEN: units})
    row = made.prepare(TEN, units)
    assert isinstance(row, Prepared)
    plan = row.plan
    assert plan.count(Action.STORE) == 3
    foreseen = 600 * MB - held + 3 * 100 * MB
    room = made.budget_bytes - plan.peak_bytes
    assert made.decide(TEN, row) is plan
    assert made.decide(TEN, row, foreseen) is plan
    assert made.decide(TEN, row, foreseen + room).count(Action.STORE) == 3
    fewer = made.decide(TEN, row, foreseen + room + 150 * MB)
    assert 0 < fewer.count(Action.STORE) < 3
    assert made.decide(TEN, row, 10**12).count(Action.STORE) == 0


def test_plans_by_name() -> None:
    units = [UnitId("a"), UnitId("b", 1)]
    plan = all_units(units, Action.STORE)
    assert dict(plan.choice) == dict.fromkeys(units, "H") and plan.count(Action.STORE) == 2
    assert plan.action_of(UnitId("c")) is Action.RECOMPUTE
    assert UniformPlan(treatment=STORED).action_of(UnitId("anything")) is Action.STORE
    mixed = all_units(units, Treatment.parse("L:mlp=bf16"))
    assert treatment_of(mixed, units[0]).codecs == (("mlp", "bf16"),) and treatment_of(mixed, UnitId("c")) == REPLAYED


@pytest.mark.parametrize("busy", [False, True])
def test_the_planner_does_not_keep_the_process_alive(busy: bool) -> None:
    """Neither asleep nor in the middle of a programme that takes minutes."""
    source = f"""
import threading, time
from ds_hilore.planning.problem import Problem
from ds_hilore.runtime import budget
from tests.runtime.test_budget import planner, multiple, profile_of, Solver

working = threading.Event()
def slow(problem, limits):
    working.set()
    time.sleep(600)

budget.refine_apart = slow
made = planner(multiple(1.0), Solver.HIGHS)
if {busy}:
    made._background.submit(1, Problem(profile_of(1), 1000))
    assert working.wait(30)
    made.close()
print("end of main")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "end of main", done.stderr


@pytest.mark.parametrize(("loss", "leads"), [(1_000, False), (1_399, False), (1_400, True), (9_000, True)])
def test_replays_are_lean_unless_the_loss_needs_far_more_than_backward(loss: int, leads: bool) -> None:
    units = (UnitProfile(UnitId("layer"), "Layer", (Variant("R", Action.RECOMPUTE, 100),)),)
    baseline = Baseline(loss, (PhasePeaks(TEN, 500, loss, 1_000), PhasePeaks(TEN, 500, 9_000, 1_000)), 10_000)
    assert loss_leads(baseline, {TEN: units}) is leads


# ------------------------------------------------------------------------------------------------ mode paper


def compressible(number: int) -> UnitProfile:
    """A unit whose compressed form takes half of the memory at risk 1, or at no measured risk for the last."""
    variants = (
        Variant("R", Action.RECOMPUTE, 10, workspace_bytes=100),
        Variant("H", Action.STORE, 110, saved_seconds=1.0),
        Variant("L:mlp=fp8_e4m3:unscaled", Action.COMPRESS, 60, workspace_bytes=50, saved_seconds=0.9, risk=number % 3),
    )
    return UnitProfile(UnitId(f"u{number}"), "class", variants)


def test_the_planner_of_paper_mode() -> None:
    units = tuple(compressible(number) for number in range(1, 7))
    made = RankPlanner(MemoryBudget(BudgetKind.BYTES, 450), Solver.DYNAMIC, SolverLimits(1.0, 0.01))
    made.calibrate(Baseline(160, (PhasePeaks(TEN, 60, 60, 160),), 10**6), {TEN: units})
    try:
        row = made.prepare(TEN, units, reach=7.0)
        assert isinstance(row, PaperPrepared) and row.problem.linear_risk
        prepared = {unit for unit, action in row.plan.actions.items() if action is Action.COMPRESS}
        assert prepared and not prepared & {UnitId("u3"), UnitId("u6")}, "no measured risk, so no proof of no error"
        plan = made.decide(TEN, row, risk=RiskNow(2.0, dict.fromkeys((unit.unit for unit in units), 1.0)))
        assert plan.solver is Solver.DYNAMIC and 0 < plan.risk <= 2.0
        assert plan.risk == sum(unit.variant(plan.choice[unit.unit]).risk for unit in units)
        assert made.decide(TEN, row).risk == 0
        assert made.wait(0.0), "nothing is solved in the background"
    finally:
        made.close()
