"""What a unit was called with (recovery/inputs.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.errors import StateChanged
from ds_hilore.core.types import Shape
from ds_hilore.recovery.inputs import UnitInputs


def _capture(function: Any, *args: Any, **kwargs: Any) -> UnitInputs:
    return UnitInputs.capture(function, args, kwargs)


def test_a_call_can_be_made_again_from_what_was_kept() -> None:
    def function(*args: Any, **kwargs: Any) -> None: ...

    a, b = torch.ones(2, requires_grad=True), torch.zeros(3)
    note = object()
    inputs = _capture(function, (a, [b, None]), 3, note, mask={"b": b, "name": "x"})
    args, kwargs, tensors = inputs.fresh()
    ((first, (second, nothing)), number, same_note), mask = args, kwargs["mask"]
    assert torch.equal(first, a) and torch.equal(second, b) and torch.equal(mask["b"], b)
    assert nothing is None and number == 3 and same_note is note and mask["name"] == "x"
    assert [tensor.requires_grad for tensor in tensors] == [True, False, False]
    assert first is not a and first.is_leaf and first.data_ptr() == a.data_ptr()
    assert inputs.fresh()[2][0] is not first, "each replay has leaves of its own"


def test_partial_objects_are_undone_and_calls_win_over_them() -> None:
    def function(a: int, b: int, *, c: int = 0, d: int = 0) -> None: ...

    inputs = _capture(partial(partial(function, 1, c=3, d=4), 2, d=5), c=6)
    assert inputs.function is function
    args, kwargs, _ = inputs.fresh()
    assert args == (1, 2) and kwargs == {"c": 6, "d": 5}


def test_shape_is_rows_and_length_in_either_order() -> None:
    class LengthFirst:
        length_first = True

        def __call__(self, hidden: Tensor) -> None: ...

    hidden = torch.ones(5, 3, 2)
    assert _capture(lambda hidden: None, hidden).shape == Shape(5, 3)
    assert _capture(LengthFirst(), hidden).shape == Shape(3, 5)
    assert _capture(LengthFirst(), torch.ones(1, 5, 3, 2)).shape == Shape(5, 3), "no [s, b, h]"


def test_the_module_is_found_however_its_forward_is_called() -> None:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    for call in (
        _capture(module, x),
        _capture(module.forward, x),
        _capture(partial(module.forward, x)),
        _capture(nn.Linear.forward, module, x),
        _capture(partial(nn.Linear.forward, module), x),
    ):
        assert call.module is module
    assert _capture(torch.sin, x).module is None
    assert _capture(lambda: None).module is None


def test_parameters_stay_themselves_and_views_of_them_are_tensors() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    inputs = _capture(lambda *_: None, parameter, parameter.t(), parameter * 2)
    args, _, tensors = inputs.fresh()
    assert args[0] is parameter and len(tensors) == 2
    assert inputs.lent == (parameter,)
    assert inputs.parameter_of(parameter) is parameter
    assert inputs.parameter_of(parameter[1:]) is None
    other = nn.Parameter(torch.ones(2))
    assert inputs.parameter_of(other[:1]) is other


def test_tokens_are_counted_on_the_first_floating_point_input() -> None:
    ids, hidden = torch.zeros(2, 5, dtype=torch.long), torch.zeros(3, 7, 4)
    assert _capture(None, ids, torch.zeros(9), hidden).tokens == 21
    assert _capture(None, ids).tokens == 0


@pytest.mark.parametrize(
    ("size", "shape"),
    [((3, 7, 4), Shape(3, 7)), ((7, 4), Shape(1, 7)), ((2, 3, 7, 4), Shape(6, 7)), ((9,), Shape(0, 0))],
)
def test_rows_are_segments(size: tuple[int, ...], shape: Shape) -> None:
    assert _capture(None, torch.zeros(size)).shape == shape


def test_an_edited_input_is_refused() -> None:
    x = torch.ones(3)
    inputs = _capture(torch.sin, x)
    x[1:].zero_()
    with pytest.raises(StateChanged, match=r"shape \(3,\)"):
        inputs.fresh()


def test_the_device_is_that_of_the_work() -> None:
    """Masks and positions may live on the CPU while the unit computes elsewhere: its random stream is the device's."""
    mask, hidden = torch.zeros(2), torch.zeros(2, 2, device="meta")
    assert _capture(None, mask, hidden).device == torch.device("meta")
    assert _capture(None, mask).device == torch.device("cpu")
    assert _capture(nn.Linear(2, 2, device="meta"), mask).device == torch.device("meta")
    assert _capture(None).device == torch.device("cpu")


def test_what_is_held_does_not_hold_a_graph() -> None:
    x: Tensor = torch.ones(3, requires_grad=True) * 2
    assert [tensor.grad_fn for tensor in _capture(torch.sin, x, [x]).held()] == [None, None]
