"""The rows of NOTE [Memory rows], counted by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hilore.core.errors import PlanError, UsageError
from ds_hilore.core.types import Action, Place, Plan, Solver, UnitId, Variant
from ds_hilore.planning.problem import Problem, Row, check, evaluate, make_plan
from tests.planning.planning_problems import replayed, stored, unit, unit_id


def compressed(held: int = 4, workspace: int = 8, risk: float = 0.01, forward: int = 5) -> Variant:
    return Variant("L", Action.COMPRESS, held, workspace, forward, 0.8, 0.2, risk)


@pytest.fixture
def problem() -> Problem:
    """Three units: H holds 10 (+2 in backward), L 4 (+8), R 1 (+11); gradients of 3 a unit."""
    units = tuple(unit(i, stored(10, 1.0, 2), compressed(), replayed(1, 11), grad_bytes=3) for i in range(3))
    return Problem(
        units,
        budget_bytes=1000,
        base_forward_bytes=100,
        base_loss_bytes=107,
        base_backward_bytes=101,
        conversion_bytes=6,
        risk_budget=0.02,
    )


def chosen(names: str) -> dict[UnitId, str]:
    return {unit_id(position): name for position, name in enumerate(names)}


def peak(problem: Problem, names: str, row: Row) -> tuple[int, UnitId | None]:
    found = next(peak for peak in evaluate(problem, chosen(names)).peaks if peak.row is row)
    return found.bytes, found.unit


@pytest.mark.parametrize(
    ("names", "forward", "loss", "backward"),
    [
        # M1: 100 + held up to u + transient; M2: 107 + held; M3: 101 + held up to u + workspace + gradients from u
        ("RRR", (103, 2), 110, (101 + 1 + 11 + 9, 0)),
        ("HHH", (130, 2), 137, (101 + 30 + 2 + 3, 2)),
        ("RRH", (112, 2), 119, (101 + 1 + 11 + 9, 0)),
        ("HRR", (112, 2), 119, (101 + 11 + 11 + 6, 1)),
        ("HHL", (100 + 24 + 5, 2), 131, (101 + 24 + 8 + 3, 2)),
    ],
)
def test_rows_before_forward(
    problem: Problem, names: str, forward: tuple[int, int], loss: int, backward: tuple[int, int]
) -> None:
    assert peak(problem, names, Row.FORWARD) == (forward[0], unit_id(forward[1]))
    assert peak(problem, names, Row.LOSS) == (loss, None)
    assert peak(problem, names, Row.BACKWARD) == (backward[0], unit_id(backward[1]))


@pytest.mark.parametrize("names", ["RRR", "HHH", "RRH", "HRR", "HHL"])
def test_microbatches_in_flight_hold_all_they_keep_in_every_row(problem: Problem, names: str) -> None:
    held = sum({"R": 1, "H": 10, "L": 4}[name] for name in names)
    three = replace(problem, in_flight=3)
    for row in (Row.FORWARD, Row.LOSS, Row.BACKWARD):
        alone, where = peak(problem, names, row)
        assert peak(three, names, row) == (alone + 2 * held, where)


def test_after_forward_what_others_hold_is_part_of_the_base(problem: Problem) -> None:
    prepared = chosen("HLR")
    second = replace(problem, in_flight=3).after_forward(prepared)
    assert (second.in_flight, second.base_backward_bytes) == (1, 101 + 2 * (10 + 4 + 1))
    # whatever becomes of this microbatch, the others keep what they were prepared with
    alone = problem.after_forward(prepared)
    for names in ("HLR", "RRR"):
        assert peak(second, names, Row.BACKWARD)[0] == peak(alone, names, Row.BACKWARD)[0] + 30


def test_compressed_is_charged_the_replay_that_risk_may_force(problem: Problem) -> None:
    units = tuple(replace(u, variants=(compressed(held=2, workspace=0), replayed(4, 40))) for u in problem.units)
    reserved = replace(problem, units=units)
    # held in later units' backward: max(2, 4); in its own: max(2, 4 + 40)
    assert peak(reserved, "LLL", Row.BACKWARD) == (101 + 4 + 4 + 44 + 3, unit_id(2))
    settled = reserved.after_forward(chosen("LLL"))
    assert peak(settled, "LLL", Row.BACKWARD) == (101 + 2 + 9, unit_id(0))
    assert peak(settled, "LLR", Row.BACKWARD) == (101 + 2 + 2 + 44 + 3, unit_id(2))


def test_after_forward_has_no_forward_and_loss_rows(problem: Problem) -> None:
    rows = {peak.row for peak in evaluate(problem.after_forward(chosen("HHH")), chosen("HHR")).peaks}
    assert rows == {Row.BACKWARD}


def test_conversion_happens_after_drops_with_the_rest_still_as_prepared(problem: Problem) -> None:
    after = problem.after_forward(chosen("HHH"))
    assert peak(after, "HLR", Row.CONVERSION) == (101 + 10 + 10 + 1 + 6, None)
    assert peak(after, "HLL", Row.CONVERSION) == (101 + 30 + 6, None)


def test_encoding_is_charged_before_forward_and_for_conversions_only(problem: Problem) -> None:
    assert evaluate(problem, chosen("HLR")).saved_seconds == pytest.approx(1.6)
    assert evaluate(problem.after_forward(chosen("HLR")), chosen("HLR")).saved_seconds == pytest.approx(1.8)
    assert evaluate(problem.after_forward(chosen("HHR")), chosen("HLR")).saved_seconds == pytest.approx(1.6)


def test_risk_adds_in_squares_and_linearly_in_paper_mode(problem: Problem) -> None:
    exposed = replace(problem, exposures={unit_id(0): 1.0, unit_id(1): 1.0, unit_id(2): 2.0})
    evaluation = evaluate(exposed, chosen("LLL"))
    assert evaluation.risk == pytest.approx(0.01 * 6**0.5)
    assert [violation.row for violation in evaluation.violations] == [Row.RISK]
    assert evaluate(exposed, chosen("RRL")).feasible  # exactly at the budget
    linear = evaluate(replace(exposed, linear_risk=True), chosen("LLL"))
    assert linear.risk == pytest.approx(0.04)
    assert evaluate(replace(problem, risk_budget=0.0), chosen("RRL")).violations[0].row is Row.RISK


def test_infinite_exposure_forbids_compression_only(problem: Problem) -> None:
    exposed = replace(problem, exposures={unit_id(0): float("inf")})
    assert evaluate(exposed, chosen("HRR")).feasible
    assert not evaluate(exposed, chosen("LRR")).feasible


def test_host_bytes_have_their_own_budget(problem: Problem) -> None:
    units = (*problem.units[:2], unit(2, stored(50, 1.0, name="O", place=Place.HOST), replayed(1)))
    with_host = replace(problem, units=units, host_budget_bytes=49)
    evaluation = evaluate(with_host, chosen("RRO"))
    assert evaluation.host_bytes == 50
    assert next(p.bytes for p in evaluation.peaks if p.row is Row.LOSS) == 107 + 2
    assert [(v.row, v.excess) for v in evaluation.violations] == [(Row.HOST, 1)]
    assert evaluate(replace(with_host, host_budget_bytes=50), chosen("RRO")).feasible


@pytest.mark.parametrize(
    ("prepared", "possible"),
    [("HHH", {"H", "L", "R"}), ("LLL", {"L", "R"}), ("RRR", {"R"})],
)
def test_lattice(problem: Problem, prepared: str, possible: set[str]) -> None:
    after = problem.after_forward(chosen(prepared))
    assert {option.name for option in after.options[0]} == possible
    for name in {"H", "L", "R"} - possible:
        violation = evaluate(after, {unit_id(1): name}).violations[0]
        assert (violation.row, violation.unit) == (Row.LATTICE, unit_id(1))


def test_a_unit_that_was_not_prepared_is_replayed(problem: Problem) -> None:
    after = problem.after_forward({unit_id(0): "H"})
    assert [len(options) for options in after.options] == [3, 1, 1]


def test_allowed_narrows_the_lattice(problem: Problem) -> None:
    narrowed = replace(problem, allowed={unit_id(0): ("R", "L")}).after_forward(chosen("HHH"))
    assert [option.name for option in narrowed.options[0]] == ["L", "R"]


@pytest.mark.parametrize(
    ("names", "budget", "text"),
    [
        ("HHH", 136, "loss row: 137 bytes, 1 over the budget of 136"),
        ("HHL", 135, r"backward row at unit layers.2: 136 bytes, 1 over the budget of 135"),
        ("RRR", 100, r"forward row at unit layers.2: 103 bytes, 3 over .* \(and 2 more rows\)"),
    ],
)
def test_check_names_row_unit_and_bytes(problem: Problem, names: str, budget: int, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make_plan(replace(problem, budget_bytes=budget), chosen(names), Solver.FIXED)


def test_check_refuses_foreign_units_and_wrong_actions(problem: Problem) -> None:
    with pytest.raises(PlanError, match="unit other is in the plan but not in the problem"):
        check(problem, Plan(choice={UnitId("other"): "R"}))
    with pytest.raises(PlanError, match=r"layers.0: plan says Action.RECOMPUTE, its variant is Action.STORE"):
        check(problem, Plan(choice={unit_id(0): "H"}))
    with pytest.raises(PlanError, match=r"unit layers.0 cannot become 'X' here; possible: \['H', 'L', 'R'\]"):
        check(problem, Plan(choice={unit_id(0): "X"}))


def test_a_plan_says_what_it_promises(problem: Problem) -> None:
    plan = make_plan(problem, {unit_id(2): "H"}, Solver.FIXED, bound_seconds=0.5)
    assert dict(plan.choice) == chosen("RRH")
    assert plan.count(Action.STORE) == 1
    assert (plan.saved_seconds, plan.peak_bytes, plan.risk) == (1.0, 122, 0.0)
    assert plan.bound_seconds == 1.0  # a bound below the plan itself is the solver's rounding


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"units": ()}, "at least one unit"),
        ({"units": (unit(0, replayed(1)), unit(0, replayed(1)))}, "appears twice"),
        ({"units": (unit(0, stored(1, 1.0)),)}, "no variant 'R'"),
        ({"units": (unit(0, replayed(1), replayed(2)),)}, "two variants of one name"),
        ({"units": (unit(0, replayed(-1)),)}, "bytes must be >= 0"),
        ({"units": (unit(0, replayed(1), stored(1, float("nan"))),)}, "seconds must be finite"),
        ({"units": (unit(0, Variant("R", Action.RECOMPUTE, 1, risk=0.1)),)}, "exact, so its risk must be 0"),
        ({"exposures": {unit_id(0): float("nan")}}, "exposure of unit layers.0"),
        ({"exposures": {UnitId("x"): 1.0}}, "exposures names units that are not in the problem"),
        ({"risk_budget": -0.1}, "risk_budget"),
        ({"allowed": {unit_id(0): ("Q",)}}, "no variants"),
        ({"allowed": {unit_id(0): ()}}, "no variant left"),
        ({"prepared": chosen("XRR")}, "no variants"),
        ({"in_flight": 0}, "in_flight = 0"),
        ({"in_flight": 2, "prepared": chosen("RRR")}, "after forward 1"),
        ({"allowed": {unit_id(0): ("H",)}, "prepared": chosen("RRR")}, "no variant left"),
    ],
)
def test_problems_that_are_none(problem: Problem, changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        replace(problem, **changes)
