"""The programme as a citizen: limits, silence, files, and solvers that break or lie."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pulp
import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Plan, Solver
from ds_hilore.planning import program
from ds_hilore.planning.greedy import greedy
from ds_hilore.planning.problem import Infeasible, check
from ds_hilore.planning.program import SolverLimits, solve
from tests.planning.planning_problems import decoder

HARD = {"units": 80, "variants": 5, "noise": 0.03, "risk_budget": 0.02, "share": 0.3}


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_time_limit_gives_a_feasible_plan(solver: str) -> None:
    problem = decoder(**HARD)
    plan = solve(problem, SolverLimits(time_limit_s=1.0, relative_gap=0.0, solver=solver))
    fallback = greedy(problem)
    assert isinstance(plan, Plan) and isinstance(fallback, Plan)
    check(problem, plan)
    assert plan.saved_seconds >= fallback.saved_seconds
    assert plan.bound_seconds is None or plan.bound_seconds >= plan.saved_seconds


def test_a_gap_is_certified() -> None:
    plan = solve(decoder(**HARD), SolverLimits(relative_gap=0.02))
    assert isinstance(plan, Plan) and plan.bound_seconds is not None
    assert plan.saved_seconds <= plan.bound_seconds <= plan.saved_seconds / (1 - 0.02) + 1e-9


def test_cbc_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []
    original = pulp.COIN_CMD.create_tmp_files

    def noted(self: pulp.COIN_CMD, name: str, *kinds: str) -> list[str]:
        files = list(original(self, name, *kinds))
        used.extend(Path(file) for file in files)
        return files

    monkeypatch.setattr(pulp.COIN_CMD, "create_tmp_files", noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plan = solve(decoder(12, 3, risk_budget=0.01), SolverLimits(solver="cbc"))
    assert isinstance(plan, Plan)
    assert used and all(tmp_path in file.parents and file.parent != tmp_path for file in used)
    assert list(tmp_path.iterdir()) == []


def test_highs_makes_no_file_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.chdir(tmp_path)
    plan = solve(decoder(8, 3, noise=0.05, risk_budget=0.01), SolverLimits(relative_gap=0.0))
    assert isinstance(plan, Plan)
    assert plan.bound_seconds == pytest.approx(plan.saved_seconds)  # HiGHS proved it, nobody stood in
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_solvers_are_silent(solver: str) -> None:
    code = (
        "from ds_hilore.planning.program import SolverLimits, solve\n"
        "from tests.planning.planning_problems import decoder\n"
        f"solve(decoder(12, 3, noise=0.05, risk_budget=0.01), SolverLimits(solver={solver!r}))\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_other_solver_stands_in(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(program, "_run_highs", _broken)
    plan = solve(decoder(8, 3, noise=0.05, risk_budget=0.01), SolverLimits(relative_gap=0.0))
    assert isinstance(plan, Plan)
    assert plan.bound_seconds is not None
    assert plan.solver is Solver.CBC
    assert "highs failed: OSError: no licence" in caplog.text


def test_greedy_stands_in_when_both_break(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(program, "_run_highs", _broken)
    monkeypatch.setattr(program, "_run_cbc", _broken)
    problem = decoder(8, 3, noise=0.05, risk_budget=0.01)
    assert solve(problem) == greedy(problem)
    assert "cbc failed" in caplog.text
    tight = replace(problem, budget_bytes=1)
    assert isinstance(solve(tight), Infeasible)


def test_a_lying_solver_is_repaired(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A solver that calls all-H optimal where it does not fit."""

    def lies(model: pulp.LpProblem, limits: SolverLimits) -> float:
        for variable in model.variables():
            variable.varValue = variable.upBound if variable.name.endswith("_0") else 0
        model.assignStatus(pulp.LpStatusOptimal)
        return 1e9

    monkeypatch.setattr(program, "_run_highs", lies)
    problem = decoder(8, 2, noise=0.05)
    plan = solve(problem)
    assert isinstance(plan, Plan)
    check(problem, plan)
    assert plan.solver is Solver.GREEDY
    assert plan.bound_seconds is None
    assert "does not hold" in caplog.text


def test_a_solver_that_denies_what_fits_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denies(model: pulp.LpProblem, limits: SolverLimits) -> None:
        model.assignStatus(pulp.LpStatusInfeasible)

    monkeypatch.setattr(program, "_run_highs", denies)
    problem = decoder(6, 2, noise=0.05)
    with caplog.at_level(logging.WARNING):
        plan = solve(problem, SolverLimits(relative_gap=0.0))
    assert isinstance(plan, Plan)
    assert plan.solver in (Solver.CBC, Solver.GREEDY)
    assert plan.bound_seconds is not None
    assert "highs says that no plan fits, but one is known" in caplog.text


def test_an_empty_answer_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """PuLP reports "optimal" for a HiGHS that ran out of time without a solution: counts do not add up."""

    def empty(model: pulp.LpProblem, limits: SolverLimits) -> None:
        for variable in model.variables():
            variable.varValue = 0
        model.assignStatus(pulp.LpStatusOptimal)

    monkeypatch.setattr(program, "_run_highs", empty)
    problem = decoder(6, 2, noise=0.05)
    assert solve(problem) == greedy(problem)


@pytest.mark.parametrize(
    ("limits", "text"),
    [({"time_limit_s": 0}, "time_limit_s"), ({"relative_gap": 1.0}, "relative_gap"), ({"solver": "scip"}, "solver")],
)
def test_limits_are_checked(limits: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        SolverLimits(**limits)


def _broken(model: pulp.LpProblem, limits: SolverLimits) -> float:
    raise OSError("no licence")
