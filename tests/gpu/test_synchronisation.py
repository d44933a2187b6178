"""Once everything is proven, nothing in forward and backward waits for the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED
from ds_hilore.core.types import Action, Plan, UnitId
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.profiling.clock import clock_for
from ds_hilore.recovery.routing import RoutingTape
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import begin_update, claim, forward_of, grpo_loss, observe_logps, running
from ds_hilore.runtime.parts import ControllerParts
from ds_hilore.runtime.update import GradientScale
from tests.recovery.scenes import weights
from tests.runtime.rig import StubMeter, planner
from tests.waiting import no_waiting

H, R = Action.STORE, Action.RECOMPUTE
VOCABULARY, WIDTH = 32, 64


class Layer(nn.Module):
    """Attention and a gated MLP; the last projection is frozen beside an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(2 * WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.norm2(x)
        h = F.silu(self.gate(h)) * self.up(h)
        return x + self.down(h) + self.lora_b(F.dropout(self.lora_a(h), 0.1))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            controller = running()
            assert controller is not None
            x = controller.run_unit(layer.forward, (x,), {})
        logps = self.head(x).log_softmax(-1)
        return logps[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def _controller(model: Model, device: torch.device) -> Controller:
    names: dict[nn.Module, tuple[str, str]] = {layer: (f"layers.{i}", "Layer") for i, layer in enumerate(model.layers)}
    return Controller(
        ControllerParts(
            rank=0,
            unit_names=names,
            planner=planner(),
            meter=StubMeter(),
            clock=clock_for(device),
            scale=lambda passed_outputs: GradientScale(),
        )
    )


class Step:
    """One microbatch: facts, forward, loss and backward. Everything that it needs is on the device before."""

    def __init__(self, controller: Controller, model: Model, device: torch.device, shape: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.controller, self.model = controller, model
        self.ids = torch.randint(0, VOCABULARY, shape, generator=generator).to(device)
        self.advantages = torch.randn(shape[0], generator=generator).to(device)
        self.mask = (self.ids[:, 1:] > 3).to(device)
        self.old = -3 * torch.rand(shape[0], shape[1] - 1, generator=generator).to(device)
        self.tokens = self.mask.sum()

    def __call__(self, observed: bool) -> None:
        begin_update([self.advantages], [self.mask], self.tokens)
        with forward_of(self.controller):
            logps = self.model(self.ids)
        self.controller.outputs.mark(logps)
        if observed:
            loss = -(observe_logps(logps, self.mask) * self.advantages[:, None] * self.mask).sum() / self.tokens
        else:
            loss = grpo_loss(
                logps,
                self.old,
                self.advantages,
                self.mask,
                self.tokens,
                config=GRPOLossConfig(beta=0.04),
                ref_logps=self.old,
            )
        self.controller.begin_backward()
        loss.backward()
        self.controller.end_backward()
        self.model.zero_grad()
        self.controller.end_update()


@pytest.mark.parametrize("observed", [False, True], ids=["grpo_loss", "observe_logps"])
def test_nothing_waits_once_everything_is_proven(device: torch.device, observed: bool) -> None:
    torch.use_deterministic_algorithms(False)  # deterministic kernels may wait, and bits are not compared here
    model = weights(device, Model())
    assert isinstance(model, Model)
    controller = _controller(model, device)
    claim(controller)
    mixed = {UnitId("layers.0"): H, UnitId("layers.2"): H}
    plans = (H, R, OFFLOADED, INPUT_OFFLOADED, Plan(choice=dict.fromkeys(mixed, "H"), actions=mixed))
    warm, other_shape = (Step(controller, model, device, shape) for shape in ((2, 24), (3, 17)))
    for plan in plans:
        controller.force(plan)
        warm(observed)
    assert controller.dead["Layer"], "the frozen projection is to be skipped in what follows"
    for plan in plans:
        controller.force(plan)
        for step in (warm, other_shape):
            with no_waiting(device):
                step(observed)
    assert len(controller.coefficients) == 1


def test_routing_is_taken_again_without_waiting(device: torch.device) -> None:
    scores = torch.randn(7, 4, device=device, requires_grad=True)
    tape = RoutingTape()
    with no_waiting(device):
        with tape.recording():
            scores.topk(2)
        with tape.replaying():
            scores.topk(2)
    assert torch.equal(tape.choices[0], scores.topk(2).indices)


def test_the_check_itself_notices(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    for waits in (lambda: bool(x.sum() > 0), lambda: x.sum().item(), lambda: x[x > 0], x.nonzero):
        with pytest.raises((AssertionError, RuntimeError)), no_waiting(device):
            waits()
