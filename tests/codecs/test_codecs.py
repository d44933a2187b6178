"""Every codec against NOTE [Codec rules] of base.py, on the torch twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.codecs.registry import codec_named
from tests.codecs import tensors as t

EXAMPLES = settings(max_examples=60, deadline=None)

every_pair = pytest.mark.parametrize(("name", "dtype"), t.pairs(), ids=lambda value: str(value).replace("torch.", ""))


def encodable(name: str, tensor: Tensor) -> Tensor:
    """Within what the codec takes: without a scale, e4m3 ends at 464."""
    return tensor.clamp(-464.0, 464.0) if name == "fp8_e4m3:unscaled" else tensor


@every_pair
@given(data=st.data())
@EXAMPLES
def test_error_is_within_the_bound(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    codec, tensor = codec_named(name), encodable(name, data.draw(t.tensors(dtype)))
    payload = codec.encode(tensor)
    decoded = codec.decode(payload)
    assert decoded.shape == tensor.shape and decoded.dtype == dtype
    error = (decoded.double() - tensor.double()).abs()
    assert (error <= codec.error_bound(tensor)).all()
    assert not payload.nonfinite


@every_pair
@given(data=st.data())
@EXAMPLES
def test_statistics_are_those_of_what_is_decoded(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    codec, tensor = codec_named(name), encodable(name, data.draw(t.tensors(dtype)))
    payload = codec.encode(tensor, rows=True)
    errors = codec.decode(payload).double() - tensor.double()
    values = tensor.double()
    for found, expected in (
        (payload.error_square, errors.square().sum()),
        (payload.value_square, values.square().sum()),
        (payload.row_error_square, errors.square().sum(-1)),
        (payload.row_value_square, values.square().sum(-1)),
    ):
        # Errors are differences of float32: what is left of them has the rounding of the values.
        slack = 1e-7 * (values.square().sum(-1) if found.dim() else values.square().sum()).sqrt()
        assert found.shape == expected.shape
        assert ((found.sqrt() - expected.sqrt()).abs() <= 1e-4 * expected.sqrt() + slack + 1e-45).all()
