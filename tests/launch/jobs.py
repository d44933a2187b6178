"""Runs launch commands for tests, and reads what the ranks of tests/launch/train.py wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.ranks import ENVIRONMENT, ROOT, _free_port

TRAIN = str(ROOT / "tests" / "launch" / "train.py")

#: Longer than the script's own limit, after which it prints the stacks of its threads.
LIMIT_S = 270.0


def environment(**more: str) -> dict[str, str]:
    """As a user's shell would be: no variables of a job that runs already. Launch scripts use this Python as it is."""
    job = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    env = {key: value for key, value in {**os.environ, **ENVIRONMENT}.items() if key not in job}
    python = Path(sys.executable)
    return {
        **env,
        "MASTER_PORT": str(_free_port()),
        "HILORE_VENV": "none",
        "PYTHON": str(python),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def written(folder: Path, name: str, settings: Mapping[str, Any]) -> str:
    """Path of a DeepSpeed JSON with these settings."""
    path = folder / name
    path.write_text(json.dumps(settings), encoding="utf-8")
    return str(path)


def outcome(command: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT) -> tuple[int, str]:
    """Exit status and output of a job.

    Raises:
        AssertionError: it did not end in time; the message is the end of its output.
    """
    job = subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = job.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        output, _ = job.communicate(timeout=20)
        raise AssertionError(f"{command} did not end within {LIMIT_S:.0f} s:\n{output[-12_000:]}") from None
    return job.returncode, output


def run(command: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT) -> str:
    """Output of a job that must end well.

    Raises:
        AssertionError: it failed or took too long; the message is the end of its output.
    """
    code, output = outcome(command, env, cwd)
    assert code == 0, f"{command} ended with {code}:\n{output[-12_000:]}"
    return output


def answers(folder: Path, world: int = 2) -> list[dict[str, Any]]:
    """What the ranks wrote, in rank order."""
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]
