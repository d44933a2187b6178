"""Values that stand for saved tensors (recovery/bundle.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hilore.core.errors import StateChanged
from ds_hilore.recovery.bundle import (
    Derived,
    Geometry,
    Kept,
    ParameterRef,
    kept_tensors,
    parameter_of,
    peek,
    same_bits,
    storages,
)


class Counted:
    """An operation that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *operands: Tensor) -> Tensor:
        self.calls += 1
        return sum(operands, torch.zeros(1))


def test_r6_a_kept_tensor_is_a_detached_alias_whose_edits_are_seen() -> None:
    source = torch.ones(3, requires_grad=True) * 1
    kept = Kept(source, 0)
    assert not kept.get().requires_grad and kept.get().data_ptr() == source.data_ptr()
    source.detach().view(1, 3)[0, :1].mul_(2)  # through any alias
    with pytest.raises(StateChanged, match=r"shape \(3,\).*version 0, now 1"):
        kept.get()


def test_a_derived_value_is_made_once_for_all_its_uses_and_then_let_go() -> None:
    operation = Counted()
    derived = Derived(operation, (Kept(torch.ones(3), 0),), 1)
    derived.uses = 3
    first, second = derived.get(), derived.get()
    assert first is second and operation.calls == 1
    assert derived.get() is first and derived.memo is None
    assert derived.get() is not first, "after its last use it is made anew (retain_graph)"


def test_a_derived_operand_counts_its_parents_as_uses() -> None:
    inner = Counted()
    shared = Derived(inner, (Kept(torch.ones(3), 0),), 1)
    parents = [Derived(Counted(), (shared,), 2) for _ in range(2)]
    assert shared.uses == 2
    for parent in parents:
        parent.get()
    assert inner.calls == 1 and shared.memo is None


def test_a_use_that_never_comes_only_keeps_the_memo() -> None:
    """A node that backward does not reach: while its handle lives, so does what it would need; values are right."""
    derived = Derived(Counted(), (Kept(torch.ones(3), 0),), 1)
    derived.uses = 2
    assert derived.get() is derived.memo


def test_peek_leaves_no_trace() -> None:
    shared = Derived(Counted(), (Kept(torch.ones(3), 0),), 1)
    value = Derived(Counted(), (shared, shared), 2)
    value.uses = 2
    assert torch.equal(peek(value), torch.full((3,), 2.0))
    assert (value.uses, shared.uses, value.memo, shared.memo) == (2, 2, None, None)


def test_a_derived_value_takes_the_strides_of_what_it_stands_for() -> None:
    source = torch.arange(6.0).view(2, 3)
    derived = Derived(lambda tensor: tensor.t(), (Kept(source, 0),), 1)
    derived.stride = (2, 1)
    assert derived.get().stride() == (2, 1) and torch.equal(derived.get(), source.t())


def test_an_autocast_around_backward_does_not_touch_a_recipe() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    expected = torch.matmul(a, b)
    derived = Derived(torch.matmul, (Kept(a, 0), Kept(b, 0)), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.matmul(a, b).dtype is torch.bfloat16
        assert same_bits(derived.get(), expected)


def test_r5_a_parameter_is_rebound_to_the_storage_it_has_at_unpack() -> None:
    """What ZeRO-3 does between forward and backward: gathered, partitioned, gathered again elsewhere."""
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    whole, view = ParameterRef(parameter, parameter), ParameterRef(parameter, parameter.t()[1:])
    values = parameter.detach().clone()
    parameter.data = torch.empty(0)
    parameter.data = values
    assert whole.get() is parameter
    assert view.get().data_ptr() == values.data_ptr() + 4 and torch.equal(view.get(), values.t()[1:])
    with torch.no_grad():
        parameter.add_(1)
    for reference in (whole, view):
        with pytest.raises(StateChanged, match=r"parameter of shape \(2, 3\)"):
            reference.get()


def test_views_of_parameters_are_recognised() -> None:
    parameter, tensor = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4, requires_grad=True)
    assert parameter_of(parameter) is parameter
    assert parameter_of(parameter.t()[1:].unsqueeze(0)) is parameter
    assert parameter_of(tensor.t()) is None
    assert parameter_of(parameter * 1) is None


@given(data=st.data())
def test_geometry_gives_the_view_again_on_a_base_elsewhere(data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    big = torch.arange(7 + torch.Size(dims).numel())
    base = big[7:].view(dims)
    view = base
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        kind = data.draw(st.sampled_from(["slice", "transpose", "select", "unsqueeze", "expand"]))
        if kind == "slice":
            start = data.draw(st.integers(0, size - 1))
            view = view[(slice(None),) * dim + (slice(start, None, data.draw(st.integers(1, 2))),)]
        elif kind == "transpose":
            view = view.transpose(dim, 0)
        elif kind == "select" and view.dim() > 1:
            view = view.select(dim, size - 1)
        elif kind == "unsqueeze":
            view = view.unsqueeze(dim)
        elif size == 1:
            view = view.expand(*view.shape[:dim], 2, *view.shape[dim + 1 :])
    geometry = Geometry.of(view, base)
    again = geometry.apply(base.clone())
    assert torch.equal(again, view) and again.stride() == view.stride()


def test_bytes_are_counted_by_storage() -> None:
    base = torch.zeros(1000)
    found = storages([base[:10], base[500:], base.view(10, 100), torch.zeros(3)])
    assert sorted(found.values()) == [12, 4000]


def test_kept_tensors_are_found_below_derivations_parameters_left_out() -> None:
    kept = [Kept(torch.zeros(2), 0) for _ in range(3)]
    parameter = nn.Parameter(torch.zeros(2))
    value = Derived(Counted(), (kept[0], Derived(Counted(), (kept[1], ParameterRef(parameter, parameter)), 1)), 2)
    found = list(kept_tensors([value, None, kept[2]]))
    assert {id(tensor) for tensor in found} == {id(one.tensor) for one in kept}


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([float("inf")]), torch.tensor([float("nan")]), False),
    ],
)
def test_bits_are_compared_with_shape_and_dtype(left: Tensor, right: Tensor, equal: bool) -> None:
    assert same_bits(left, right) is equal
