"""Commands make engines in the process of the tests, and what they and DeepSpeed change for good would stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch


@pytest.fixture(autouse=True)
def torchs_own_linear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed's ZeRO-3 puts a function that saves other tensors in place of `torch.nn.functional.linear`.

    Source: `InsertPostInitMethodToModuleSubClasses` in deepspeed/runtime/zero/partition_parameters.py.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # given back afterwards
    yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A job of one rank sets what a launcher would: processes of later tests would look for its port."""
    with patch.dict(os.environ):
        yield
