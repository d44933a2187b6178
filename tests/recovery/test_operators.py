"""R:attention: a replay that takes the attention kernel's outputs from forward gives the same bits without it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hilore.core.errors import StateChanged
from ds_hilore.core.treatment import Treatment
from ds_hilore.recovery.operators import is_operator
from tests import models
from tests.recovery.plans import H, Host, R, differences, small_loss
from tests.recovery.units import Units, gradients

KEEPING = Treatment.parse("R:attention")


class _Count(TorchDispatchMode):
    """Calls of attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_operator(func, "attention"):
            self.calls["attention"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_gradients_are_the_plain_ones(family: str) -> None:
    model = models.FAMILIES[family]()
    adapted = (
        models.lora(model, ["q_proj", "v_proj"]) if family in ("mixtral", "qwen3_next") else models.lora(model, "all")
    )
    host = Host(adapted)
    plain = host.gradients(small_loss, None)
    for plan in ((KEEPING,), (KEEPING, H), (R, KEEPING)):
        assert differences(plain, host.gradients(small_loss, plan)) == []
    assert differences(plain, host.gradients(small_loss, (KEEPING,), drop=True)) == [], "kept, then dropped"


@pytest.mark.parametrize("plan", ["H", "R", "H:attention", "R:attention"])
def test_numbers_in_recipes_are_no_tensors_to_a_mode(plan: str) -> None:
    """GPT-2's gelu multiplies by numbers. While attention's outputs are taken, a mode would turn those into floats."""
    host = Host(models.llama(layers=2, hidden_act="gelu_new"))
    plain = host.gradients(small_loss, None)
    assert differences(plain, host.gradients(small_loss, (Treatment.parse(plan),))) == []


def test_replays_do_not_run_the_kernel() -> None:
    host = Host(models.llama(layers=3))
    host.gradients(small_loss, (R,))  # finds dead work, by replays of its own
    for plan, calls in (((R,), 6), ((KEEPING,), 3), ((Treatment.parse("H:attention"),), 3)):
        with _Count() as count:
            host.gradients(small_loss, plan)
        assert count.calls["attention"] == calls, plan


def test_kept_outputs_are_held_and_accounted() -> None:
    host = Host(models.llama(layers=1))
    host.actions = (R,)
    held = {}
    for plan in (R, KEEPING):
        seen: list[int] = []

        def look(model: nn.Module, seen: list[int] = seen) -> Tensor:
            loss = small_loss(model)
            seen.append(sum(host.calls[0].held_storages().values()))
            return loss

        host.gradients(look, (plan,))
        held[plan] = seen[0]
    rows, heads, tokens, width = 2, 4, 16, models.HIDDEN
    assert held[KEEPING] - held[R] == (rows * tokens * width + rows * heads * tokens) * 4


def test_a_kept_output_that_is_written_in_place_is_noticed() -> None:
    def scene(run: Any, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(1, 2, 8, 4, device=device, requires_grad=True)

        def attend(x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

        out = run(attend, x)
        loss = out.sum()
        with torch.no_grad():
            out.add_(1)
        return loss, [x]

    with pytest.raises(StateChanged, match="changed in place"):
        gradients(scene, Units(action=KEEPING))


def test_attention_with_dropout_runs_again() -> None:
    def scene(run: Any, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(1, 2, 8, 4, device=device, requires_grad=True)

        def attend(x: Tensor) -> Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            return torch.nn.functional.dropout(out, 0.5)

        return run(attend, x).square().sum(), [x]

    plain, kept = gradients(scene, None), gradients(scene, Units(action=KEEPING))
    assert all(torch.equal(a, b) for a, b in zip(plain, kept))  # type: ignore[arg-type]
