"""Processes that a command starts to do its work in."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

#: What hosts print is no answer: where a process's stdout goes.
STDERR = 2


def worker_environment(left_out: Container[str]) -> dict[str, str]:
    """This process's variables but for those left out, for one that runs the package of this one, installed or not."""
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    ours = str(Path(__file__).parents[2])
    return {**kept, "PYTHONPATH": os.pathsep.join([ours, *filter(None, [kept.get("PYTHONPATH")])])}
