"""Pruned replays give the gradients of the plain model (NOTE [Pruning rules] in recovery/prune.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines import difference
from tests.models import llama, lora
from tests.recovery.plans import differences
from tests.recovery.pruning import Batch, PruningHost, batch

LAYERS = 3
#: Layout -> (batch, share of all positions that a replay may run at most).
LAYOUTS: dict[str, tuple[Batch, float]] = {
    "dead rows": (batch([16, 0, 16, 0], 16), 0.5),
    "lengths": (batch([64, 20, 0, 40], 64), 0.5),
    "left padding": (batch([64, 40, 0, 50], 64, left=[0, 16, 2, 30]), 0.45),
    "all dead": (batch([0, 0, 0], 16), 0.0),
    "all live": (batch([16, 16], 16), 1.0),
}


def _host(adapters: bool, **config: Any) -> PruningHost:
    model = llama(LAYERS, **config)
    return PruningHost(lora(model) if adapters else model)


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_the_plain_model(layout: str, adapters: bool) -> None:
    sample, most = LAYOUTS[layout]
    host = _host(adapters)
    ours = host.pruned_gradients(sample.loss)
    plain = host.gradients(sample.loss, None)
    assert host.pruning.refused == {}
    assert host.pruning.live_share is not None and host.pruning.live_share <= most
    assert difference(plain, ours) < 1e-6


def test_dead_rows_keep_the_bits_where_kernels_do() -> None:
    """Nothing dead: the replay runs as the plain unit does."""
    host = _host(adapters=True)
    sample, _ = LAYOUTS["all live"]
    assert differences(host.gradients(sample.loss, None), host.pruned_gradients(sample.loss)) == []


def test_forward_is_bitwise() -> None:
    sample, _ = LAYOUTS["lengths"]
    host = _host(adapters=True)
    host.pruned_gradients(sample.loss)
    pruned = sample.loss(host._switched_on())
    assert host.pruned() == LAYERS
    host.model.get_base_model()._set_gradient_checkpointing(enable=False)  # type: ignore[operator]
    assert torch.equal(pruned, sample.loss(host.model))


def test_p1_liveness_is_read_once_per_backward() -> None:
    """The gradient that a pruned unit hands on is known: nobody looks at it again."""
    host = _host(adapters=True)
    host.pruned_gradients(LAYOUTS["lengths"][0].loss)
    assert host.pruning.chain.reads == 1
