"""Commands make engines in the process of the tests, and what DeepSpeed changes in torch for good would stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torchs_own_linear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed's ZeRO-3 puts a function that saves other tensors in place of `torch.nn.functional.linear`.

    Source: `InsertPostInitMethodToModuleSubClasses` in deepspeed/runtime/zero/partition_parameters.py.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # given back afterwards
    yield
