"""A function of this package in a process of its own, which shares no interpreter lock with training.

The child is a fresh interpreter that imports what unpickling its question needs (no torch, no host, never the job's
own script), runs at low priority, answers on its standard output and ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ds_hilore.core.errors import PlanError

_Result = TypeVar("_Result")
_NICE = 10


def apart(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Gives `function(*arguments)`, computed in a child process; waiting for it holds no lock.

    Args:
        function: a function of an importable module.
        arguments: plain data that can be pickled.

    Raises:
        PlanError: the child could not start or broke; the end of what it said is in the message.
    """
    # the child finds this package where this process found it
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    question = pickle.dumps((function, arguments))
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__], input=question, capture_output=True, env=environment, check=False
        )
    except OSError as error:
        raise PlanError(f"planning apart: no child process ({error})") from error
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise PlanError(f"planning apart: the child ended with {child.returncode} and said: {said[0]}")
    answer: _Result = pickle.loads(child.stdout)
    return answer


def _answer() -> None:
    with contextlib.suppress(AttributeError, OSError):  # Windows has no nice, and some systems forbid it
        os.nice(_NICE)
    # what anything prints goes to standard error: the answer has the pipe for itself
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        function, arguments = pickle.load(sys.stdin.buffer)
        pickle.dump(function(*arguments), pipe)


if __name__ == "__main__":
    _answer()
