"""Offload on a device with streams: copies that come late change nothing, and what is away is not on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, REPLAYED, STORED, Treatment
from ds_hilore.recovery.link import Link, StreamLink, Transfer
from tests import models
from tests.gpu.allocator import measured
from tests.recovery.links import LateLink, over
from tests.recovery.plans import Host, differences

PLANS = {
    "all-O": (OFFLOADED,),
    "all-R, inputs away": (INPUT_OFFLOADED,),
    "mixed": (OFFLOADED, STORED, INPUT_OFFLOADED, REPLAYED),
}
#: Cycles of the device's clock that a late copy waits: a few milliseconds, longer than a small unit takes.
LATE_CYCLES = 5_000_000


class SlowLink(StreamLink):
    """Its stream sleeps before every copy."""

    def to_host(self, source: Tensor) -> Transfer:
        return self._after_sleep(source, back=None)

    def to_device(self, sent: Transfer) -> Transfer:
        return self._after_sleep(None, back=sent)

    def _after_sleep(self, source: Tensor | None, back: Transfer | None) -> Transfer:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(LATE_CYCLES)
        if back is not None:
            return super().to_device(back)
        assert source is not None
        return super().to_host(source)


def _late(device: torch.device) -> Link:
    return SlowLink(device) if device.type == "cuda" else LateLink(seed=0)


def _loss(model: nn.Module, device: torch.device) -> Tensor:
    return models.plain_loss(model, *models.batch(3, tokens=64, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_late_copies_change_nothing(device: torch.device, dtype: torch.dtype) -> None:
    model = models.lora(models.llama(layers=4), lora_dropout=0.1).to(dtype).to(device)
    host = Host(model, over(_late(device)))
    plain = host.gradients(lambda m: _loss(m, device), None)
    for name, plan in PLANS.items():
        for _ in range(2):  # the second time in memory that was used before
            assert differences(plain, host.gradients(lambda m: _loss(m, device), plan)) == [], name
    assert differences(plain, host.gradients(lambda m: _loss(m, device), (OFFLOADED,), drop=True)) == []


@pytest.mark.parametrize("away", [OFFLOADED, INPUT_OFFLOADED], ids=["bundles", "inputs"])
def test_what_is_away_is_not_on_the_device(device: torch.device, away: Treatment) -> None:
    """After forward, no more than replaying everything holds, less its inputs. On the CPU host copies are counted too,
    and taken off."""
    levels, inputs = {}, 0
    for treatment in (REPLAYED, away):
        host = Host(models.lora(models.llama(layers=4, hidden=128)).to(device), actions=(treatment,))
        host.gradients(lambda m: _loss(m, device), (treatment,))  # proofs
        host.calls.clear()
        known = [*host.model.parameters(), *host.model.buffers()]
        with measured(device, known) as allocator:
            _keep = _loss(host.model, device)
            host.context.offload.let_go()
            away_bytes = sum(sum(call.host_storages().values()) for call in host.calls)
            levels[treatment] = allocator.level() - (away_bytes if device.type == "cpu" else 0)
        if treatment is REPLAYED:
            inputs = sum(call.shape.tokens * 128 * 4 for call in host.calls)
        else:
            assert away_bytes >= inputs > 0
    assert levels[away] <= levels[REPLAYED] - 0.9 * inputs + 0.1 * away_bytes
