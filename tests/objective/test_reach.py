"""Exposures, weights and weighted errors by reach, against plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.reach import CAUSAL, OWN_POSITION, Reach, exposures, token_weighted_error, token_weights
from tests.objective.cases import Watcher, untimed

REACHES = (CAUSAL, OWN_POSITION, Reach(2), Reach(3), Reach(50), Reach(route="a"), Reach(1, "a"), Reach(3, "b"))


@dataclass(frozen=True)
class Case:
    """A small microbatch; omega and what is known of it as nested lists as well."""

    omega: Tensor
    mask: Tensor
    segments: Tensor
    routes: dict[str, Tensor]

    def size(self, row: int, token: int) -> float:
        return abs(float(self.omega[row, token])) if self.mask[row, token] else 0.0

    def reaches(self, reach: Reach, row: int, source: int, token: int, packed: bool) -> bool:
        """Whether state at `source` reaches `token`."""
        ids = self.segments[row].tolist()
        same = not packed or ids[source] == ids[token]
        near = reach.span is None or token - source < reach.span
        return (
            source <= token and same and near and (reach.route is None or bool(self.routes[reach.route][row, source]))
        )

    def weight(self, reach: Reach, row: int, source: int, packed: bool) -> float:
        if reach.route is not None and not self.routes[reach.route][row, source]:
            return 0.0
        ids = self.segments[row].tolist()
        total = self.size(row, source)
        for token in range(source + 1, len(ids)):
            if self.reaches(reach, row, source, token, packed):
                seen = len([p for p in range(token + 1) if not packed or ids[p] == ids[token]])
                total += self.size(row, token) / min(seen, reach.span or seen)
        return total

    def exposure(self, reach: Reach, packed: bool) -> float:
        rows, tokens = self.omega.shape
        return math.sqrt(sum(self.weight(reach, b, p, packed) ** 2 for b in range(rows) for p in range(tokens)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """omega with NaN where masked, packed segments (ids that do not ascend), and routes, one of which may be empty."""
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def chance(share: float) -> Tensor:
        return torch.rand(rows, tokens, generator=generator) < share

    mask = chance(0.7)
    omega = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    omega[chance(0.2)] = 0.0
    omega[~mask] = math.nan
    segments = chance(0.3).cumsum(1)
    if draw(st.booleans()):
        segments = -segments
    return Case(omega, mask, segments, {"a": chance(0.5), "b": chance(draw(st.sampled_from([0.0, 0.4]))).long()})


@given(cases(), st.booleans())
@untimed(max_examples=60)
def test_exposures_by_loops(case: Case, packed: bool) -> None:
    segments = case.segments if packed else None
    found = exposures(case.omega, REACHES, case.mask, segments, case.routes)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.tolist(), [case.exposure(reach, packed) for reach in REACHES])
    alone = case.omega[case.mask].square().sum().sqrt()
    torch.testing.assert_close(found[1], alone)


@given(cases(), st.integers(1, 6))
@untimed(max_examples=60)
def test_a_prompt_is_positions_without_coefficients(case: Case, before: int) -> None:
    rows = len(case.omega)
    whole = torch.cat([torch.full((rows, before), math.nan, dtype=torch.float64), case.omega], 1)
    mask = torch.cat([torch.zeros(rows, before, dtype=torch.bool), case.mask], 1)
    reaches = REACHES[:5]
    torch.testing.assert_close(
        exposures(case.omega, reaches, case.mask, before=before), exposures(whole, reaches, mask)
    )


@given(cases(), st.booleans())
@untimed(max_examples=60)
def test_weights_by_loops(case: Case, packed: bool) -> None:
    segments = case.segments if packed else None
    rows, tokens = case.omega.shape
    for reach in REACHES:
        found = token_weights(case.omega, reach, case.mask, segments, case.routes)
        loops = [[case.weight(reach, row, p, packed) for p in range(tokens)] for row in range(rows)]
        torch.testing.assert_close(found.tolist(), loops)
        assert (found >= 0).all()


def test_by_hand() -> None:
    omega = torch.tensor([[0.0, -6.0, 3.0]])
    found = exposures(
        omega, (CAUSAL, Reach(2), OWN_POSITION, Reach(route="e")), routes={"e": torch.tensor([[0, 0, 1]])}
    )
    # the tokens at 1 and 2 see two and three positions; within a window of two, both see two
    expected = [[6 / 2 + 3 / 3, 6 + 3 / 3, 3], [6 / 2, 6 + 3 / 2, 3], [0, 6, 3], [3]]
    assert found.tolist() == pytest.approx([math.hypot(*weights) for weights in expected])


def test_two_units_of_one_microbatch_differ() -> None:
    """State that only reaches its own position is exposed to less than what passes attention."""
    first, last = exposures(torch.ones(2, 64), (CAUSAL, OWN_POSITION)).tolist()
    assert last == pytest.approx(math.sqrt(2 * 64)) and first > 1.2 * last


def test_splitting_a_microbatch_changes_no_risk() -> None:
    """Squares add up over rows, as they do over microbatches and ranks."""
    omega = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    whole, *parts = (exposures(part, REACHES[:5], before=3) for part in (omega, omega[:1], omega[1:]))
    torch.testing.assert_close(whole.square(), sum(part.square() for part in parts))


@given(cases(), st.floats(1e-6, 1e6))
@untimed(max_examples=30)
def test_exposures_scale_with_the_coefficients(case: Case, scale: float) -> None:
    one = exposures(case.omega, REACHES, case.mask, case.segments, case.routes)
    scaled = exposures(-scale * case.omega, REACHES, case.mask, case.segments, case.routes)
    torch.testing.assert_close(scaled, scale * one)


@given(cases())
@untimed(max_examples=30)
def test_experts_share_what_all_tokens_are_exposed_to(case: Case) -> None:
    routes = {"a": case.routes["a"], "others": ~case.routes["a"]}
    for span in (None, 1, 3):
        whole, one, other = exposures(
            case.omega, (Reach(span), Reach(span, "a"), Reach(span, "others")), case.mask, case.segments, routes
        )
        torch.testing.assert_close(one.square() + other.square(), whole.square())


def test_windows_of_later_layers_add_up() -> None:
    assert Reach.through([]) == OWN_POSITION
    assert Reach.through([4]) == Reach(4)
    assert Reach.through([4, 4, 1]) == Reach(7)
    assert Reach.through([4, None, 4]) == CAUSAL
    assert Reach.through([3], route="e") == Reach(3, "e")
    # what a stack of windowed attentions really passes on: one step of "sees the last three" after another
    sees = torch.tensor([[0 <= query - key < 3 for key in range(12)] for query in range(12)]).double()
    reached = int((sees @ sees @ sees)[:, 0].count_nonzero())
    assert Reach.through([3, 3, 3]).span == reached


def test_packed_rows_are_as_rows_of_their_own() -> None:
    generator = torch.Generator().manual_seed(1)
    omega = torch.randn(1, 12, generator=generator)
    packed = exposures(omega, REACHES[:5], segment_ids=torch.tensor([[7] * 4 + [2] * 4 + [7] * 4]))
    torch.testing.assert_close(packed, exposures(omega.view(3, 4), REACHES[:5]))


def test_bfloat16_and_live_nan() -> None:
    omega = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert exposures(omega, (OWN_POSITION, Reach(4096))).tolist()[0] == 64.0
    omega[0, 5] = math.nan
    assert exposures(omega, REACHES[:5]).isnan().all()


def test_reaches_tell_units_apart_by_value() -> None:
    of_unit = {"0": Reach(), "1": Reach(), "2": Reach.through([]), "3": Reach(1)}
    assert tuple(dict.fromkeys(of_unit.values())) == (CAUSAL, OWN_POSITION)
    assert exposures(torch.ones(1, 2), ()).shape == (0,)


@given(cases(), st.integers(1, 3), st.integers(1, 4))
@untimed(max_examples=60)
def test_weighted_error_by_loops(case: Case, heads: int, width: int) -> None:
    rows, tokens = case.omega.shape
    generator = torch.Generator().manual_seed(rows * 100 + tokens)
    value = torch.randn(rows, heads, tokens, width, generator=generator, dtype=torch.float64)
    error = 0.01 * torch.randn(rows, heads, tokens, width, generator=generator, dtype=torch.float64)
    weights = token_weights(case.omega, CAUSAL, case.mask, case.segments)
    errors, values = 0.0, 0.0
    for row in range(rows):
        for token in range(tokens):
            weight = float(weights[row, token])
            errors += weight * sum(float(x) ** 2 for x in error[row, :, token].flatten())
            values += weight * sum(float(x) ** 2 for x in value[row, :, token].flatten())
    total = sum(map(sum, weights.tolist()))
    mean = total / (rows * tokens)
    expected = math.sqrt(errors / mean) / (math.sqrt(values / mean) + 1e-8) if total else 0.0
    squares = [each.square().sum(-1) for each in (error, value)]
    found = token_weighted_error(squares[0], squares[1], weights, position_axis=2)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    by_token = [each.transpose(1, 2) for each in squares]
    torch.testing.assert_close(token_weighted_error(by_token[0], by_token[1], weights), found)
    added_up = [each.sum(1) for each in squares]
    torch.testing.assert_close(token_weighted_error(added_up[0], added_up[1], weights), found)
    torch.testing.assert_close(token_weighted_error(squares[0], squares[1], 1e-7 * weights, position_axis=-1), found)


def test_equal_weights_give_the_plain_relative_error() -> None:
    generator = torch.Generator().manual_seed(3)
    value, error = torch.randn(2, 5, 8, generator=generator), 1e-3 * torch.randn(2, 5, 8, generator=generator)
    plain = error.double().norm() / (value.double().norm() + 1e-8)
    squares = [each.double().square().sum(-1) for each in (error, value)]
    for weight in (1.0, 1e-12):
        found = token_weighted_error(squares[0], squares[1], torch.full((2, 5), weight, dtype=torch.float64))
        torch.testing.assert_close(found, plain)


def test_what_reaches_nothing_does_not_count() -> None:
    weights = torch.tensor([[1.0, 0.0]])
    error, value = torch.tensor([[0.01, math.nan]]), torch.tensor([[1.0, math.inf]])
    assert token_weighted_error(error, value, weights).item() == pytest.approx(0.1)
    assert token_weighted_error(error, value, torch.zeros(1, 2)).item() == 0.0
    assert token_weighted_error(error, value, torch.ones(1, 2)).isnan()
    # zeros that are encoded as zeros have no error
    assert token_weighted_error(torch.zeros(1, 2), torch.zeros(1, 2), weights).item() == 0.0


def test_nothing_waits_for_the_device() -> None:
    omega, mask = torch.randn(3, 5), torch.rand(3, 5) < 0.5
    routes = {"a": mask, "b": mask.long()}
    with Watcher() as watcher:
        exposures(omega, REACHES, mask, mask.long(), routes)
        weights = token_weights(omega, REACHES[-1], mask, mask.long(), routes)
        token_weighted_error(omega.square(), omega.square(), weights)
    assert watcher.seen.host_reads == []


def test_refusals() -> None:
    omega = torch.zeros(2, 3)
    with pytest.raises(UsageError, match="span"):
        Reach(0)
    with pytest.raises(UsageError, match=r"\[rows, tokens\]"):
        exposures(omega, REACHES[:1], torch.ones(2, 4))
    with pytest.raises(UsageError, match="segment_ids"):
        exposures(omega, REACHES[:1], segment_ids=torch.zeros(2, 4))
    with pytest.raises(UsageError, match=r"route 'a'.*known: \['b'\]"):
        exposures(omega, (Reach(route="a"),), routes={"b": omega})
    with pytest.raises(UsageError, match="route 'a'"):
        token_weights(omega, Reach(route="a"), routes={"a": torch.zeros(2, 4)})
    for rows, axis in ((torch.zeros(3, 2), 1), (torch.zeros(2, 4, 3), 1), (torch.zeros(2, 3), 0), (torch.zeros(6), 1)):
        with pytest.raises(UsageError, match="do not belong"):
            token_weighted_error(rows, rows, omega, axis)
    with pytest.raises(UsageError, match="do not belong"):
        token_weighted_error(omega, torch.zeros(2, 3, 1), omega)
