"""Environment of every test: CPU, no network, one thread, fixed seeds; and processes for tests of several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# No test is timed: on a busy machine an example may take any time.
settings.register_profile("untimed", parent=settings(), deadline=None)
settings.load_profile("untimed")

# Set before torch or deepspeed are imported. Tests of a real device (tests/gpu) choose their own accelerator.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

if TYPE_CHECKING:
    from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks, started at first use and kept for the test module."""
    from tests.ranks import RankPool

    with RankPool(world=2) as pool:
        yield pool
