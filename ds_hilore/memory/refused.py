"""Allocation failures on any device, told from every other exception, with the bytes that could not be had."""

from __future__ import annotations

import re

import torch

from ds_hilore.core.errors import HiLoReError

#: Other libraries' words (cuBLAS, cuDNN, the CUDA runtime, torch on CPU); torch's caching allocators have a type.
_WORDS = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")
_ASKED = re.compile(r"allocate\s+([0-9]+(?:\.[0-9]+)?)\s*(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def refused_bytes(error: BaseException) -> int | None:
    """What an allocation asked for in vain; 0 where the failure does not say.

    Returns:
        None where the exception is something else, an error of this package among others.
    """
    if isinstance(error, HiLoReError) or not isinstance(error, MemoryError | RuntimeError):
        return None
    text = str(error)
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not known and not any(word in text for word in _WORDS):
        return None
    asked = _ASKED.search(text)
    return 0 if asked is None else int(float(asked[1]) * _UNITS[asked[2]])
