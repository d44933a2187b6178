"""Torch and Triton twins give the same codes and scales bit for bit (rule C7).

On the CPU by Triton's interpreter, in a process of its own, as it is switched on when triton is imported. Natively:
tests/gpu/test_codecs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.codecs import twins

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("triton", reason="triton is not installed: pip install 'ds_hilore[triton]'")


@pytest.fixture(scope="module")
def compared() -> dict[str, str | None]:
    """Case and input -> what differs."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codecs.twins", "cpu"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [name for name, *_ in twins.cases()])
def test_twins_agree(name: str, compared: dict[str, str | None]) -> None:
    mine = {case: wrong for case, wrong in compared.items() if case.startswith(f"{name} ")}
    assert len(mine) == 25
    assert not {case: wrong for case, wrong in mine.items() if wrong is not None}
