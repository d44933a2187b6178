"""The gradient that a hook is given, whatever else is hooked to the tensor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from ds_hilore.runtime.observe import as_rows, call_with_gradient


@pytest.mark.parametrize("ours_first", [True, False])
def test_hooks_of_the_tensor_come_first(ours_first: bool) -> None:
    """As DeepSpeed's hook on an output of the engine, which divides by the accumulation steps."""
    tensor = torch.ones(3, requires_grad=True) * 2
    seen: list[Tensor] = []
    if ours_first:
        call_with_gradient(tensor, seen.append)
    tensor.register_hook(lambda gradient: gradient / 4)
    if not ours_first:
        call_with_gradient(tensor, seen.append)
    (tensor.sum() + 3 * tensor.sum()).backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones(3))  # whole, and after the division


def test_one_output_of_several() -> None:
    left, right = (torch.ones(4, requires_grad=True) * 1).split(2)
    seen: list[Tensor] = []
    call_with_gradient(right, seen.append)
    (2 * right.sum() + left.sum()).backward(retain_graph=True)
    assert torch.equal(seen.pop(), torch.full((2,), 2.0))
    left.sum().backward()  # none for this one
    assert not seen


def test_leaf() -> None:
    tensor = torch.ones(3, requires_grad=True)
    seen: list[Tensor] = []
    call_with_gradient(tensor, seen.append)
    (5 * tensor).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 5.0))


def test_the_hook_does_not_keep_its_own_graph() -> None:
    class Big:
        def __call__(self, gradient: Tensor) -> None: ...

    receiver = Big()
    gone = weakref.ref(receiver)
    tensor = torch.ones(3, requires_grad=True) * 2
    call_with_gradient(tensor, receiver)
    del receiver
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_as_rows() -> None:
    assert as_rows(None) is None
    assert as_rows(torch.ones(3)).shape == (1, 3)
    assert as_rows(torch.ones(2, 3)).shape == (2, 3)
