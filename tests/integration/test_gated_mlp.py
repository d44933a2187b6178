"""Which MLPs run leaner inside units, and that they are the host's own again afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.types import Action
from ds_hilore.integration.gated_mlp import apply_gated_mlps, undo_gated_mlps
from ds_hilore.recovery import gated
from tests import models
from tests.recovery.plans import Host

H, R = Action.STORE, Action.RECOMPUTE


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the gates that ran through the lean function."""
    names: list[str] = []
    original = gated.GatedProduct.forward

    def forward(ctx: object, x: Tensor, up: Tensor, gate: gated.Gate) -> Tensor:
        names.append(gate.name)
        return original(ctx, x, up, gate)

    monkeypatch.setattr(gated.GatedProduct, "forward", staticmethod(forward))
    yield names


@pytest.mark.parametrize(
    "family, gate", [("llama", "silu"), ("qwen2", "silu"), ("phi3", "silu"), ("gemma3", "gelu_tanh")]
)
@pytest.mark.parametrize("tuned", ["lora", "full"])
def test_known_families_give_the_plain_gradients(family: str, gate: str, tuned: str, used: list[str]) -> None:
    model = models.FAMILIES[family]()
    if tuned == "lora":
        model = models.lora(model)
    ids, advantages = models.batch(0)
    host = Host(model)
    exact = host.gradients(lambda m: models.plain_loss(m, ids, advantages), None)
    layers = models.decoder_layers(model)
    assert len(apply_gated_mlps(layers)) == len(layers)
    for actions in ([H], [R], [H, R]):
        found = host.gradients(lambda m: models.plain_loss(m, ids, advantages), actions)
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[name], exact[name]) for name in exact)
    assert set(used) == {gate}


def test_outside_of_units_the_host_runs_its_own(used: list[str]) -> None:
    model = models.llama()
    apply_gated_mlps(models.decoder_layers(model))
    model(models.batch(0)[0])
    assert not used


def test_stored_units_hold_neither_activation_nor_product() -> None:
    model = models.llama()
    ids, advantages = models.batch(0)

    def held() -> int:
        host = Host(model)  # of its own: what was proven is numbered by slots
        host.gradients(lambda m: models.plain_loss(m, ids, advantages), [H])  # recipes are proven
        found: list[int] = []

        def loss(m: nn.Module) -> Tensor:
            value = models.plain_loss(m, ids, advantages)
            found.extend(sum(call.held_storages().values()) for call in host.calls)
            return value

        host.gradients(loss, [H])
        return found[0]

    with_recipes = held()
    apply_gated_mlps(models.decoder_layers(model))
    assert held() <= with_recipes


def test_another_forward_is_left_alone() -> None:
    model = models.llama()
    layers = models.decoder_layers(model)
    mlp = type(layers[0].mlp)

    class Clamped(mlp):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))

    class Swapped(nn.SiLU):
        pass

    layers[0].mlp.__class__ = Clamped
    layers[1].mlp.act_fn = nn.Tanh()
    layers[2].mlp.forward = lambda x: x
    assert apply_gated_mlps(layers) == []


def test_units_with_compiled_parts_are_left_alone() -> None:
    layers = models.decoder_layers(models.llama())
    layers[0].self_attn.compile()
    assert len(apply_gated_mlps(layers)) == len(layers) - 1


def test_undo_copy_and_pickle() -> None:
    model = models.llama()
    layers = models.decoder_layers(model)
    changed = apply_gated_mlps(layers)
    copied = copy.deepcopy(model)
    assert models.decoder_layers(copied)[0].mlp.forward.args[0] is models.decoder_layers(copied)[0].mlp
    pickle.loads(pickle.dumps(model))
    undo_gated_mlps(changed)
    assert all("forward" not in layer.mlp.__dict__ for layer in layers)
