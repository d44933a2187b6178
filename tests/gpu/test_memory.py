"""What units hold is what the allocator says they hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests import models
from tests.gpu.allocator import measured
from tests.recovery.plans import H, Host, R

ROWS, TOKENS = 2, 256


def _host(device: torch.device, adapters: bool) -> Host:
    model = models.llama(layers=4, hidden=128)
    return Host((models.lora(model) if adapters else model).to(device))


def _install(host: Host, function: Callable[..., Any]) -> None:
    model: Any = host.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


def _loss(model: nn.Module, device: torch.device) -> Tensor:
    return models.plain_loss(model, *models.batch(3, ROWS, TOKENS, device))


def _update(host: Host, device: torch.device) -> tuple[int, int]:
    """(level after forward, peak) of forward and backward, gradients included."""
    host.model.zero_grad()
    host.calls.clear()
    known = [*host.model.parameters(), *host.model.buffers()]
    with measured(device, known) as allocator:
        loss = _loss(host.model, device)
        level = allocator.level()
        host.calls.clear()
        loss.backward()
        return level, allocator.peak()


@pytest.mark.parametrize("adapters", [True, False])
def test_replaying_everything_peaks_no_higher_than_torchs_checkpointing(device: torch.device, adapters: bool) -> None:
    host = _host(device, adapters)
    peaks = {}
    for name, function in (
        ("torch", partial(torch_checkpoint, use_reentrant=False)),
        ("ours", host.checkpoint),
    ):
        host.actions = (R,)
        _install(host, function)
        _update(host, device)  # proofs
        _, peaks[name] = _update(host, device)
    assert peaks["ours"] <= peaks["torch"]


@pytest.mark.parametrize("adapters", [True, False])
def test_stored_bytes_are_what_the_allocator_gave(device: torch.device, adapters: bool) -> None:
    host = _host(device, adapters)
    _install(host, host.checkpoint)
    level, told = {}, 0
    for action in (R, H):
        host.actions = (action,)
        _update(host, device)  # proofs
        level[action], _ = _update(host, device)
    host.actions = (H,)
    _keep = _loss(host.model, device)
    stored: dict[int, int] = {}
    inputs: dict[int, int] = {}
    for call in host.calls:
        stored |= call.held_storages()
        inputs |= call.input_storages()
    told = sum(stored.values()) - sum(inputs.values())
    assert told > 0
    assert abs(told - (level[H] - level[R])) <= 0.1 * told


def test_dropping_gives_the_bytes_back_at_once(device: torch.device) -> None:
    host = _host(device, True)
    _install(host, host.checkpoint)
    host.actions = (H,)
    known = [*host.model.parameters(), *host.model.buffers()]
    with measured(device, known) as allocator:
        _keep = _loss(host.model, device)
        before = allocator.level()
        freed = sum(sum(c.held_storages().values()) - sum(c.input_storages().values()) for c in host.calls)
        for call in host.calls:
            call.drop()
        assert abs((before - allocator.level()) - freed) <= 0.1 * freed
