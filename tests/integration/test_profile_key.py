"""A profile belongs to a model, what of it is trained, and the machine; not to its weights or its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ds_hilore.integration.profile_key import profile_fingerprint
from ds_hilore.profiling.layout import Fingerprint
from tests import models


def key(model: nn.Module, **setting: Any) -> Fingerprint:
    given = {"zero_stage": 2, "world_size": 2, "loss_path": "chunked", "device": torch.device("cpu"), **setting}
    return profile_fingerprint(model, **given)


def changed(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {difference.partition(":")[0] for difference in one.differences(other)}


def test_the_same_model_with_other_weights_has_the_same_key() -> None:
    assert key(models.llama(seed=1)) == key(models.llama(seed=2))
    moved = models.llama()
    moved.config._name_or_path = "elsewhere"
    moved.config.use_cache, moved.config.pad_token_id = not moved.config.use_cache, 3  # as the Trainer does
    assert key(moved) == key(models.llama())


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (lambda: models.llama(layers=2), {"model", "trained"}),
        (lambda: models.llama(rope_theta=5e5), {"model"}),
        (lambda: models.llama().to(torch.bfloat16), {"dtypes"}),
        (lambda: models.llama(attn_implementation="eager"), {"attention"}),
        (lambda: models.lora(models.llama()), {"model", "trained", "dtypes"}),
    ],
    ids=["layers", "config", "dtype", "attention", "adapters"],
)
def test_what_changes_a_units_costs_changes_its_field(other: Any, fields: set[str]) -> None:
    assert changed(key(other()), key(models.llama())) == fields


def test_ranks_of_adapters_are_part_of_the_model() -> None:
    assert "model" in changed(key(models.lora(models.llama(), r=8)), key(models.lora(models.llama(), r=4)))


def test_scalings_of_adapters_are_part_of_the_model() -> None:
    """They have no shape, and change every gradient."""
    peft = pytest.importorskip("peft")
    made = [
        peft.get_peft_model(models.llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], **setting))
        for setting in ({"lora_alpha": 8}, {"lora_alpha": 64}, {"lora_alpha": 8, "use_rslora": True})
    ]
    assert changed(key(made[1]), key(made[0])) == {"model"} == changed(key(made[2]), key(made[0]))


def test_the_run_itself() -> None:
    here = key(models.llama())
    assert changed(key(models.llama(), zero_stage=3), here) == {"zero_stage"}
    assert changed(key(models.llama(), world_size=8), here) == {"world_size"}
    assert changed(key(models.llama(), loss_path="logits"), here) == {"loss_path"}
    assert changed(key(models.llama(), tensor_parallel=2), here) == {"tensor_parallel"}
    with torch.autocast("cpu", torch.bfloat16):
        assert changed(key(models.llama()), here) == {"dtypes"}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert changed(key(models.llama()), here) == {"device"}
    finally:
        torch.set_num_threads(threads)


@dataclass
class CoreConfig:
    """As Megatron-Core's: functions among plain values."""

    hidden_dropout: float = 0.0
    recompute_modules: list[str] | None = None
    init_method: Any = None


def test_plain_values_of_a_dataclass_are_part_of_the_model() -> None:
    def built(**settings: Any) -> nn.Module:
        model = nn.Linear(2, 2)
        model.config = CoreConfig(**settings)  # type: ignore[assignment]
        return model

    here = key(built(init_method=lambda: None))
    assert key(built(init_method=lambda: None)) == here
    assert changed(key(built(hidden_dropout=0.1)), here) == {"model"}
    assert changed(key(built(recompute_modules=["mlp"])), here) == {"model"}


def test_partitioned_parameters_have_their_whole_shape() -> None:
    """As under ZeRO-3, where a parameter is empty and carries its shape beside."""
    here = key(models.llama())
    partitioned = models.llama()
    for parameter in partitioned.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    assert key(partitioned) == here
