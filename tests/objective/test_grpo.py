"""omega against autograd, the loss against the forms of TRL, and the borders between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.grpo import (
    Algorithm,
    GRPOLossConfig,
    Normalisation,
    RatioLevel,
    first_pass_coefficients,
    grpo_loss,
    token_coefficients,
)
from ds_hilore.objective.update import UpdateSize
from tests.objective.cases import Microbatch, Watcher, microbatches, untimed

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@given(microbatches())
@untimed(max_examples=400)
def test_omega_is_the_gradient_of_the_loss(case: Microbatch) -> None:
    loss, grad = case.loss_and_grad()
    assert loss.dtype == torch.float64 and loss.dim() == 0
    torch.testing.assert_close(case.omega(), grad, **CLOSE)


@given(microbatches(), st.integers(0, 2**31))
@untimed(max_examples=200)
def test_what_masked_positions_hold_changes_no_bit(case: Microbatch, seed: int) -> None:
    loss, grad = case.loss_and_grad()
    spoilt = case.with_garbage(seed)
    spoilt_loss, spoilt_grad = spoilt.loss_and_grad()
    assert torch.equal(spoilt_loss, loss)
    assert torch.equal(spoilt_grad, grad)
    assert torch.equal(spoilt.omega(), case.omega())
    assert torch.equal(spoilt.omega()[~case.mask.bool()], torch.zeros_like(grad)[~case.mask.bool()])


@given(microbatches())
@untimed(max_examples=200)
def test_value_and_gradient_are_those_of_the_textbook_form(case: Microbatch) -> None:
    loss, grad = case.loss_and_grad()
    logps = case.logps.clone().requires_grad_()
    expected = textbook_loss(replace(case, logps=logps))
    (expected_grad,) = torch.autograd.grad(expected, logps)
    torch.testing.assert_close(loss, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)


def textbook_loss(case: Microbatch) -> Tensor:
    """The family with min and clamp, as TRL's trainer and the papers state it; needs finite masked values."""
    config, mask = case.config, case.mask.to(torch.float64)
    column = {1: lambda x: x.unsqueeze(1), 2: lambda x: x}
    advantages = column[case.advantages.dim()](case.advantages)
    weights = 1.0 if case.weights is None else column[case.weights.dim()](case.weights)
    gap = case.logps - (case.logps.detach() if case.old_logps is None else case.old_logps)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    if config.level is RatioLevel.SEQUENCE:
        gap = (gap * mask).sum(1, keepdim=True) / lengths
    ratio = gap.exp()
    if config.algorithm is Algorithm.CISPO:
        policy = -ratio.clamp(max=config.cispo_cap).detach() * advantages * case.logps
    else:
        first = ratio if config.delta is None else ratio.clamp(max=config.delta)
        second = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
        policy = -torch.min(first * advantages, second * advantages)
    gap_ref = case.ref_logps - case.logps
    kl = (gap_ref.exp() - gap_ref - 1) * (ratio if config.kl_with_ratio else 1.0)
    per_token = (policy * weights + config.beta * kl) * mask
    rows = max(case.size.rows, 1)
    if config.normalisation is Normalisation.TOKEN:
        return per_token.sum() / max(case.size.tokens, 1)
    if config.normalisation is Normalisation.SEQUENCE:
        return (per_token.sum(1, keepdim=True) / lengths).sum() / rows
    return per_token.sum() / (rows * config.row_length)


# --- The losses of TRL by name, two microbatches against one whole update.


def _trl_mean(name: str, per_token: list[Tensor], masks: list[Tensor]) -> Tensor:
    """How TRL joins the per-token losses of the microbatches of one step (one process)."""
    steps = len(masks)
    pairs = [(loss * mask, mask) for loss, mask in zip(per_token, masks)]
    if name == "dapo":
        return sum(loss.sum() for loss, _ in pairs) / sum(mask.sum() for mask in masks)
    if name == "bnpo":
        return sum(loss.sum() / mask.sum() for loss, mask in pairs) / steps
    if name == "dr_grpo":
        return sum(loss.sum() / (len(mask) * 16) for loss, mask in pairs) / steps
    return sum((loss.sum(1) / mask.sum(1).clamp(min=1)).mean() for loss, mask in pairs) / steps


TRL_LOSSES = {
    "dapo": GRPOLossConfig(eps_high=0.28),
    "grpo": GRPOLossConfig(normalisation=Normalisation.SEQUENCE),
    "gspo": GRPOLossConfig(
        eps_low=3e-2, eps_high=4e-2, level=RatioLevel.SEQUENCE, normalisation=Normalisation.SEQUENCE
    ),
    "dr_grpo": GRPOLossConfig(normalisation=Normalisation.CONSTANT, row_length=16),
    "cispo": GRPOLossConfig(algorithm=Algorithm.CISPO, cispo_cap=1.2),
}


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_microbatches_add_up_to_trl_loss(name: str) -> None:
    config, generator = TRL_LOSSES[name], torch.Generator().manual_seed(3)
    masks = [torch.rand(4, 9, generator=generator) < 0.7 for _ in range(2)]
    masks[0][1] = False  # a truncated response; it still counts as a row
    size = UpdateSize(tokens=sum(int(m.sum()) for m in masks), rows=8)
    shares, per_token = [], []
    for mask in masks:
        logps, noise = (torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
        old, advantages = logps + 0.3 * noise, torch.randn(4, generator=generator, dtype=torch.float64)
        shares.append(grpo_loss(logps, old, advantages, mask, size, config=config))
        gap = logps - old
        if name == "gspo":
            gap = (gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ratio, sign = gap.exp(), advantages[:, None]
        clipped = torch.min(ratio * sign, ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * sign)
        per_token.append(-(ratio.clamp(max=1.2) * sign * logps if name == "cispo" else clipped))
    expected = _trl_mean("dapo" if name == "cispo" else name, per_token, masks)
    torch.testing.assert_close(sum(shares), expected, **CLOSE)


def test_bnpo_is_token_normalisation_over_one_microbatch() -> None:
    logps = torch.randn(3, 5, dtype=torch.float64)
    old, advantages, mask = logps + 0.3 * torch.randn_like(logps), torch.randn(3), torch.rand(3, 5) < 0.7
    mask[0, 0] = True
    ratio, sign = (logps - old).exp(), advantages[:, None].double()
    expected = _trl_mean("bnpo", [-torch.min(ratio * sign, ratio.clamp(0.8, 1.2) * sign)], [mask])
    loss = grpo_loss(logps, old, advantages, mask, mask.sum(), config=GRPOLossConfig())
    torch.testing.assert_close(loss, expected, **CLOSE)


# --- Borders. exp(d) is the ratio to the last bit, and the bounds are set to it: 1 + (exp(d) - 1) loses nothing.

UP, DOWN, FAR = math.exp(0.2), math.exp(-0.3), math.exp(0.5)


def _bounds(**more: Any) -> GRPOLossConfig:
    return GRPOLossConfig(eps_low=1 - DOWN, eps_high=UP - 1, delta=FAR, **more)


BORDERS = [
    # log ratio, A, active
    (0.2, 1.0, True),  # at 1 + eps_high
    (0.2 + 1e-12, 1.0, False),
    (0.2 - 1e-12, 1.0, True),
    (0.2 + 1e-12, -1.0, True),
    (-0.3, -1.0, True),  # at 1 - eps_low
    (-0.3 - 1e-12, -1.0, False),
    (-0.3 + 1e-12, -1.0, True),
    (-0.3 - 1e-12, 1.0, True),
    (0.5, -1.0, True),  # at delta
    (0.5 + 1e-12, -1.0, False),
    (0.5 - 1e-12, -1.0, True),
    (0.5 + 1e-12, 1.0, False),
    (0.0, 0.0, True),
    (-50.0, 1.0, True),
    (-2000.0, 1.0, True),  # ratio underflows to 0
    (2000.0, 1.0, False),  # ratio overflows; the gradient is 0 and not NaN
    (2000.0, -1.0, False),
]


@pytest.mark.parametrize("level", RatioLevel)
@pytest.mark.parametrize(("gap", "advantage", "active"), BORDERS)
def test_borders_of_the_clip(gap: float, advantage: float, active: bool, level: RatioLevel) -> None:
    config = _bounds(level=level)
    assert 1 + config.eps_high == torch.tensor(0.2, dtype=torch.float64).exp().item()
    assert 1 - config.eps_low == torch.tensor(-0.3, dtype=torch.float64).exp().item()
    logps = torch.full((1, 2), gap, dtype=torch.float64, requires_grad=True)  # a mean of two equal gaps is exact
    arguments = (torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2), 2)
    loss = grpo_loss(logps, *arguments, config=config)
    (grad,) = torch.autograd.grad(loss, logps)
    expected = -advantage * math.exp(gap) / 2 if active else 0.0
    torch.testing.assert_close(grad, torch.full_like(grad, expected), **CLOSE)
    torch.testing.assert_close(token_coefficients(logps, *arguments, config=config), grad, **CLOSE)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("advantage", [0.0, -0.0, 1.0])
def test_an_overflowing_ratio_without_delta_gives_zero_and_not_nan(advantage: float) -> None:
    """A = 0 belongs to A >= 0, hence is clipped here; as an active position it would be 0 * inf."""
    logps = torch.tensor([[2000.0]], requires_grad=True)
    arguments = (torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), 1)
    loss = grpo_loss(logps, *arguments, config=GRPOLossConfig())
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 * advantage)
    assert logps.grad is not None and logps.grad.item() == 0.0
    assert token_coefficients(logps, *arguments, config=GRPOLossConfig()).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_borders_agree_with_clamp_in_every_precision(dtype: torch.dtype) -> None:
    """Ratios one step around bounds that no float holds exactly (1.2, 0.8): our comparison rounds as clamp does."""
    for bound, sign in ((1.2, 1.0), (0.8, -1.0)):
        near = torch.tensor(bound, dtype=dtype).log() + torch.arange(-40, 41, dtype=dtype) * torch.finfo(dtype).eps / 8
        logps = near[None].clone().requires_grad_()
        advantages, mask = torch.full((1,), sign, dtype=dtype), torch.ones(1, 81)
        loss = grpo_loss(logps, torch.zeros_like(near)[None], advantages, mask, 1, config=GRPOLossConfig())
        ratio = logps.exp()
        textbook = -torch.min(ratio * sign, ratio.clamp(0.8, 1.2) * sign).sum()
        (grad,), (expected,) = torch.autograd.grad(loss, logps), torch.autograd.grad(textbook, logps)
        assert torch.equal(grad == 0, expected == 0)
        assert 0 < (grad == 0).sum() < grad.numel()


def test_design_formula_of_kl_with_ratio() -> None:
    """design.md section 3: -beta*ratio*s per token; beta*ratio*((1 - exp(s)) + mean k3) with a sequence's ratio."""
    logps, old, ref = (torch.randn(2, 4, dtype=torch.float64) for _ in range(3))
    mask, s = torch.ones(2, 4), ref - logps
    for level in RatioLevel:
        config = GRPOLossConfig(beta=0.3, kl_with_ratio=True, level=level)
        omega = token_coefficients(logps, old, torch.zeros(2), mask, 8, config=config, ref_logps=ref)
        ratio = (logps - old).exp()
        expected = -0.3 * ratio * s / 8
        if level is RatioLevel.SEQUENCE:
            ratio = (logps - old).mean(1, keepdim=True).exp()
            expected = 0.3 * ratio * ((1 - s.exp()) + (s.exp() - s - 1).mean(1, keepdim=True)) / 8
        torch.testing.assert_close(omega, expected, **CLOSE)


# --- What else is promised.


@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize("level", RatioLevel)
def test_all_masked_gives_zero_and_not_nan(level: RatioLevel, normalisation: Normalisation) -> None:
    row_length = 4 if normalisation is Normalisation.CONSTANT else None
    config = GRPOLossConfig(level=level, normalisation=normalisation, row_length=row_length, beta=0.1)
    nan, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)
    case = Microbatch(nan, nan, nan[:, 0], mask, UpdateSize(torch.tensor(0), 0), config, nan, nan)
    loss, grad = case.loss_and_grad()
    assert loss.item() == 0.0
    assert torch.equal(grad, torch.zeros(2, 3))
    assert torch.equal(case.omega(), torch.zeros(2, 3))


@given(microbatches())
@untimed(max_examples=50)
def test_omega_falls_with_the_size_of_the_update(case: Microbatch) -> None:
    once = replace(case, size=UpdateSize(tokens=8, rows=8)).omega()
    tensors = UpdateSize(tokens=torch.tensor(16), rows=torch.tensor(16.0))
    assert torch.equal(replace(case, size=tensors).omega() * 2, once)


@given(microbatches(dtype=torch.bfloat16))
@untimed(max_examples=100)
def test_bfloat16_is_widened_first(case: Microbatch) -> None:
    wide = replace(
        case,
        logps=case.logps.float(),
        old_logps=None if case.old_logps is None else case.old_logps.float(),
        advantages=case.advantages.float(),
        ref_logps=case.ref_logps.float(),
        weights=None if case.weights is None else case.weights.float(),
    )
    loss, grad = case.loss_and_grad()
    wide_loss, wide_grad = wide.loss_and_grad()
    assert loss.dtype == case.omega().dtype == torch.float32
    assert torch.equal(loss, wide_loss)
    assert torch.equal(case.omega(), wide.omega())
    assert torch.equal(grad, wide_grad.bfloat16())


@given(microbatches())
@untimed(max_examples=50)
def test_no_old_logps_means_ratio_one_with_gradient(case: Microbatch) -> None:
    without, same = replace(case, old_logps=None), replace(case, old_logps=case.logps)
    assert torch.equal(without.omega(), same.omega())
    first = first_pass_coefficients(case.advantages, case.mask, case.size, config=case.config, weights=case.weights)
    no_kl = replace(without, config=replace(case.config, beta=0.0))
    torch.testing.assert_close(first, no_kl.omega(), **CLOSE)


def test_weights_act_on_the_policy_term_and_not_on_the_kl() -> None:
    logps, ref = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    arguments = (logps, None, torch.ones(3), torch.ones(3, 4), 12)
    with_kl = GRPOLossConfig(beta=0.1)
    zero = torch.zeros(3, 1)
    only_kl = token_coefficients(*arguments, config=with_kl, ref_logps=ref, weights=zero)
    torch.testing.assert_close(only_kl, 0.1 * (1 - (ref - logps).exp()) / 12, **CLOSE)
    dead = first_pass_coefficients(torch.ones(3), torch.ones(3, 4), 12, config=with_kl, weights=zero)
    assert torch.count_nonzero(dead) == 0


@pytest.mark.parametrize("argument", ["logps", "old_logps", "advantages", "ref_logps", "weights"])
def test_nan_at_a_live_position_stays_visible(argument: str) -> None:
    tensors = {name: torch.zeros(2, 3) for name in ("logps", "old_logps", "advantages", "ref_logps", "weights")}
    tensors["advantages"] += 1
    tensors["weights"] += 1
    tensors[argument][1, 2] = math.nan
    case = Microbatch(mask=torch.ones(2, 3), size=UpdateSize(6, 2), config=GRPOLossConfig(beta=0.1), **tensors)
    loss, grad = case.loss_and_grad()
    assert loss.isnan()
    for found in (grad, case.omega()):
        assert found[1, 2].isnan() and found.isnan().sum() == 1


def test_only_logps_carry_gradient() -> None:
    tensors = [torch.zeros(2, 3, requires_grad=True) for _ in range(5)]
    logps, old, advantages, ref, weights = tensors
    config = GRPOLossConfig(beta=0.1)
    loss = grpo_loss(logps, old, advantages + 1, torch.ones(2, 3), 6, config=config, ref_logps=ref, weights=weights + 1)
    loss.backward()
    assert [t.grad is not None for t in tensors] == [True, False, False, False, False]


@given(microbatches())
@untimed(max_examples=30)
def test_nothing_waits_for_the_device(case: Microbatch) -> None:
    on_device = replace(case, size=UpdateSize(torch.tensor(9), torch.tensor(4)))
    with Watcher() as watcher:
        on_device.loss_and_grad()
        on_device.omega()
    assert watcher.seen.host_reads == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"eps_low": 1.5}, "eps_low=1.5"),
        ({"eps_high": -0.1}, "eps_high=-0.1"),
        ({"eps_high": math.inf}, "use CISPO"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"beta": math.nan}, "beta=nan"),
        ({"cispo_cap": 0.0}, "cispo_cap=0.0"),
        ({"delta": 1.1}, "1 \\+ eps_high"),
        ({"delta": 2.0, "algorithm": Algorithm.CISPO}, "set cispo_cap"),
        ({"normalisation": Normalisation.CONSTANT}, "row_length=None"),
        ({"row_length": 5}, "only read by CONSTANT"),
        ({"level": "token"}, "RatioLevel"),
    ],
)
def test_wrong_configs_name_their_fault(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        GRPOLossConfig(**arguments)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"logps": torch.zeros(3)}, "logps has shape"),
        ({"old_logps": torch.zeros(2, 4)}, "old_logps has shape"),
        ({"mask": torch.ones(3, 3)}, "mask has shape"),
        ({"advantages": torch.zeros(3)}, "advantages has shape"),
        ({"weights": torch.zeros(1, 3)}, "weights has shape"),
        ({"config": GRPOLossConfig(beta=0.1)}, "needs ref_logps"),
        ({"config": GRPOLossConfig(normalisation=Normalisation.SEQUENCE)}, "UpdateSize"),
    ],
)
def test_wrong_arguments_name_their_fault(change: dict[str, Any], fault: str) -> None:
    arguments = {
        "logps": torch.zeros(2, 3),
        "old_logps": None,
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3),
        "num_tokens": 6,
        "config": GRPOLossConfig(),
    } | change
    for function in (grpo_loss, token_coefficients):
        with pytest.raises(UsageError, match=fault):
            function(**arguments)
