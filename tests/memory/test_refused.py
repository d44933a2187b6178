"""Allocation failures are told from everything else, with the bytes that were asked for."""

from __future__ import annotations

import pytest
import torch

from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.memory.refused import refused_bytes

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), 5 << 29),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 << 20),
        (torch.OutOfMemoryError("words of another version"), 0),
        (MemoryError(), 0),
        (MemoryError("Unable to allocate 1.00 KiB for an array"), 1024),
        (RuntimeError("CUDA error: out of memory"), 0),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 0),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), None),
        (ValueError("out of memory"), None),
        (MemoryExhausted(f"said already: {CUDA}"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_an_exception_means(error: BaseException, asked: int | None) -> None:
    assert refused_bytes(error) == asked


def test_torchs_own_words_on_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert refused_bytes(caught.value) == 1 << 50
