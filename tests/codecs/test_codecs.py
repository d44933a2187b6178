"""Every codec against NOTE [Codec rules] of base.py, on the torch twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.codecs import grid
from ds_hilore.codecs.registry import codec_named, codec_names
from ds_hilore.core.errors import UsageError
from tests.codecs import tensors as t
from tests.waiting import no_waiting

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


@every_pair
@pytest.mark.parametrize("view", sorted(t.VIEWS))
def test_shape_and_strides_come_back(name: str, dtype: torch.dtype, view: str) -> None:
    """C4; sliding windows overlap, so their decoded form cannot."""
    codec, tensor = codec_named(name), t.VIEWS[view](t.values((3, 4, 70), dtype, 0, seed=0))
    decoded = codec.decode(codec.encode(tensor))
    assert decoded.shape == tensor.shape
    assert decoded.is_contiguous() if view == "sliding windows" else decoded.stride() == tensor.stride()
    assert ((decoded.double() - tensor.double()).abs() <= codec.error_bound(tensor)).all()


@every_pair
@pytest.mark.parametrize("view", sorted(t.VIEWS))
def test_decoding_into_memory_of_other_strides(name: str, dtype: torch.dtype, view: str) -> None:
    codec, tensor = codec_named(name), t.VIEWS[view](t.values((3, 4, 70), dtype, 0, seed=0))
    payload = codec.encode(tensor)
    expected = codec.decode(payload)
    dense = torch.empty(tensor.shape, dtype=dtype)
    reversed_dimensions = torch.empty(tensor.shape[::-1], dtype=dtype).permute(*range(tensor.dim())[::-1])
    for out in (dense, reversed_dimensions):
        assert codec.decode(payload, out=out) is out
        assert torch.equal(out, expected)


def test_chunks_are_decoded_into_views_of_one_base() -> None:
    """Phi-3 saves both halves of one projection: decoded side by side, they have the strides of the original."""
    codec, base = codec_named("int8"), t.values((5, 128), torch.bfloat16, 0, seed=0)
    payloads = [codec.encode(half) for half in base.chunk(2, -1)]
    again = torch.empty_like(base)
    for payload, half in zip(payloads, again.chunk(2, -1)):
        codec.decode(payload, out=half)
    assert torch.equal(again, codec.decode(codec.encode(base)))  # groups of 32 do not cross the halves


@every_pair
def test_decoding_to_another_dtype(name: str, dtype: torch.dtype) -> None:
    codec, tensor = codec_named(name), t.values((3, 70), dtype, 0, seed=0)
    payload = codec.encode(tensor)
    wide = codec.decode(payload, torch.float32)
    assert wide.dtype is torch.float32
    assert torch.equal(codec.decode(payload, torch.bfloat16), wide.bfloat16())
    assert torch.equal(codec.decode(payload), wide.to(dtype))


@every_pair
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (0, 64), (1, 1), (2, 3, 33), (7, 64), (5, 200)])
def test_bytes_are_foretold(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    codec, tensor = codec_named(name), t.values(shape, dtype, 0, seed=0)
    for rows in (False, True):
        payload = codec.encode(tensor, rows=rows)
        assert payload.nbytes == codec.payload_bytes(shape, dtype, rows=rows)
    assert codec.decode(payload).shape == shape
    assert payload.row_error_square.shape == shape[:-1]


def test_repeated_memory_is_held_once() -> None:
    codec = codec_named("int8")
    payload = codec.encode(torch.randn(1, 64).expand(1000, 64))
    assert payload.nbytes == codec.payload_bytes((1, 64), torch.float32)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("bf16", 2 / 4),
        ("int8", 1.0625 / 4),
        ("int8:64", 1.03125 / 4),
        ("fp8_e4m3", 1.0625 / 4),
        ("fp8_e4m3:unscaled", 1 / 4),
    ],
)
def test_ratio(name: str, share: float) -> None:
    values = 2048 * 1536
    assert codec_named(name).payload_bytes((2048, 1536), torch.float32) == pytest.approx(4 * values * share, abs=32)


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(64),
        torch.zeros(64, dtype=torch.uint8),
        torch.ones(64, dtype=torch.bool),
        torch.zeros(64, dtype=torch.complex64),
        torch.zeros(64, dtype=torch.float64),
        torch.zeros(64).to(torch.float8_e4m3fn),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}".removeprefix("torch.") + ("" if tensor.layout is torch.strided else "-sparse"),
)
def test_c1_other_tensors_are_refused(name: str, tensor: Tensor) -> None:
    with pytest.raises(UsageError, match="never encoded"):
        codec_named(name).encode(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bf16_is_refused_where_it_saves_nothing(dtype: torch.dtype) -> None:
    assert not codec_named("bf16").supports(dtype)
    with pytest.raises(UsageError, match="smaller"):
        codec_named("bf16").encode(torch.zeros(64, dtype=dtype))


@every_pair
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, 69, 300, 3 * 131 - 1])
def test_c6_non_finite_values_mark_the_payload(name: str, dtype: torch.dtype, bad: float, position: int) -> None:
    tensor = t.values((3, 131), dtype, 0, seed=0)
    tensor.view(-1)[position] = bad
    codec = codec_named(name)
    payload = codec.encode(tensor, rows=True)
    assert payload.nonfinite
    assert not codec.decode(payload).view(-1)[position].isfinite()
    finite_rows = (payload.row_error_square + payload.row_value_square).isfinite()
    assert finite_rows.tolist() == [row != position // 131 for row in range(3)]


@every_pair
def test_c6_masks_of_the_smallest_number_mark_the_payload(name: str, dtype: torch.dtype) -> None:
    """Additive masks hold -inf or the dtype's smallest number; without a scale, the latter is merely a huge error."""
    mask = torch.zeros(4, 64, dtype=dtype)
    mask[1:, 40:] = torch.finfo(dtype).min
    payload = codec_named(name).encode(mask)
    if name == "fp8_e4m3:unscaled":
        assert payload.relative_error > 0.9
    else:
        assert payload.nonfinite


@pytest.mark.parametrize("dtype", t.DTYPES)
@pytest.mark.parametrize("name", [name for name in codec_names() if name != "bf16"])
def test_largest_values_never_become_infinite_unseen(name: str, dtype: torch.dtype) -> None:
    """Scales are rounded up as often as down: near the end of the range, either the flag is up or all is finite."""
    largest = torch.finfo(dtype).max
    for share in torch.linspace(0.97, 1.0, 61, dtype=torch.float64):
        tensor = (torch.linspace(-1, 1, 64, dtype=torch.float64) * share * largest).to(dtype)
        payload = codec_named(name).encode(tensor)
        assert payload.nonfinite or codec_named(name).decode(payload).isfinite().all()
        assert share > 0.991 or not payload.nonfinite


@every_pair
def test_c2_deterministic_without_random_numbers(name: str, dtype: torch.dtype) -> None:
    codec, tensor = codec_named(name), t.values((40, 300), dtype, 0, seed=0, spread=5)
    before = torch.random.get_rng_state()
    payloads = [codec.encode(tensor, rows=True) for _ in range(3)]
    decoded = [codec.decode(payload) for payload in payloads]
    assert torch.equal(torch.random.get_rng_state(), before)
    for payload, values in zip(payloads, decoded):
        assert all(same(a, b) for a, b in zip(payload.tensors(), payloads[0].tensors()))
        assert torch.equal(values, decoded[0])


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality; some dtypes have no comparison."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@every_pair
def test_c3_nothing_waits(name: str, dtype: torch.dtype) -> None:
    codec, tensor = codec_named(name), t.values((5, 300), dtype, 0, seed=0)
    with no_waiting(tensor.device, values=True):
        payload = codec.encode(tensor, rows=True)
        codec.decode(payload)
        _ = payload.nonfinite, payload.relative_error, payload.row_error_square


@pytest.mark.parametrize("ask", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x.numpy(), bool, float])
def test_waiting_would_be_noticed(ask: Callable[[Tensor], object]) -> None:
    tensor = torch.ones(())
    with no_waiting(tensor.device, values=True), pytest.raises(AssertionError, match="waits for the device"):
        ask(tensor)


@every_pair
def test_fresh_memory_is_not_read(name: str, dtype: torch.dtype) -> None:
    """With new tensors filled with NaN (largest integers), payload and result are the same."""
    codec, tensor = codec_named(name), t.values((5, 131), dtype, 0, seed=0)
    plain = codec.encode(tensor, rows=True)
    expected = codec.decode(plain)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty and its kin return
    try:
        assert torch.empty(3).isnan().all()
        payload = codec.encode(tensor, rows=True)
        assert torch.equal(codec.decode(payload), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same(a, b) for a, b in zip(payload.tensors(), plain.tensors()))


@every_pair
def test_surroundings_make_no_difference(name: str, dtype: torch.dtype) -> None:
    """Payloads are made within a forward pass: under autocast, with gradients on, in float64 models, within hooks."""
    codec, tensor = codec_named(name), t.values((5, 131), dtype, 0, seed=0)
    plain = codec.encode(tensor)
    expected = codec.decode(plain)
    source = tensor.clone().requires_grad_()

    def refuse(_: Tensor) -> None:
        raise AssertionError("a codec's own operations were recorded")

    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
            payload = codec.encode(source)
            decoded = codec.decode(payload)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(same(a, b) and not a.requires_grad for a, b in zip(payload.tensors(), plain.tensors()))
    assert torch.equal(decoded, expected) and not decoded.requires_grad
    assert torch.equal(source, tensor)


@pytest.mark.parametrize("name", codec_names())
def test_parts_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are handled in parts that stay in cache; wide rows in pieces."""
    codec, tensor = codec_named(name), t.values((7, 1000), torch.float32, 0, seed=0)
    whole = codec.encode(tensor, rows=True)
    expected = codec.decode(whole)
    monkeypatch.setattr(grid, "part_values", lambda device: 300)
    parts = codec.encode(tensor, rows=True)
    assert same(parts.codes, whole.codes)
    assert parts.scales is whole.scales is None or same(parts.scales, whole.scales)
    torch.testing.assert_close(parts.row_squares, whole.row_squares, rtol=1e-6, atol=0)
    assert torch.equal(codec.decode(parts), expected)


@pytest.mark.parametrize("name", codec_names())
def test_error_falls_from_codec_to_codec(name: str) -> None:
    """Relative errors of normal values lie where arithmetic says: uniform error within a step, or within an ulp."""
    expected = {
        "bf16": 0.00166, "int8": 0.0054, "int8:64": 0.0060, "int8:token": 0.0080, "fp8_e4m3": 0.024,
        "fp8_e4m3:64": 0.025, "fp8_e4m3:token": 0.0265, "fp8_e4m3:unscaled": 0.0265,
    }  # fmt: skip
    payload = codec_named(name).encode(t.values((64, 1536), torch.float32, 0, seed=0))
    assert payload.relative_error.item() == pytest.approx(expected[name], rel=0.05)


@pytest.mark.parametrize("exponent", [-32, -20, 20, 37])
@pytest.mark.parametrize("name", [name for name in codec_names() if name != "fp8_e4m3:unscaled"])
def test_error_does_not_depend_on_scale(name: str, exponent: int) -> None:
    """Down to the smallest normal number over the codes' range, which is 1.5e-36 for int8 and 5e-36 for e4m3."""
    tensor = t.values((16, 1536), torch.float32, 0, seed=0)
    expected = codec_named(name).encode(tensor)
    found = codec_named(name).encode((tensor.double() * 10.0**exponent).float())
    error, value = found.squares.sqrt()
    assert (error / value).item() == pytest.approx(expected.relative_error.item(), rel=0.02)


def test_payload_is_frozen_and_another_codecs_payload_is_refused() -> None:
    payload = codec_named("int8").encode(torch.randn(4, 64))
    with pytest.raises(AttributeError):
        payload.dtype = torch.float64  # type: ignore[misc]
    with pytest.raises(UsageError, match=r"'int8'.*'int8:64'"):
        codec_named("int8:64").decode(payload)
    with pytest.raises(UsageError, match="rows=True"):
        _ = payload.row_error_square
    for out in (torch.empty(4, 63), torch.empty(4, 64, device="meta")):
        with pytest.raises(UsageError, match="out is"):
            codec_named("int8").decode(payload, out=out)
    with pytest.raises(UsageError, match="out is"):
        codec_named("int8").decode(payload, torch.bfloat16, out=torch.empty(4, 64))


@every_pair
def test_payload_holds_no_memory_but_its_own(name: str, dtype: torch.dtype) -> None:
    """Not the tensor, and no larger storage behind a view."""
    tensor = t.values((5, 131), dtype, 0, seed=0)
    payload = codec_named(name).encode(tensor[:, 1:], rows=True)
    for held in payload.tensors():
        assert held.untyped_storage().nbytes() == held.nbytes
        assert held.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
