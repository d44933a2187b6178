"""Packed rows whose segments are told by their starts (cu_seqlens): parts of them are cut, and gradients stay.

No kernel of flash-attention runs on CPU, so an attention function of that form is registered with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hilore.recovery.live import Borders, Extent, LiveSet
from ds_hilore.recovery.roles import Reason
from tests.engines import difference
from tests.models import FAMILIES, llama, lora
from tests.recovery.plans import differences
from tests.recovery.pruning import PruningHost

NAME = "segments_on_cpu"
LENGTHS = (40, 24, 32)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal within each segment of all rows laid end to end; none may be longer than the caller says.

    Shapes: [B, heads, T, head width], out [B, T, heads, head width].
    """
    assert attention_mask is None
    starts = kwargs["cu_seq_lens_q"]
    assert int(starts.diff().max()) <= int(kwargs["max_length_q"])
    rows, heads, length = query.shape[:3]
    assert int(starts[-1]) == rows * length and torch.equal(starts, kwargs["cu_seq_lens_k"])
    same_heads = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in same_heads)
    segment = torch.searchsorted(starts[1:], torch.arange(rows * length), right=True)
    seen = (segment[:, None] == segment) & torch.ones(rows * length, rows * length).tril().bool()
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).unflatten(0, (rows, length)), None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
    yield


class Packed:
    """One row of segments, of which the first is short and the second dead; and its loss."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        total = sum(lengths)
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 500, (1, total), generator=generator)
        self.positions = torch.cat([torch.arange(length) for length in lengths])[None]
        self.starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        self.longest: int | Tensor = max(lengths)
        self.weights = torch.zeros(1, total)
        self.weights[0, 3:20] = 1.0
        self.weights[0, total - lengths[-1] + 4 : total - 1] = -0.5

    def loss(self, model: Any) -> Tensor:
        told = {f"cu_seq_lens_{side}": self.starts.clone() for side in "qk"}
        told |= {f"max_length_{side}": self.longest for side in "qk"}  # type: ignore[misc]
        logits = model(input_ids=self.ids, position_ids=self.positions, use_cache=False, **told).logits
        return (logits.float().log_softmax(-1)[..., 7] * self.weights).sum() / 8


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_segments_are_cut_by_their_starts(family: str) -> None:
    host, packed = PruningHost(lora(FAMILIES[family](attn_implementation=NAME))), Packed()
    ours = host.pruned_gradients(packed.loss)
    assert host.pruning.refused == {}
    assert host.pruning.live_share == 2 * 32 / sum(LENGTHS)  # the two live ones, as one batch
    assert difference(host.gradients(packed.loss, None), ours) < 1e-6


def test_the_longest_may_be_a_tensor() -> None:
    host, packed = PruningHost(lora(llama(attn_implementation=NAME))), Packed()
    packed.longest = torch.tensor(max(LENGTHS))
    ours = host.pruned_gradients(packed.loss)
    assert host.pruning.refused == {}
    assert difference(host.gradients(packed.loss, None), ours) < 1e-6


def test_other_segments_in_every_microbatch() -> None:
    """What a class has shown with some segments holds for others."""
    host = PruningHost(lora(llama(attn_implementation=NAME)))
    host.pruned_gradients(Packed().loss)
    for lengths in ((9, 61, 26), (96,), (30, 5, 5, 5, 51)):
        packed = Packed(lengths)
        host.pruning.clear()
        host.pruning.live_share = None
        ours = host.gradients(packed.loss, [])
        assert host.pruning.refused == {} and host.pruning.live_share is not None
        assert difference(host.gradients(packed.loss, None), ours) < 1e-6


def test_attention_across_segments_is_found_out() -> None:
    """The layer is handed starts, and its attention heeds none: whole rows only, by what the class has shown."""
    host, packed = PruningHost(lora(llama())), Packed()
    packed.positions = torch.arange(sum(LENGTHS))[None]
    ours = host.pruned_gradients(packed.loss)
    assert host.pruning.live_share in (None, 1.0)
    assert difference(host.gradients(packed.loss, None), ours) < 1e-6


def test_queries_and_keys_of_different_segments_are_not_pruned() -> None:
    host, packed = PruningHost(lora(llama())), Packed()

    def loss(model: Any) -> Tensor:
        told = {"cu_seq_lens_q": packed.starts, "cu_seq_lens_k": packed.starts[::3].contiguous()}
        logits = model(input_ids=packed.ids, use_cache=False, **told).logits
        return (logits.float().log_softmax(-1)[..., 7] * packed.weights).sum() / 8

    ours = host.pruned_gradients(loss)
    assert [refusal.reason for refusal in host.pruning.refused.values()] == [Reason.LAYOUT]
    assert differences(ours, host.gradients(loss, None)) == []


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6), st.booleans())
def test_starts_of_windows_keep_segments_apart(segments: list[tuple[int, int]], lean: bool) -> None:
    """Each live segment has a piece of its own from its begin to behind its last live position, and no piece is longer
    than the longest of them."""
    lengths = [length for length, _ in segments]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    live = torch.zeros(1, sum(lengths), dtype=torch.bool)
    for begin, (length, end) in zip(starts.tolist(), segments):
        live[0, begin : begin + min(length, end)] = True
    borders = Borders.of_starts(starts, *live.shape)
    assert borders.flags.nonzero()[:, 1].tolist() == starts[:-1].tolist()
    for cut in LiveSet(live, live.device).cutting(borders, Extent.SEGMENTS, lean).cuts:
        found = cut.pick_starts(starts)
        assert int(found[-1]) == cut.positions and int(found.diff().min()) > 0
        if cut.whole:
            assert found is starts
            continue
        assert int(found.diff().max()) <= max(segment.length for segment in cut.segments)
        pieces = set(zip(found[:-1].tolist(), found[1:].tolist()))
        for window, segment in enumerate(cut.segments):
            begin = window * cut.length + segment.start - min(segment.start, live.shape[1] - cut.length)
            assert (begin, begin + segment.length) in pieces
