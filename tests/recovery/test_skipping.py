"""A skipped projection computes nothing, and differentiates as if it had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_hilore.recovery.skipping import skipped


class Two(nn.Module):
    """A frozen projection, called twice, and what is added to it."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.projection(x) + 1.0, self.projection(x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear(3, 5), Conv1D(5, 3)], ids=["Linear", "Conv1D"])
def test_gradient_without_the_product(kind: nn.Module, autocast: bool) -> None:
    module = Two(kind)
    x = torch.randn(2, 4, 3, requires_grad=True)
    gradient = torch.randn(2, 4, 5)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            first, second = module(x)
        return first, second, torch.autograd.grad(first, x, gradient.to(first.dtype))[0]

    whole = run()
    with skipped(module, ["projection"]):
        part = run()
    assert torch.equal(part[0], torch.ones_like(part[0])) and part[0].dtype == whole[0].dtype
    assert torch.equal(part[1], whole[1])  # only the first call is dead
    assert part[2].dtype == whole[2].dtype
    assert torch.allclose(part[2], whole[2], atol=0.05 if autocast else 1e-6)


def test_everything_else_runs_as_it_is() -> None:
    module = nn.ModuleDict({"norm": nn.LayerNorm(3), "own": nn.Linear(3, 3)})
    module["own"].forward = lambda x: x
    x = torch.randn(1, 3)
    with skipped(module, ["norm", "own"]):
        assert torch.equal(module["norm"](x), nn.functional.layer_norm(x, (3,)))
        assert module["own"](x) is x


def test_modules_are_given_back_after_an_exception() -> None:
    module = Two(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="broken"), skipped(module, ["projection"]):
        raise ValueError("broken")
    assert "forward" not in module.projection.__dict__
