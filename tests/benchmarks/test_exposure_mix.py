"""Microbatches of every kind have the coefficients that they are named for; what L adds is counted against exact."""

from __future__ import annotations

import pytest
import torch

from benchmarks.exposure_mix import AWARE, EXACT, STATIC, Group, added, mixed, ratio
from benchmarks.subject import Batch, Preset
from ds_hilore.objective.grpo import GRPOLossConfig, grpo_loss

SIZE = Preset(1, rows=6, row_tokens=40, turns=1, budgets=())


def exposures() -> dict[Group, float]:
    """Sum of |omega| of one microbatch of each kind."""
    batch = Batch.random(SIZE, vocabulary=11, seed=5)
    logps = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2)) - 3
    found = {}
    for kind in Group:
        made = mixed(batch, logps, kind, seed=1)
        leaf = logps.clone().requires_grad_()
        loss = grpo_loss(leaf, made.old_logps, made.advantages, made.mask, made.mask.sum(), config=GRPOLossConfig())
        (omega,) = torch.autograd.grad(loss, leaf)
        found[kind] = float(omega.abs().sum())
    return found


def test_kinds_differ_in_exposure_as_they_say() -> None:
    found = exposures()
    assert found[Group.ZERO] == 0
    assert 0 < found[Group.CLIPPED] < 0.25 * found[Group.ORDINARY]
    assert found[Group.LARGE] == pytest.approx(4 * found[Group.ORDINARY], rel=1e-5)


def test_what_l_adds_is_paired_by_turn() -> None:
    found = {
        EXACT: {"seconds": [10.0, 12.0, 11.0]},
        STATIC: {"seconds": [9.0, 11.0, 10.5]},
        AWARE: {"seconds": [8.5, 10.5, 9.0]},
    }
    assert added(found, STATIC, "seconds") == 1.0
    assert ratio(found, "seconds") == pytest.approx(1.5)
    found[STATIC]["seconds"] = [10.0, 12.5, 11.5]
    assert ratio(found, "seconds") is None
