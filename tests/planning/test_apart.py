"""The child process: answers like the function itself, imports little, leaves no file, and breaks aloud."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hilore.core.errors import PlanError
from ds_hilore.core.types import Action, Plan
from ds_hilore.planning.apart import apart, plain_data
from ds_hilore.planning.frontier import Frontier, first_frontier
from ds_hilore.planning.refine import frontier_apart, refine, refine_apart
from tests.planning.planning_problems import decoder


def whereabouts() -> tuple[int, bool]:
    print("a print does not spoil the answer")
    os.write(sys.stdout.fileno(), b"nor does a write by C code\n")
    return os.getpid(), "torch" in sys.modules


def breaks(word: str) -> None:
    raise ZeroDivisionError(word)


def test_it_is_another_process_without_torch() -> None:
    pid, torch_there = apart(whereabouts)
    assert pid != os.getpid()
    assert not torch_there


def test_what_broke_is_told() -> None:
    with pytest.raises(PlanError, match="ended with 1 and said: ZeroDivisionError: by nothing"):
        apart(breaks, "by nothing")


def test_a_child_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(PlanError, match="no child process"):
        apart(breaks, "never")


def test_frontiers_are_those_of_this_process_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = decoder(10, 3, noise=0.05, risk_budget=0.01)
    first = first_frontier(problem)
    assert isinstance(first, Frontier)
    here = refine(first)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert refine_apart(first) == frontier_apart(problem) == here
    assert list(tmp_path.iterdir()) == []


class Called:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


#: By protocol 0: a name with dots in it, through a module that the planner has imported.
DOTTED = b"cds_hilore.planning.apart\nos.system\n(S'true'\ntR."


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps(Called(os.system, "touch planted")),
        pickle.dumps(Called(eval, "open('planted', 'w')")),
        pickle.dumps(Called(apart, os.getcwd)),
        pickle.dumps(Path("planted")),
        pickle.dumps(PlanError),
        DOTTED,
        DOTTED.replace(b"os.system", b"subprocess"),
        b"nonsense",
        b"",
    ],
)
def test_only_records_of_the_planner_can_travel(
    pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="no plain data"):
        plain_data(pickled)
    assert list(tmp_path.iterdir()) == []


def test_records_travel_as_they_are() -> None:
    sent = {"plan": Plan(saved_seconds=0.5, peak_bytes=3), "action": Action.STORE, "more": [(1, None, float("inf"))]}
    assert plain_data(pickle.dumps(sent)) == sent
