"""Each rule of recovery/rules.py, on the smallest function that uses it: taken, bit for bit, and worth its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hilore.recovery.gated import Gate, gated_product
from ds_hilore.recovery.rules import COSTLY, RULES
from tests.recovery.scenes import tensor
from tests.recovery.units import CPU, H, R, Run, Scene, Units, assert_exact

SHAPE = (4, 8, 64)
BYTES = 4 * 8 * 64 * 4


def _rotary(x: Tensor) -> Tensor:
    """Rotary position embedding as transformers applies it; cos and sin are plain tensors."""
    angles = torch.linspace(0, 1, 64, device=x.device)
    rotated = torch.cat((-x[..., 32:], x[..., :32]), -1)
    return x * angles.cos() + rotated * angles.sin()


def _rms_norm_by_hand(x: Tensor) -> Tensor:
    """LlamaRMSNorm: in float32, cast back, a weight."""
    weight = torch.linspace(0.5, 1.5, 64, device=x.device, dtype=x.dtype)
    wide = x.to(torch.float64)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


LAYER_NORM, RMS_NORM = nn.LayerNorm(64), nn.RMSNorm(64, eps=1e-6)
#: name of the recipe -> (kind of node, function of one [4, 8, 64] tensor whose result is saved behind it)
CASES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("SiluBackward0", F.silu),
    "gelu_none": ("GeluBackward0", F.gelu),
    "gelu_tanh": ("GeluBackward0", lambda x: F.gelu(x, approximate="tanh")),
    "relu": ("ReluBackward0", torch.relu),
    "sigmoid": ("SigmoidBackward0", torch.sigmoid),
    "tanh": ("TanhBackward0", torch.tanh),
    "rsqrt": ("RsqrtBackward0", torch.rsqrt),
    "clone": ("CloneBackward0", torch.clone),
    "neg": ("NegBackward0", torch.neg),
    "pow_3": ("PowBackward0", lambda x: x.pow(3)),
    "mul": ("MulBackward0", lambda x: x * x),
    "mul by a number": ("MulBackward0", lambda x: x * 0.3),
    "div": ("DivBackward0", lambda x: x / x.detach().abs()),
    "add_1": ("AddBackward0", lambda x: x + x),
    "add_0.5": ("AddBackward0", lambda x: torch.add(x, x, alpha=0.5)),
    "sub_2": ("SubBackward0", lambda x: torch.sub(x, x, alpha=2)),
    "cast_torch.float64": ("ToCopyBackward0", lambda x: x.to(torch.float64)),
    "cast_torch.bfloat16": ("ToCopyBackward0", lambda x: x.to(torch.bfloat16)),
    "cat_-1": ("CatBackward0", lambda x: torch.cat((x, -x), -1)),
    "slice": ("SliceBackward0", lambda x: torch.cat((x[:, 1:7:2], x[..., :3, :]), 1) * 1),
    "transpose": ("TransposeBackward0", lambda x: F.silu(x).transpose(0, -1) * 2),
    "reshape": ("ViewBackward0", lambda x: (F.silu(x).view(-1, 16) * 2).reshape(32, 64)),
    "reshape of a copy": ("UnsafeViewBackward0", lambda x: x.transpose(0, 1).reshape(-1, 64)),
    "view": ("SiluBackward0", lambda x: F.silu(x).view(2, 16, 64)[..., ::2]),
    "layer_norm_1e-05": ("NativeLayerNormBackward0", lambda x: F.layer_norm(x, (64,), eps=1e-5)),
    "layer_norm_1e-12": ("NativeLayerNormBackward0", lambda x: F.layer_norm(x * 1e-3, (64,), eps=1e-12)),
    "layer_norm_1e-05 with weight and bias": ("NativeLayerNormBackward0", LAYER_NORM),
    "rotary": ("CatBackward0", _rotary),
    "RMSNorm by hand": ("ToCopyBackward0", _rms_norm_by_hand),
    "gated_silu": ("GatedProductBackward", lambda x: gated_product(x * 2, x * 3, Gate())),
    "gated_gelu_tanh": ("GatedProductBackward", lambda x: gated_product(x * 2, x * 3, Gate("tanh"))),
    "two steps": ("GeluBackward0", lambda x: F.gelu(x) * torch.sigmoid(x)),
}


def saves(function: Callable[[Tensor], Tensor]) -> Scene:
    """The function, its result saved by a product with a second leaf."""

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x = tensor(device, shape=SHAPE)
        base = x.abs() + 0.1
        made = function(base)
        weight = nn.Parameter(tensor(device, 1, tuple(made.shape)).to(made.dtype).detach())
        return run(lambda a: function(a) * weight, base).sum(), [x, weight]

    return scene


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_bitwise(name: str) -> None:
    assert_exact(saves(CASES[name][1]))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_used_and_its_result_is_not_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, function = CASES[name]
    used: set[str] = set()
    original = RULES[kind]

    def watched(*args: Any) -> Any:
        match = original(*args)
        if match is not None:
            used.add(match[0])
        return match

    def held() -> int:
        units = Units(H)
        _out, _leaves = saves(function)(units.run, CPU)
        assert units.context.proofs.rejected() == 0
        return sum(units.calls[0].held_storages().values())

    with monkeypatch.context() as patch:
        patch.setitem(RULES, kind, watched)
        ours = held()
    with monkeypatch.context() as patch:
        for other in list(RULES):
            patch.delitem(RULES, other)
        without = held()
    assert used, f"{kind} was never asked"
    assert ours < without


def test_every_rule_has_a_case() -> None:
    """FusedRmsNorm exists on accelerators only; ReshapeAlias is what reshape of an exotic layout leaves."""
    covered = {kind for kind, _ in CASES.values()}
    assert set(RULES) - covered == {"FusedRmsNormBackward0", "ReshapeAliasBackward0"}
    assert set(RULES) >= COSTLY


def test_rms_norm_is_bitwise_whatever_kernel_it_has() -> None:
    assert_exact(saves(RMS_NORM))


@pytest.mark.parametrize("action", [H, R])
def test_a_replay_derives_only_what_costs_little(action: Any) -> None:
    """In a replay the wide tensors of an MLP are used up at once (design fact 13)."""
    units = Units(action)
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return F.silu(x)

    def scene(run: Run, device: torch.device) -> Tensor:
        x = tensor(device, shape=SHAPE)
        return run(lambda a: counted(a) * torch.ones_like(a).requires_grad_(), x * 1).sum()

    scene(units.run, CPU).backward()
    proven = [signature for signature, good in units.context.proofs.proven.items() if good]
    assert bool(proven) is (action is H)
    assert len(calls) == (1 if action is H else 2)


def test_a_norm_whose_weight_cannot_be_named_is_held() -> None:
    """A weight that is computed is no parameter and was not saved: leaving it out would be silently wrong."""

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        x, w = tensor(device, shape=SHAPE), tensor(device, 1, (64,))
        weight = nn.Parameter(tensor(device, 2, SHAPE).detach())
        return run(lambda a, b: F.layer_norm(a, (64,), b.cumsum(0), b.cumsum(0)) * weight, x * 1, w * 1).sum(), [x, w]

    assert_exact(scene)
