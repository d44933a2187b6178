"""Codecs on a device: twins compared natively, nothing waits, no memory but the payload's."""

from __future__ import annotations

import pytest
import torch

from ds_hilore.codecs.base import Implementation
from ds_hilore.codecs.registry import codec_named
from tests.codecs import tensors as t
from tests.codecs import twins
from tests.waiting import no_waiting

every_pair = pytest.mark.parametrize(("name", "dtype"), t.pairs(), ids=lambda value: str(value).replace("torch.", ""))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, *_ in twins.cases()])
def test_twins_agree(name: str) -> None:
    """On the CPU: tests/codecs/test_twins.py, by Triton's interpreter."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is false here")
    found = twins.compare(torch.device("cuda"), name)
    assert found and not {case: wrong for case, wrong in found.items() if wrong is not None}


@every_pair
def test_payloads_are_those_of_the_cpu(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Whatever twin a device has, a tensor that is moved there is encoded alike."""
    tensor = t.values((70, 300), dtype, 0, seed=0, spread=5)
    expected = codec_named(name, Implementation.TORCH).encode(tensor)
    codec = codec_named(name)
    payload = codec.encode(tensor.to(device))
    assert payload.device.type == device.type
    assert torch.equal(payload.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))
    if expected.scales is not None:
        assert payload.scales is not None and torch.equal(payload.scales.cpu(), expected.scales)
    torch.testing.assert_close(payload.squares.cpu(), expected.squares, rtol=1e-5, atol=0)
    assert torch.equal(codec.decode(payload).cpu(), codec_named(name, Implementation.TORCH).decode(expected))


@every_pair
def test_nothing_waits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    codec, tensor = codec_named(name), t.values((64, 300), dtype, 0, seed=0).to(device)
    codec.decode(codec.encode(tensor, rows=True))  # kernels are compiled at their first use
    with no_waiting(device, values=True):
        payload = codec.encode(tensor, rows=True)
        codec.decode(payload)
        _ = payload.nonfinite, payload.relative_error, payload.row_error_square


@pytest.mark.gpu
@every_pair
def test_encoding_takes_no_memory_but_the_payload(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is false here")
    codec, tensor = codec_named(name), t.values((2048, 1536), dtype, 0, seed=0).cuda()
    codec.encode(tensor)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    payload = codec.encode(tensor)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * payload.nbytes + (1 << 16)
