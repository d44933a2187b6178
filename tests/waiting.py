"""A context in which nothing may wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result, or whose shape, the host must know: on CUDA each waits for the device.
WAITING = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "_unique2",
    }
)

#: Operations that take a list of indices; a mask among them is searched for what is true.
BY_INDICES = frozenset({"index", "index_put", "index_put_"})


class _ByName(TorchDispatchMode):
    """On the CPU nothing waits; what would wait on a device is recognised by its name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            raise AssertionError(f"{name} waits for the device")
        if name in BY_INDICES and any(getattr(i, "dtype", None) is torch.bool for i in args[1]):
            raise AssertionError("an index by a mask waits for the device")
        return func(*args, **(kwargs or {}))


def _refuse(tensor: Tensor, *_: Any) -> None:
    raise AssertionError("reading a value waits for the device")


@contextmanager
def no_waiting(device: torch.device, values: bool = False) -> Iterator[None]:
    """On the CPU an AssertionError, on CUDA torch's RuntimeError, if anything waits.

    Args:
        values: on the CPU, reading a tensor by `item`, `tolist` or `numpy` counts too. Not where the code under test
            reads tensors that were brought to the host for that.
    """
    if device.type == "cpu":
        with ExitStack() as stack:
            stack.enter_context(_ByName())
            # on the CPU some of these read memory without an operation
            for method in ("item", "tolist", "numpy") if values else ():
                stack.enter_context(patch.object(Tensor, method, _refuse))
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
