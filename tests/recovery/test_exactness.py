"""Exactness is the contract: gradients equal those of the model without checkpointing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.types import Action
from tests import models
from tests.recovery.plans import H, Host, R, adapted, differences, small_loss

PLANS = {"all-R": (R,), "all-H": (H,), "mixed": (H, R), "mixed-other": (R, R, H)}
#: Skipped calls that fact 14 of the design names, as paths below the unit.
DEAD = {
    "llama": {"mlp.down_proj.base_layer"},
    "qwen2": {"mlp.down_proj.base_layer"},
    "phi3": {"mlp.down_proj.base_layer"},
    "gemma3": set(),
    "gpt_neox": {"attention.dense.base_layer", "mlp.dense_4h_to_h.base_layer"},
}


@pytest.mark.parametrize("adapters", ["full", "lora", "lora-dropout", "dora"])
@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_plan_gives_the_plain_gradients(family: str, adapters: str) -> None:
    host = Host(adapted(family, adapters))
    plain = host.gradients(small_loss, None)
    assert differences(plain, host.gradients(small_loss, None)) == [], "the model itself is not deterministic"
    for name, plan in PLANS.items():
        assert differences(plain, host.gradients(small_loss, plan)) == [], name
    assert differences(plain, host.gradients(small_loss, (H,), drop=True)) == [], "stored, then dropped"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_replays_that_hold_all_they_save(family: str) -> None:
    host = Host(adapted(family, "lora"))
    plain = host.gradients(small_loss, None)
    host.context.lean_replay = False
    for name in ("all-R", "mixed"):
        assert differences(plain, host.gradients(small_loss, PLANS[name])) == [], name


@pytest.mark.parametrize("family", sorted(DEAD))
def test_dead_work_is_found_where_it_is_known(family: str) -> None:
    host = Host(adapted(family, "lora"))
    host.gradients(small_loss, (R,))
    found = {site.module for sites in host.context.dead_work.proven.values() for site in sites}
    assert found == DEAD[family]


def test_dead_work_is_not_run_in_replay() -> None:
    model = adapted("llama", "lora")
    host = Host(model)
    rows: list[int] = []
    projections = [m for n, m in model.named_modules() if n.endswith("down_proj.base_layer")]
    host.gradients(small_loss, (R,))  # proves
    for projection in projections:
        projection.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[-2]))
    host.gradients(small_loss, (R,))
    replayed = rows[len(projections) :]
    assert rows[: len(projections)] == [16] * len(projections)
    assert replayed == [0] * len(projections)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_other_precisions(family: str, dtype: torch.dtype) -> None:
    host = Host(adapted(family, "lora").to(dtype))
    plain = host.gradients(small_loss, None)
    for name, plan in PLANS.items():
        assert differences(plain, host.gradients(small_loss, plan)) == [], name


@pytest.mark.parametrize("adapters", ["full", "lora"])
def test_under_autocast(adapters: str) -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return small_loss(model)

    host = Host(adapted("llama", adapters))
    plain = host.gradients(loss, None)
    for name, plan in PLANS.items():
        assert differences(plain, host.gradients(loss, plan)) == [], name


def test_eager_attention_with_padding_mask() -> None:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = 0

    def loss(model: nn.Module) -> Tensor:
        return models.plain_loss(partial(model, attention_mask=mask), *models.batch(3))

    for attention in ("eager", "sdpa"):
        host = Host(models.lora(models.llama(attn_implementation=attention)))
        plain = host.gradients(loss, None)
        for name, plan in PLANS.items():
            assert differences(plain, host.gradients(loss, plan)) == [], (attention, name)


def test_shapes_may_change_from_call_to_call() -> None:
    host = Host(adapted("llama", "lora"))
    for rows, tokens in ((1, 5), (3, 16), (2, 33)):
        loss: Callable[[nn.Module], Tensor] = partial(small_loss, rows=rows, tokens=tokens)
        plain = host.gradients(loss, None)
        for plan in PLANS.values():
            assert differences(plain, host.gradients(loss, plan)) == []


def test_all_recipes_of_a_llama_layer_are_proven() -> None:
    host = Host(adapted("llama", "lora"))
    host.gradients(small_loss, (H,))
    assert host.context.proofs.rejected() == 0
    assert len(host.context.proofs.proven) >= 10


def _held_floats_per_token(adapters: str, family: str = "llama") -> tuple[float, float]:
    """(plain, ours) floats per token that one layer of width 64 saves, parameters and inputs left out of neither."""
    model = adapted(family, adapters)
    host = Host(model)
    host.actions = (Action.STORE,)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=host.checkpoint)  # type: ignore[operator]
    _keep = small_loss(model, tokens=128)
    ours = sum(host.calls[1].held_storages().values())
    plain: dict[int, int] = {}
    base._set_gradient_checkpointing(enable=False)  # type: ignore[operator]
    layer = models.decoder_layers(model)[1]

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            plain[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    original = layer.forward

    def watched(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return original(*args, **kwargs)

    layer.forward = watched  # type: ignore[method-assign]
    _keep_too = small_loss(model, tokens=128)
    return sum(plain.values()) / 4 / 256, ours / 4 / 256


@pytest.mark.parametrize("adapters", ["full", "lora"])
def test_stored_units_hold_base_tensors_only(adapters: str) -> None:
    plain, ours = _held_floats_per_token(adapters)
    assert ours < 0.75 * plain


@pytest.mark.parametrize("first", [True, False], ids=["first layer first", "last layer first"])
def test_layers_over_a_frozen_embedding_hold_the_same_in_any_order(first: bool) -> None:
    """The first layer's input needs no gradient, so its slots are others: what it cannot derive, its peers can."""
    model = models.lora(models.llama(layers=3))
    ids, advantages = models.batch(0)

    def held(actions: list[Action]) -> list[int]:
        found: list[int] = []

        def loss(m: nn.Module) -> Tensor:
            value = models.plain_loss(m, ids, advantages)
            found.extend(sum(call.held_storages().values()) for call in host.calls if call.action is H)
            return value

        host.gradients(loss, actions)
        return found

    host = Host(model)
    (alone,) = held([R, R, H])
    host = Host(model)
    everything = held([H]) if first else (held([R, R, H]), held([H]))[1]
    assert everything[1] == everything[2] == alone
