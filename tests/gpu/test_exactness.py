"""Gradients are those of the plain model, bit for bit, on CUDA as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED
from ds_hilore.recovery.surroundings import Surroundings
from tests import models
from tests.recovery.plans import H, Host, R, differences
from tests.recovery.scenes import SCENES
from tests.recovery.test_rules import CASES, RMS_NORM, saves
from tests.recovery.units import WAYS, Scene, Units, assert_exact, gradients

PLANS = {
    "all-R": (R,),
    "all-H": (H,),
    "mixed": (H, R),
    "mixed-other": (R, R, H),
    "all-O": (OFFLOADED,),
    "inputs away": (INPUT_OFFLOADED,),
}


@pytest.mark.parametrize("name", SCENES)
def test_whatever_a_unit_takes_or_gives(device: torch.device, name: str) -> None:
    assert_exact(SCENES[name], device)


def _check(model: nn.Module, device: torch.device, autocast: bool = False) -> Host:
    host = Host(model.to(device))

    def loss(module: nn.Module) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            return models.plain_loss(module, *models.batch(3, tokens=32, device=device))

    plain = host.gradients(loss, None)
    assert differences(plain, host.gradients(loss, None)) == [], "the model itself is not deterministic"
    for name, plan in PLANS.items():
        assert differences(plain, host.gradients(loss, plan)) == [], name
    assert differences(plain, host.gradients(loss, (H,), drop=True)) == [], "stored, then dropped"
    return host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_adapters_with_dropout(device: torch.device, family: str, dtype: torch.dtype) -> None:
    """Dropout masks come from the device's own generator. Dead work and recipes are as on the CPU."""
    host = _check(models.lora(models.FAMILIES[family](), lora_dropout=0.1).to(dtype), device)
    dead = {site.module for sites in host.context.dead_work.proven.values() for site in sites}
    assert dead == (set() if family == "gemma3" else {"mlp.down_proj.base_layer"})
    assert host.context.proofs.rejected() == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_full_fine_tuning(device: torch.device, attention: str) -> None:
    _check(models.llama(attn_implementation=attention), device)


def test_mixture_of_experts(device: torch.device) -> None:
    _check(models.lora(models.mixtral(), ["q_proj", "v_proj"]), device)


@pytest.mark.parametrize("adapters", [True, False])
def test_under_autocast(device: torch.device, adapters: bool) -> None:
    model = models.llama()
    _check(models.lora(model) if adapters else model, device, autocast=True)


def test_the_devices_random_stream_goes_on_as_if_there_had_been_no_replay(device: torch.device) -> None:
    x = torch.ones(64, 64, device=device, requires_grad=True)
    masks: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        y = F.dropout(a.sin(), 0.5)
        masks.append(y.detach() == 0)
        return y.exp()

    for _, action, drop in WAYS:
        after = []
        for units in (None, Units(action)):
            masks.clear()
            torch.manual_seed(3)
            out = function(x) if units is None else units.run(function, x)
            if units is not None and drop:
                units.drop()
            torch.rand(5, device=device)
            out.sum().backward()
            after.append(torch.rand(5, device=device))
        assert torch.equal(after[0], after[1])
        assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_surroundings_hold_the_state_of_the_device_where_the_unit_runs(device: torch.device) -> None:
    surroundings = Surroundings(device)
    first = torch.rand(3, device=device)
    with surroundings.restored():
        assert torch.equal(torch.rand(3, device=device), first)
    assert not torch.equal(torch.rand(3, device=device), first)


@pytest.mark.parametrize("name", CASES)
def test_a_recipes_kernel_gives_the_same_bits_again(device: torch.device, name: str) -> None:
    assert_exact(_on(device, CASES[name][1]), device)


def test_the_fused_norm_of_the_device(device: torch.device) -> None:
    """On CUDA `rms_norm` is one kernel with a rule of its own, which needs the kernel's epsilon."""
    scene = _on(device, RMS_NORM)
    assert_exact(scene, device)
    units = Units(H)
    gradients(scene, units, device=device)
    fused = any(parts[0] == "rms_norm_1e-06" for parts in units.context.proofs._names)
    x = torch.ones(2, 64, device=device, requires_grad=True)
    node = F.rms_norm(x, (64,)).grad_fn
    assert node is not None and fused == (node.name() == "FusedRmsNormBackward0")


def _on(device: torch.device, function: Callable[[Tensor], Tensor]) -> Scene:
    """The scene of a rule; modules move to the device."""
    return saves(deepcopy(function).to(device) if isinstance(function, nn.Module) else function)
