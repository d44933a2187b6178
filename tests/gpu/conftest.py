"""Tests of a real device. Every body also runs on the CPU, so that it is known to work before it meets a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read by cuBLAS when CUDA starts: without it matrix products are not the same bits from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device in turn; on CUDA with the deterministic kernels of operations that have two."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is false here")
    torch.use_deterministic_algorithms(request.param == "cuda", warn_only=True)
    yield torch.device(request.param)
    torch.use_deterministic_algorithms(False)
