"""The planner's benchmark: its judge agrees with brute force, and what it reports is what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner import KINDS, Record, main, missed, optimum, percentile, stack
from ds_hilore.core.types import Plan
from ds_hilore.planning.brute_force import brute_force
from ds_hilore.planning.program import SolverLimits, solve


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("risk_budget", [0.0, 0.006, 0.1])
def test_the_judge_is_brute_force_where_that_is_possible(kind: str, risk_budget: float) -> None:
    problem = replace(stack(6, 4, kind), risk_budget=risk_budget)
    truth, found = brute_force(problem), optimum(problem, 30)
    assert isinstance(truth, Plan) and found is not None
    assert found[0] == pytest.approx(truth.saved_seconds, rel=1e-6)
    assert found[1] == pytest.approx(truth.saved_seconds, rel=1e-3)


def test_the_judge_agrees_with_the_programme_on_more_units() -> None:
    problem = replace(stack(16, 3, "alike"), risk_budget=0.012)
    plan, found = solve(problem, SolverLimits(relative_gap=0.0)), optimum(problem, 30)
    assert isinstance(plan, Plan) and found is not None
    assert found[0] == pytest.approx(plan.saved_seconds, rel=1e-4)


def test_stacks_are_what_they_are_called() -> None:
    alike, unlike = stack(8, 6, "alike"), stack(8, 6, "unlike")
    assert [len(unit.variants) for unit in alike.units] == [6] * 8
    assert len({unit.variant("L0").held_bytes for unit in alike.units}) == 1
    assert len({unit.variant("L0").risk for unit in alike.units}) == 8
    assert len({unit.variant("H").saved_seconds for unit in unlike.units}) == 8
    assert alike == stack(8, 6, "alike")


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([3.0], 99) == 3.0


def test_records_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "planner.json"
    main(["--quick", "--units", "8", "--variants", "3", "--kinds", "alike", "--json", str(file)])
    (found,) = json.loads(file.read_text())["records"]
    record = Record(**found)
    assert (record.units, record.variants, record.kind) == (8, 3, "alike")
    assert record.judged == record.proven >= 2
    assert record.worst_to_optimum is not None and -1e-4 <= record.worst_to_optimum <= 0.011
    assert record.worst_first_to_optimum is not None
    assert record.worst_first_to_optimum >= record.worst_to_optimum - 1e-12
    assert 0 < record.decide_ms_p50 <= record.decide_ms_p99
    assert 0 < record.first_ms_p50 <= record.first_ms_max
    assert "8 x 3 alike" in capsys.readouterr().out


def test_what_is_missed_is_named() -> None:
    numbers: dict[str, object] = dict.fromkeys(Record.__dataclass_fields__, 0)
    record = Record(**(numbers | {"kind": "alike", "units": 36, "variants": 3}))  # type: ignore[arg-type]
    assert missed(record) == []
    slow = replace(record, first_ms_p50=25.0, worst_to_optimum=0.02, decide_ms_p99=3.0)
    assert [line.split(",")[0] for line in missed(slow)] == [
        "36 x 3 alike: first frontier",
        "36 x 3 alike: decision p99",
        "36 x 3 alike: distance to the optimum 0.02",
    ]
