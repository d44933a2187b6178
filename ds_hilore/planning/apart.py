"""A function of this package in a process of its own, which shares no interpreter lock with training.

The child is a fresh interpreter that imports what its question needs (no torch, no host, never the job's own script),
runs at low priority, answers on its standard output and ends. Questions and answers are pickles, since those keep what
many plans share as one object and are read without Python; but pickles that can hold records of the planner only:
nothing else is imported or called by reading one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, TypeVar

from ds_hilore.core.errors import PlanError

_Result = TypeVar("_Result")
_NICE = 10
#: Rooms whose records may travel.
_ROOMS = ("ds_hilore.core.", "ds_hilore.planning.")


def apart(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Gives `function(*arguments)`, computed in a child process; waiting for it holds no lock.

    Args:
        function: a function of an importable module.
        arguments: plain data: records of `core` and `planning`, containers and numbers. So is the result.

    Raises:
        PlanError: the child could not start or broke; the end of what it said is in the message. Or what it said is no
            plain data.
    """
    # the child finds this package where this process found it
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, function.__module__, function.__name__]
    try:
        child = subprocess.run(
            command, input=pickle.dumps(arguments), capture_output=True, env=environment, check=False
        )
    except OSError as error:
        raise PlanError(f"planning apart: no child process ({error})") from error
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise PlanError(f"planning apart: the child ended with {child.returncode} and said: {said[0]}")
    answer: _Result = plain_data(child.stdout)
    return answer


def plain_data(pickled: bytes) -> Any:
    """What a pickle holds, if it is made of records of the planner, containers and numbers.

    Raises:
        PlanError: it is damaged, or names anything else.
    """
    try:
        return _Records(io.BytesIO(pickled)).load()
    except Exception as error:  # whatever bytes that are no pickle lead to
        raise PlanError(f"planning apart: this is no plain data ({type(error).__name__}: {error})") from error


class _Records(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = getattr(importlib.import_module(module_name), global_name) if module_name.startswith(_ROOMS) else None
        if not _is_record(found) or found.__module__ != module_name:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no record of the planner")
        return found


def _is_record(found: Any) -> bool:
    """Whether it is a dataclass, an enumeration or a named tuple: making one runs nothing else."""
    if not isinstance(found, type):
        return False
    return is_dataclass(found) or issubclass(found, Enum) or (issubclass(found, tuple) and hasattr(found, "_fields"))


def _answer() -> None:
    with contextlib.suppress(AttributeError, OSError):  # Windows has no nice, and some systems forbid it
        os.nice(_NICE)
    # what anything prints goes to standard error: the answer has the pipe for itself
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        module, name = sys.argv[1:]
        function = getattr(importlib.import_module(module), name)
        pickle.dump(function(*plain_data(sys.stdin.buffer.read())), pipe)


if __name__ == "__main__":
    _answer()
