"""`hilore doctor`: exit code and words, on a machine that is fit and on one that is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds_hilore.cli.main import main
from ds_hilore.core import deps
from ds_hilore.core.limits import known_limits


def test_a_fit_machine_gives_zero_and_names_packages_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for floor in deps.REQUIRED:
        assert floor.package in printed
    assert "everything needed is there" in printed
    assert "DeepCompile" in printed and "no_sync" in printed


def test_an_old_package_gives_one_and_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = deps.installed_version
    monkeypatch.setattr(deps, "installed_version", lambda name: "0.18.2" if name == "deepspeed" else real(name))
    assert main(["doctor"]) == 1
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "deepspeed 0.18.2 is older" in printed and "cannot run here" in printed


def test_a_missing_optional_part_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deps, "has", lambda module: False)
    assert main(["doctor"]) == 0
    assert "ds_hilore[mpi]" in capsys.readouterr().out


def test_it_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_hilore.cli.main", "doctor"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_limit_says_what_to_do_instead() -> None:
    limits = known_limits()
    assert len({limit.what for limit in limits}) == len(limits)
    assert all(limit.way_out for limit in limits)
