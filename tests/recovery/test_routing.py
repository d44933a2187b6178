"""A replay takes the forward's own routing (rule R8, recovery/routing.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hilore.recovery.routing import RoutingTape, has_router
from ds_hilore.recovery.unit import RecoveryContext
from tests import models
from tests.recovery.scenes import tensor, weights
from tests.recovery.units import CPU, WAYS, R, Run, Units, assert_exact, gradients

TopK = Callable[[Tensor], tuple[Tensor, Tensor]]
FORMS: dict[str, TopK] = {
    "function": lambda scores: torch.topk(scores, 2, dim=-1),
    "method": lambda scores: scores.topk(2),
    "positional": lambda scores: torch.topk(scores, 2, -1, True, True),
    "unsorted": lambda scores: torch.topk(scores, k=2, dim=-1, sorted=False),
    "first dimension": lambda scores: tuple(part.t() for part in scores.t().topk(2, dim=0)),  # type: ignore[return-value]
    "smallest": lambda scores: (-scores).topk(2, largest=False),
}


class TinyMoE(nn.Module):
    """Two of four experts per token. All experts' scores are near ties; `nudge` is added from the second run on."""

    def __init__(self, topk: TopK = FORMS["function"], nudge: Tensor | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.topk = topk
        self.nudge = nudge
        self.runs = 0
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        scores = self.router(x).flatten(0, 1)
        if self.nudge is not None and self.runs > 1:
            scores = scores + self.nudge
        values, indices = self.topk(scores)
        self.chosen.append(indices)
        shares = values.softmax(-1)
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for number, expert in enumerate(self.experts):
            token, place = torch.where(indices == number)
            out = out.index_add(0, token, F.silu(expert(flat[token])) * shares[token, place, None])
        return out.view_as(x)


def _tied(topk: TopK, nudge: Tensor | None) -> TinyMoE:
    module = weights(CPU, TinyMoE(topk, nudge))
    assert isinstance(module, TinyMoE)
    with torch.no_grad():
        module.router.weight.copy_(module.router.weight[:1] + 1e-9 * torch.randn(4, 64))
    return module


def _error(module: TinyMoE, units: Units, plain: list[Tensor | None]) -> float:
    found = gradients(_scene(module), units)
    pairs = [(a, b) for a, b in zip(plain, found, strict=True) if a is not None and b is not None]
    return max(float((a - b).norm() / (a.norm() + 1e-6)) for a, b in pairs)


def _scene(module: TinyMoE) -> Any:
    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        module.zero_grad()
        module.runs = 0
        module.chosen.clear()
        x = tensor(device, shape=(3, 8, 64))
        return run(module.forward, x * 1).square().sum(), [x, *module.experts.parameters()]

    return scene


@pytest.mark.parametrize("form", FORMS)
def test_near_a_tie_the_replay_takes_the_forwards_experts_in_their_order(form: str) -> None:
    """The nudge is of the size of rounding: without the tape it sends tokens to other experts."""
    nudge = 1e-6 * torch.randn(24, 4)
    module = _tied(FORMS[form], nudge)
    plain = gradients(_scene(module), None)
    assert _error(module, Units(R), plain) < 1e-4
    assert len(module.chosen) >= 2
    assert all(torch.equal(module.chosen[0], again) for again in module.chosen[1:])
    assert FORMS[form](nudge)[1].unique().numel() > 1


def test_without_the_tape_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail. Other experts save other shapes: an error, if not a wrong gradient."""
    from ds_hilore.core.errors import RecoveryMismatch

    module = _tied(FORMS["function"], 1e-6 * torch.randn(24, 4))
    plain = gradients(_scene(module), None)
    context = RecoveryContext()
    monkeypatch.setattr("ds_hilore.recovery.unit.tells_choices", lambda module: False)
    try:
        assert _error(module, Units(R, context), plain) > 1e-2
    except RecoveryMismatch:
        return


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_plain_ones_bit_for_bit(form: str) -> None:
    assert_exact(_scene(_tied(FORMS[form], None)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_choices_keep_their_order(dtype: torch.dtype) -> None:
    """Sparse attention chooses hundreds of keys: ranks must not be rounded to the scores' precision."""
    scores = torch.randn(2, 3, 700).to(dtype).requires_grad_()
    tape = RoutingTape()
    with tape.recording():
        values, indices = scores.topk(600)
    with tape.replaying():
        again, same_indices = (scores * 1).topk(600)
    assert torch.equal(indices, same_indices) and torch.equal(values, again)
    assert again.requires_grad and again.dtype is dtype


def test_a_forced_choice_saves_what_topk_saves() -> None:
    scores = torch.randn(5, 8, requires_grad=True)
    tape = RoutingTape()
    saved: list[tuple[torch.Size, torch.dtype]] = []

    def note(held: Tensor) -> Tensor:
        saved.append((held.shape, held.dtype))
        return held

    for scope in (tape.recording(), tape.replaying()):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda held: held), scope:
            scores.topk(3)
    assert len(saved) == 2 and saved[0] == saved[1]


def test_scores_without_grad_are_forced_as_well() -> None:
    tape = RoutingTape()
    with tape.recording():
        _, indices = torch.tensor([[1.0, 2.0, 3.0]]).topk(2)
    with tape.replaying():
        values, again = torch.tensor([[3.0, 2.0, 1.0]]).topk(2)
    assert torch.equal(again, indices) and values.tolist() == [[1.0, 2.0]] and not values.requires_grad


def test_other_operations_pass_through() -> None:
    tape = RoutingTape()
    with tape.recording(), tape.replaying():
        assert torch.equal(torch.ones(3).sort().values, torch.ones(3))
    assert tape.choices == []


def test_routers_are_found_by_their_class_names() -> None:
    assert has_router(models.decoder_layers(models.mixtral())[0])
    assert has_router(models.decoder_layers(models.qwen3_next())[0])
    assert not has_router(models.decoder_layers(models.llama())[0])
    assert not has_router(None)


def test_choices_count_as_what_a_replay_holds() -> None:
    module = _tied(FORMS["function"], None)
    units = Units(R)
    x = tensor(CPU, shape=(3, 8, 64))
    _out = units.run(module.forward, x)
    assert sum(units.calls[0].input_storages().values()) == x.untyped_storage().nbytes() + 24 * 2 * 8


def test_a_compiled_child_stays_compiled() -> None:
    """Recording and replaying are modes: each costs the child one more compilation, and no other call falls apart."""
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounter

    reset()
    counter = CompileCounter()
    module = weights(CPU, TinyMoE())
    compiled = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.SiLU()), backend=counter)

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        module.zero_grad()
        x = tensor(device, shape=(3, 8, 64))
        return run(Both(module, compiled).forward, x * 1).square().sum(), [x, *module.experts.parameters()]

    for _, action, drop in WAYS:
        context = RecoveryContext()
        plain = gradients(scene, None)
        for _ in range(2):
            found = gradients(scene, Units(action, context), drop)
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True) if a is not None and b is not None)
    assert counter.frame_count <= 3
    reset()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_compiled_router_chooses_again_by_itself(wrapped: bool) -> None:
    """Under a tape it would be compiled anew, and save other tensors in replay than in forward."""
    from torch._dynamo import reset

    reset()
    moe: Any = weights(CPU, TinyMoE())
    if wrapped:
        moe = torch.compile(moe, backend="aot_eager")
    else:
        moe.compile(backend="aot_eager")
    unit = nn.Sequential(weights(CPU, nn.Linear(64, 64)), moe)

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        unit.zero_grad()
        x = tensor(device, shape=(3, 8, 64))
        return run(unit.forward, x * 1).square().sum(), [x, *moe.parameters()]

    assert_exact(scene)
    reset()


class Both(nn.Module):
    def __init__(self, moe: nn.Module, compiled: nn.Module) -> None:
        super().__init__()
        self.moe = moe
        self.compiled = compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.compiled(x)) * x
