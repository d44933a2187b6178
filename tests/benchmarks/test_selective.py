"""Selective policies: what each leaves of a layer's replay, counted, with the gradients of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.methods import torch_checkpoint
from benchmarks.selective import POLICIES, selective_checkpoint
from tests import models

#: Products that a replay under LoRA need not run, because a policy kept their outputs. A replay ends before the last
#: adapter's second product.
KEPT_UNDER_LORA = {
    "llama": {
        "attention": 0,
        "down": 1,
        "attention+down": 1,
        "attention+projections": 4,
        "every_second_product": 10,  # of 21 it keeps 11; the last of them is the one that no replay runs
        "products": 7,
        "all_products": 20,
    },
    "phi3": {  # queries, keys and values are one product, gate and up another
        "attention": 0,
        "down": 1,
        "attention+down": 1,
        "attention+projections": 2,
        "every_second_product": 6,
        "products": 4,
        "all_products": 11,
    },
}


class Counter(TorchDispatchMode):
    """Products with a weight, and attention kernels, that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.kernels += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def backward(model: nn.Module, function: Callable[..., Any]) -> tuple[Counter, list[Tensor]]:
    """What the backward of one update runs when `function` calls the only layer, and its gradients."""
    layer = models.decoder_layers(model)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "forward", partial(function, layer.forward))
        loss = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits.square().mean()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with Counter() as counter:
        gradients = torch.autograd.grad(loss, parameters)
    return counter, list(gradients)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", KEPT_UNDER_LORA)
def test_what_a_policy_keeps_is_not_replayed(family: str, policy: str) -> None:
    model = models.lora(models.FAMILIES[family](layers=1)).train()
    plain, exact = backward(model, lambda function, *args, **kwargs: function(*args, **kwargs))
    replayed, _ = backward(model, torch_checkpoint)
    found, gradients = backward(model, selective_checkpoint(policy))
    assert replayed.products - found.products == KEPT_UNDER_LORA[family][policy]
    assert replayed.kernels - found.kernels == (policy != "down")
    assert plain.products == replayed.products - KEPT_UNDER_LORA[family]["all_products"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, exact, strict=True))


def test_products_with_a_bias_are_seen_too() -> None:
    model = models.qwen2(layers=1).train()  # biases on queries, keys and values
    replayed, _ = backward(model, torch_checkpoint)
    found, _ = backward(model, selective_checkpoint("attention+projections"))
    assert replayed.products - found.products == 4


def test_without_adapters_the_last_product_is_not_replayed_anyway() -> None:
    model = models.llama(layers=1).train()
    replayed, _ = backward(model, torch_checkpoint)
    found, _ = backward(model, selective_checkpoint("down"))
    assert found.products == replayed.products
