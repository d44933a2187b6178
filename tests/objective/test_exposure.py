"""Exposure, reach and live rows against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.exposure import TokenFacts, exposure, live_rows, reach_weights
from tests.objective.cases import Watcher, untimed


@st.composite
def coefficients(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """omega with garbage where masked, its mask, and segments of packed rows."""
    rows, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    omega = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    omega[torch.rand(rows, tokens, generator=generator) < 0.3] = 0.0
    omega[~mask] = math.nan
    segments = (torch.rand(rows, tokens, generator=generator) < 0.3).cumsum(1)
    return omega, mask, segments


@given(coefficients())
@untimed(max_examples=100)
def test_facts_by_loops(case: tuple[Tensor, Tensor, Tensor]) -> None:
    omega, mask, segments = case
    rows, tokens = omega.shape
    size = [[abs(omega[b, t].item()) if mask[b, t] else 0.0 for t in range(tokens)] for b in range(rows)]
    torch.testing.assert_close(exposure(omega, mask).item(), sum(map(sum, size)))
    assert live_rows(omega, mask).tolist() == [any(row) for row in size]
    for ids in (None, segments):
        reach = [
            [sum(size[b][q] for q in range(p, tokens) if ids is None or ids[b, q] == ids[b, p]) for p in range(tokens)]
            for b in range(rows)
        ]
        torch.testing.assert_close(reach_weights(omega, ids, mask), torch.tensor(reach, dtype=torch.float64))
    facts = TokenFacts.unpacked(TokenFacts.of(omega, mask).packed())
    torch.testing.assert_close(facts.exposure, exposure(omega, mask))
    assert torch.equal(facts.live_rows, live_rows(omega, mask))
    assert facts.finite


def test_a_calm_segment_before_a_violent_one_keeps_its_digits() -> None:
    omega = torch.tensor([[1e-6, 2e-6, 0.0, 1e4, 1e4]])
    segments = torch.tensor([[0, 0, 1, 2, 2]])
    torch.testing.assert_close(
        reach_weights(omega, segments), torch.tensor([[3e-6, 2e-6, 0.0, 2e4, 1e4]]), rtol=1e-5, atol=0
    )
    assert reach_weights(omega, segments)[0, 2] == 0


def test_prompt_positions_carry_the_whole_sum() -> None:
    assert reach_weights(torch.tensor([[0.0, 0.0, -2.0, 1.0]])).tolist() == [[3.0, 3.0, 3.0, 1.0]]


def test_nan_makes_a_row_live_and_the_facts_not_finite() -> None:
    omega = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    facts = TokenFacts.of(omega)
    assert facts.live_rows.tolist() == [True, False]
    assert not facts.finite
    assert facts.exposure.isnan()


def test_bfloat16_is_summed_in_float32() -> None:
    omega = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert exposure(omega).dtype == torch.float32
    assert exposure(omega).item() == reach_weights(omega)[0, 0].item() == 4096


def test_nothing_waits_for_the_device() -> None:
    omega, mask = torch.randn(3, 5), torch.rand(3, 5) < 0.5
    with Watcher() as watcher:
        TokenFacts.of(omega, mask).packed()
        reach_weights(omega, mask.long(), mask)
        live_rows(omega, mask)
    assert watcher.seen.host_reads == []


@pytest.mark.parametrize("function", [exposure, live_rows, TokenFacts.of])
def test_shapes_are_checked(function: object) -> None:
    assert callable(function)
    with pytest.raises(UsageError, match=r"\[rows, tokens\]"):
        function(torch.zeros(2, 3), torch.ones(2, 4))
    with pytest.raises(UsageError, match="segment_ids"):
        reach_weights(torch.zeros(2, 3), torch.zeros(2, 4))
