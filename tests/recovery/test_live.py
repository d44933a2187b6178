"""Live positions and how they are cut: segments from masks, groups, parts and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.recovery.live import Borders, Cut, Extent, LiveChain, LiveSet, Segment, grouped, live_segments

CPU = torch.device("cpu")


def _mask(ids: list[list[int]], window: int = 10**6) -> Tensor:
    """[B, 1, T, T] bool: causal attention within equal ids; id 0 is padding, which nobody attends to."""
    rows = torch.tensor(ids)
    position = torch.arange(rows.shape[1])
    behind = position[:, None] - position[None, :]
    causal = (behind >= 0) & (behind < window)
    return (causal & (rows[:, :, None] == rows[:, None, :]) & (rows != 0)[:, None, :])[:, None]


def _starts(flags: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in flags]


def test_borders_of_masks() -> None:
    ids = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0], [1, 1, 2, 2, 2, 3]]
    borders = Borders.of_mask(_mask(ids), rows=3)
    # positions of padding are segments of their own: nothing looks back at them
    assert _starts(borders.flags)[0] == [0]
    assert {0, 2} <= set(_starts(borders.flags)[1])
    assert not {3, 4} & set(_starts(borders.flags)[1])
    assert _starts(borders.flags)[2] == [0, 2, 5]
    assert not borders.trivial


def test_additive_masks_and_windows() -> None:
    ids = [[1, 1, 2, 2, 2, 2]]
    bools = _mask(ids, window=2)
    additive = torch.zeros(bools.shape).masked_fill(~bools, torch.finfo(torch.float32).min)
    for mask in (bools, additive, additive.expand(1, 4, 6, 6)):
        assert _starts(Borders.of_mask(mask, rows=1).flags) == [[0, 2]]


def test_a_mask_of_one_row_holds_for_all() -> None:
    borders = Borders.of_mask(_mask([[1] * 4]), rows=3)
    assert borders.flags.shape == (3, 4) and borders.trivial


def test_live_segments() -> None:
    borders = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    live = torch.tensor([[0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    assert live_segments(live, borders) == [Segment(0, 3, 5), Segment(1, 0, 3)]
    assert live_segments(torch.zeros_like(live), borders) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 6))
def test_groups_are_the_cheapest(lengths: list[int], cost: int) -> None:
    def price(groups: list[list[int]]) -> int:
        return sum(len(group) * max(group) + cost for group in groups)

    segments = [Segment(row, 0, length) for row, length in enumerate(lengths)]
    found = grouped(segments, cost)
    assert sorted(itertools.chain(*found), key=lambda s: s.row) == segments
    best = min(price(parts) for parts in _partitions(lengths))
    assert price([[segment.length for segment in group] for group in found]) == best


def _partitions(items: list[int]) -> list[list[list[int]]]:
    """Every way to split a list into groups."""
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    found = []
    for parts in _partitions(rest):
        found.append([[first], *parts])
        found += [[*parts[:i], [first, *parts[i]], *parts[i + 1 :]] for i in range(len(parts))]
    return found


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Borders and live positions [B, T] of rows with several segments."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    numbers = st.lists(st.integers(0, 7), min_size=rows * length, max_size=rows * length)
    borders = torch.tensor(draw(numbers)).view(rows, length) == 0
    borders[:, 0] = True
    return borders, torch.tensor(draw(numbers)).view(rows, length) == 0


def _running_sum(x: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
    """A causal unit: sums over each segment so far, [k, L, H]; `segments` and `positions` are [k, L]."""
    same = (segments[:, :, None] == segments[:, None, :]) & (positions[:, :, None] >= positions[:, None, :])
    return torch.einsum("kqp,kph->kqh", same.to(x.dtype), x) ** 2


@settings(max_examples=60, deadline=None)
@given(packed_rows())
def test_parts_of_a_causal_unit_give_its_gradient(batch: tuple[Tensor, Tensor]) -> None:
    """Cut, run, differentiate and put back: what the whole gives, for any layout of segments and live positions."""
    borders, live = batch
    rows, length = live.shape
    x = torch.randn(rows, length, 3, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(rows, length, 3, dtype=torch.float64) * live[..., None]
    segments = borders.long().cumsum(1)
    positions = torch.arange(length).expand(rows, length)
    (expected,) = torch.autograd.grad(_running_sum(x, segments, positions), x, gradient)

    known = Borders(borders)
    found = torch.zeros_like(x)
    cutting = LiveSet.of_gradient(gradient).cutting(known, Extent.SEGMENTS)
    for cut in cutting.cuts:
        part = cut.pick(x).detach().requires_grad_()
        output = _running_sum(part, cut.pick(segments), cut.pick(positions))
        (given_back,) = torch.autograd.grad(output, part, cut.pick_gradient(gradient))
        if cut.whole:
            found = given_back
        else:
            cut.put(found, given_back)
    assert torch.allclose(found, expected, atol=1e-12)
    assert not (found != 0).any(-1)[~cutting.after.flags].any()
    assert cutting.positions <= max(rows * length, sum(cut.length for cut in cutting.cuts) * rows)


@settings(max_examples=30, deadline=None)
@given(packed_rows())
def test_masks_are_cut_like_positions(batch: tuple[Tensor, Tensor]) -> None:
    borders, live = batch
    ids = borders.long().cumsum(1)
    mask = _mask(ids.tolist())
    for cut in LiveSet(live, CPU).cutting(Borders(borders), Extent.SEGMENTS).cuts:
        part = cut.pick(ids)
        behind = torch.arange(cut.length)[:, None] >= torch.arange(cut.length)
        assert torch.equal(cut.pick_mask(mask)[:, 0], behind & (part[:, :, None] == part[:, None, :]))


def test_everything_live_is_the_tensor_itself() -> None:
    (cut,) = LiveSet(torch.ones(2, 16, dtype=torch.bool), CPU).cutting(Borders.none(2, 16), Extent.SEGMENTS).cuts
    x = torch.randn(2, 16, 3)
    assert cut.whole and cut.pick(x) is x and cut.pick_gradient(x) is x


@given(st.lists(st.integers(0, 16), min_size=1, max_size=6))
def test_lean_groups_hold_less_than_everything(lengths: list[int]) -> None:
    live = torch.zeros(len(lengths), 16, dtype=torch.bool)
    for row, length in enumerate(lengths):
        live[row, :length] = True
    borders = Borders.none(len(lengths), 16)
    whole = LiveSet(live, CPU).cutting(borders, Extent.SEGMENTS)
    lean = LiveSet(live, CPU).cutting(borders, Extent.SEGMENTS, lean=True)
    assert lean.positions <= whole.positions and torch.equal(lean.after.flags, whole.after.flags)
    assert all(cut.positions <= 0.8 * live.numel() or len(cut.segments) == 1 for cut in lean.cuts)


def test_windows_are_even() -> None:
    cut = Cut([Segment(0, 0, 9)], 1, 64, CPU, True)
    assert cut.length == 16
    assert Cut([Segment(0, 0, 9)], 1, 10, CPU, True).length == 10


def test_chain_knows_what_it_noted() -> None:
    chain, live = LiveChain(), LiveSet(torch.zeros(1, 2, dtype=torch.bool), CPU)
    gradient = torch.ones(1, 2, 3)
    chain.note(gradient, live)
    assert chain.read(gradient) is live and chain.reads == 0
    assert chain.read(gradient) is not live and chain.reads == 1  # asked once


@pytest.mark.parametrize("change", ["in place", "another", "gone"])
def test_chain_reads_what_is_not_that_very_tensor(change: str) -> None:
    chain = LiveChain()
    gradient = torch.zeros(1, 2, 3)
    chain.note(gradient, LiveSet(torch.zeros(1, 2, dtype=torch.bool), CPU))
    if change == "in place":
        gradient += 1
    elif change == "another":
        gradient = gradient + 1
    else:
        del gradient
        gradient = torch.ones(1, 2, 3)
    assert chain.read(gradient).flags.all() and chain.reads == 1


def test_nan_is_live() -> None:
    gradient = torch.zeros(1, 3, 2)
    gradient[0, 1, 0] = float("nan")
    gradient[0, 2] = -0.0
    assert LiveSet.of_gradient(gradient).flags.tolist() == [[False, True, False]]
