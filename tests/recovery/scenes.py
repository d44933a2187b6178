"""Everything that a unit may take or give, as small scenes (units.py) that run on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.recovery.units import Run, Scene

Result = tuple[Tensor, Sequence[Tensor]]
B, T, W = 3, 8, 64  # rows, tokens, width: 6 KB in float32, above the size from which recipes are used


def tensor(device: torch.device, seed: int = 0, shape: tuple[int, ...] = (B, T, W), grad: bool = True) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return drawn.requires_grad_(grad)


def weights(device: torch.device, module: nn.Module, seed: int = 9) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.to(device)


class Block(nn.Module):
    """A gated MLP with a norm and a residual."""

    def __init__(self, dropout: float = 0.0, width: int = W) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.norm(x) * self.scale
        out = x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))
        return out if shift is None else out + shift.sin()


def _block(device: torch.device, dropout: float = 0.0) -> Block:
    block = weights(device, Block(dropout))
    assert isinstance(block, Block)
    return block


def _all(*groups: Any) -> list[Tensor]:
    return [leaf for group in groups for leaf in ([group] if isinstance(group, Tensor) else group.parameters())]


# -- what goes in --------------------------------------------------------------------------------------------------


def tensors_in_kwargs(run: Run, device: torch.device) -> Result:
    block, x, shift = _block(device), tensor(device), tensor(device, 1)
    return run(block.forward, x, shift=shift).square().sum(), _all(x, shift, block)


def tensors_in_partial(run: Run, device: torch.device) -> Result:
    """As transformers hands them over: partial(forward, self, **kwargs), here inside another partial."""
    block, x, shift = _block(device), tensor(device), tensor(device, 1)
    inner = partial(Block.forward, block, shift=shift)
    return run(partial(inner), x).square().sum(), _all(x, shift, block)


def none_and_objects(run: Run, device: torch.device) -> Result:
    class Settings:
        factor = 3.0

    def function(x: Tensor, nothing: None, name: str, settings: Settings, count: int) -> Tensor:
        assert nothing is None and name == "name"
        return (x * settings.factor).sin() * count

    x = tensor(device)
    return run(function, x * 1, None, "name", Settings(), 2).sum(), [x]


def containers(run: Run, device: torch.device) -> Result:
    """Tensors in tuples, lists and dicts, in and out."""

    def function(pair: tuple[Tensor, Any], bag: dict[str, Any]) -> dict[str, Any]:
        left, (right, *_) = pair
        return {"sum": left.sin() * right, "rest": [bag["x"].exp(), (bag["deep"]["y"] * left, None)]}

    x, y = tensor(device), tensor(device, 1)
    out = run(function, (x * 1, [y.cos(), 7]), {"x": y * 2, "deep": {"y": y}})
    return out["sum"].sum() + out["rest"][0].sum() + out["rest"][1][0].sum(), [x, y]


def parameter_as_input(run: Run, device: torch.device) -> Result:
    weight, x = nn.Parameter(tensor(device, 2, (W, W)).detach()), tensor(device)
    return run(lambda a, w: F.silu(a @ w), x, weight).square().sum(), [x, weight]


def view_of_parameter_as_input(run: Run, device: torch.device) -> Result:
    """A class token for every row, and the same parameter used directly."""
    token, x = nn.Parameter(tensor(device, 2, (1, T, W)).detach()), tensor(device)
    return run(lambda a, t: (a * t).sin() * token[0], x, token.expand(B, T, W)).square().sum(), [x, token]


def inputs_without_grad(run: Run, device: torch.device) -> Result:
    block, x = _block(device), tensor(device, grad=False)
    return run(block.forward, x).square().sum(), _all(block)


def frozen_parameters(run: Run, device: torch.device) -> Result:
    block, x = _block(device).requires_grad_(False), tensor(device)
    return run(block.forward, x).square().sum(), [x]


def leaf_views_and_non_leaves(run: Run, device: torch.device) -> Result:
    """Inputs that are offset, transposed, strided and broadcast views, with grad and without."""

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a * b).sigmoid() * c.exp() + (d * a).sin()

    x, y, row = tensor(device, 0, (B + 2, T, 2 * W)), tensor(device, 1, (T, B, W)), tensor(device, 2, (1, 1, W))
    no_grad = y.detach().transpose(0, 1)[:, :, :]
    offset = x[2:, :, 5 : 5 + W]
    return run(function, offset, y.transpose(0, 1), no_grad, row.expand(B, T, W)).sum(), [x, y, row]


def integers(run: Run, device: torch.device) -> Result:
    """Token ids, positions and a boolean mask; an offset view of integers."""

    def function(ids: Tensor, keep: Tensor, x: Tensor, table: Tensor) -> Tensor:
        looked_up = F.embedding(ids, table)
        picked = x.gather(1, ids[..., None].expand_as(x) % T)
        return torch.where(keep[..., None], looked_up * picked, x.sin())

    ids = torch.randint(0, 11, (B, T + 3), generator=torch.Generator().manual_seed(3)).to(device)[:, 3:]
    x, table = tensor(device), nn.Parameter(tensor(device, 4, (11, W)).detach())
    return run(function, ids, ids > 4, x, table).square().sum(), [x, table]


def same_tensor_twice(run: Run, device: torch.device) -> Result:
    x = tensor(device)
    y = x * 2
    return run(lambda a, b: a.sin() * b + a, y, y).sum(), [x]


# -- what happens inside -------------------------------------------------------------------------------------------


def nested_units(run: Run, device: torch.device) -> Result:
    """R7: the inner call belongs to the outer one."""
    block, other, x = _block(device), _block(device), tensor(device)

    def outer(a: Tensor) -> Tensor:
        return other(run(block.forward, a).sin())

    return run(outer, x).square().sum(), _all(x, block, other)


def torch_checkpoint_inside(run: Run, device: torch.device, reentrant: bool = False) -> Result:
    block, other, x = _block(device, 0.2), _block(device), tensor(device)

    def function(a: Tensor) -> Tensor:
        inner = torch_checkpoint(block.forward, a.sin(), use_reentrant=reentrant)
        return other(inner) * a

    return run(function, x * 1).square().sum(), _all(x, block, other)


def reentrant_checkpoint_inside(run: Run, device: torch.device) -> Result:
    return torch_checkpoint_inside(run, device, reentrant=True)


def nothing_saved(run: Run, device: torch.device) -> Result:
    x, y = tensor(device), tensor(device, 1)
    return run(lambda a, b: a + b.transpose(0, 1).transpose(0, 1), x * 1, y).square().sum(), [x, y]


def parameters_saved_only(run: Run, device: torch.device) -> Result:
    layer, x = weights(device, nn.Linear(W, W)).requires_grad_(False), tensor(device)
    return run(layer.forward, x).square().sum(), [x]


class Cube(torch.autograd.Function):
    """Reads its saved tensors twice, as index access does; saves an input, an intermediate and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        out = square * x
        ctx.save_for_backward(x, square, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        square = ctx.saved_tensors[1]
        x, out = ctx.saved_tensors[0], ctx.saved_tensors[2]
        return grads[0] * (3 * square + 0 * out * x)


def custom_function(run: Run, device: torch.device) -> Result:
    block, x = _block(device), tensor(device)
    return run(lambda a: Cube.apply(block(a).tanh()) * a, x).sum(), _all(x, block)


def in_place_work(run: Run, device: torch.device) -> Result:
    def function(a: Tensor) -> Tensor:
        b = a * 2
        b[..., ::2].mul_(3)
        b.add_(a.sin()).sigmoid_()
        c = torch.zeros_like(b)
        c[:, 1:] = b[:, :-1]
        return c * b

    x = tensor(device)
    return run(function, x * 1).sum(), [x]


def edited_under_no_grad(run: Run, device: torch.device) -> Result:
    """The node of `y` does not tell that y was changed: a recipe from it would be wrong."""

    def function(a: Tensor, w: Tensor) -> Tensor:
        y = F.silu(a)
        first = y * w
        del first
        with torch.no_grad():
            y.mul_(2)
        return y * w

    x, w = tensor(device), tensor(device, 1)
    return run(function, x.detach() * 1 + w * 0, w).sum(), [w]


def shared_layer_twice(run: Run, device: torch.device) -> Result:
    block, x = _block(device, 0.1), tensor(device)
    return run(block.forward, run(block.forward, x)).square().sum(), _all(x, block)


def buffers(run: Run, device: torch.device) -> Result:
    """Read ones, and batch statistics, whose update in forward is no edit between forward and backward."""
    block, x = _block(device), tensor(device)
    norm = nn.BatchNorm1d(W).to(device)
    return run(lambda a: norm(block(a).flatten(0, 1)).sin(), x).square().sum(), _all(x, block, norm)


def eval_with_grad(run: Run, device: torch.device) -> Result:
    block, x = _block(device, 0.5).eval(), tensor(device)
    return run(block.forward, x).square().sum(), _all(x, block)


def dropout(run: Run, device: torch.device) -> Result:
    block, other, x = _block(device, 0.3), _block(device, 0.3), tensor(device)
    hidden = F.dropout(run(block.forward, x), 0.2)
    loss = run(other.forward, hidden).square().sum()
    torch.manual_seed(77)  # the forward's streams are left behind
    return loss, _all(x, block, other)


def bfloat16(run: Run, device: torch.device) -> Result:
    block, x = _block(device).to(torch.bfloat16), tensor(device)
    return run(block.forward, x.to(torch.bfloat16)).float().square().sum(), _all(x, block)


def autocast(run: Run, device: torch.device) -> Result:
    """Backward runs after autocast was left. Two calls share one cached cast of the weights."""
    block, x = _block(device, 0.1), tensor(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = run(block.forward, run(block.forward, x))
    return out.float().square().sum(), _all(x, block)


# -- what comes out ------------------------------------------------------------------------------------------------


def outputs_that_are_views_of_inputs(run: Run, device: torch.device) -> Result:
    x = tensor(device)
    head, tail, whole = run(lambda a: (a[:, :2], a.sin()[:, 2:], a), x * 1)
    return (head * head).sum() + tail.square().sum() + whole.exp().sum(), [x]


def one_output_unused(run: Run, device: torch.device) -> Result:
    block, other, x = _block(device), _block(device), tensor(device)
    used, _unused, number = run(lambda a: (block(a), other(a).exp(), 3), x)
    return (used * number).square().sum(), _all(x, block)


def side_output(run: Run, device: torch.device) -> Result:
    """R1: what leaves the unit by another way than its return value keeps its gradient."""
    block, x = _block(device), tensor(device)
    noted: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        noted.append(block.gate(a).logsumexp(-1))
        return block(a)

    out = run(function, x)
    return out.square().sum() + noted[0].square().sum(), _all(x, block)


def output_edited_by_the_host(run: Run, device: torch.device) -> Result:
    """Nothing inside needs the value of the output, so an edit of it is allowed."""
    block, x = _block(device), tensor(device)
    out = run(block.forward, x)
    out.mul_(2)
    return out.square().sum(), _all(x, block)


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        tensors_in_kwargs,
        tensors_in_partial,
        none_and_objects,
        containers,
        parameter_as_input,
        view_of_parameter_as_input,
        inputs_without_grad,
        frozen_parameters,
        leaf_views_and_non_leaves,
        integers,
        same_tensor_twice,
        nested_units,
        torch_checkpoint_inside,
        reentrant_checkpoint_inside,
        nothing_saved,
        parameters_saved_only,
        custom_function,
        in_place_work,
        edited_under_no_grad,
        shared_layer_twice,
        buffers,
        eval_with_grad,
        dropout,
        bfloat16,
        autocast,
        outputs_that_are_views_of_inputs,
        one_output_unused,
        side_output,
        output_edited_by_the_host,
    )
}
