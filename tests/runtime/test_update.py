"""Announcements, coefficients and scales as plain data."""

from __future__ import annotations

import pytest
import torch

from ds_hilore.core.errors import UsageError
from ds_hilore.runtime.update import (
    Announcements,
    Coefficients,
    GradientScale,
    MicrobatchFacts,
    Source,
    announced_microbatches,
)

MASK = torch.ones(2, 3)


def facts(number: int) -> MicrobatchFacts:
    return MicrobatchFacts(torch.ones(2), MASK, number)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_shapes_that_fit(shape: tuple[int, ...]) -> None:
    given = MicrobatchFacts(torch.ones(shape), MASK, 6, torch.ones(shape))
    assert given.weights is not None and given.advantages.shape == shape


@pytest.mark.parametrize(
    ("advantages", "mask", "weights", "words"),
    [
        (torch.ones(2), torch.ones(3), None, "mask must be"),
        (torch.ones(3), MASK, None, r"advantages has shape \(3,\)"),
        (torch.tensor(1.0), MASK, None, r"advantages has shape \(\)"),
        (torch.ones(2), MASK, torch.ones(5, 3), r"weights has shape \(5, 3\)"),
        (torch.ones(2, 4), MASK, None, r"advantages has shape \(2, 4\)"),
        (torch.ones(2, 3, 1), MASK, None, r"advantages has shape \(2, 3, 1\)"),
        (torch.ones(2), MASK, torch.ones(2, 2), r"weights has shape \(2, 2\)"),
    ],
)
def test_shapes_that_do_not_fit(
    advantages: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        MicrobatchFacts(advantages, mask, 6, weights)


def test_one_entry_per_microbatch() -> None:
    advantages = [torch.zeros(2), torch.ones(2)]
    told = announced_microbatches(advantages, [MASK, MASK], 12, [torch.ones(2), torch.ones(2)])
    assert [float(entry.advantages.sum()) for entry in told] == [0.0, 2.0]
    assert all(entry.weights is not None for entry in told)
    for lists in ((advantages, [MASK], None), (advantages, [MASK, MASK], [torch.ones(2)])):
        with pytest.raises(UsageError, match="one entry per microbatch"):
            announced_microbatches(lists[0], lists[1], 12, lists[2])


def test_announcements_are_taken_in_order_and_once() -> None:
    announced = Announcements()
    assert announced.take() is None and len(announced) == 0
    one, two, own = facts(1), facts(2), facts(3)
    announced.announce_update([one, two])
    announced.announce_microbatch(own)
    assert announced.take() is own  # in the place of the update's first entry
    assert announced.take() is two and announced.take() is None
    assert len(announced) == 2  # as announced, whatever has begun
    announced.restart()
    assert [announced.take(), announced.take()] == [one, two]
    announced.announce_update([two])  # replaces
    assert announced.take() is two
    announced.announce_microbatch(own)
    announced.clear()
    assert announced.take() is None and len(announced) == 0


def test_coefficients_know_exposure_and_live_rows() -> None:
    omega = torch.tensor([[1.0, -2.0], [float("nan"), 0.0]], requires_grad=True)
    given = Coefficients(omega, Source.FORMULA, torch.tensor([[1, 1], [0, 1]]))
    assert float(given.facts.exposure) == 3.0 and given.facts.live_rows.tolist() == [True, False]
    assert bool(given.facts.finite) and not given.facts.exposure.requires_grad


def test_omega_of_a_scaled_gradient() -> None:
    scale = GradientScale(data_parallel=2, loss_scale=4.0, accumulation=3)
    gradient = torch.tensor([24.0, -48.0], dtype=torch.float64)
    assert torch.equal(scale.omega(gradient), torch.tensor([1.0, -2.0], dtype=torch.float64))


def test_a_loss_scale_is_taken_out_without_underflow() -> None:
    """65536 is fp16 training's first loss scale; the quotient is no fp16 number. It may stay on the device."""
    gradient = torch.tensor([6e-5], dtype=torch.float16)
    expected = gradient.float() / 65536
    assert float(gradient / 65536) == 0.0
    for loss_scale in (65536.0, torch.tensor(65536.0)):
        omega = GradientScale(loss_scale=loss_scale).omega(gradient)
        assert omega.dtype == torch.float32 and torch.equal(omega, expected)
