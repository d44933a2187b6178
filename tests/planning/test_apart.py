"""The child process: answers like the function itself, imports little, leaves no file, and breaks aloud."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from ds_hilore.core.errors import PlanError
from ds_hilore.planning.apart import apart
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
