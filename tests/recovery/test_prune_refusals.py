"""Where pruning would not be exact it is off, with a reason, and gradients are those of the plain model (rule P3)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.errors import StateChanged, UnsupportedError
from ds_hilore.recovery.prune import Pruning
from ds_hilore.recovery.roles import Reason, Role, UnitRoles
from tests.engines import difference
from tests.models import decoder_layers, llama, lora, mixtral
from tests.recovery.plans import differences
from tests.recovery.pruning import PruningHost, batch

SAMPLE = batch([32, 0, 12, 0], 32)


def _refused(host: PruningHost) -> Reason:
    """The reason of the only class that is not pruned."""
    (refusal,) = host.pruning.refused.values()
    return refusal.reason


def _dropout() -> nn.Module:
    return lora(llama(2), lora_dropout=0.2)


def _attention_dropout() -> nn.Module:
    return llama(2, attention_dropout=0.1)


def _eager_with_attentions() -> nn.Module:
    return llama(2, attn_implementation="eager", output_attentions=True)


MODELS: dict[Reason, list[Callable[[], nn.Module]]] = {
    Reason.RANDOM: [_dropout, _attention_dropout],
    Reason.ROUTER: [mixtral],
    Reason.ESCAPES: [_eager_with_attentions],
}


@pytest.mark.parametrize(("reason", "build"), [(r, build) for r, builds in MODELS.items() for build in builds])
def test_models_that_are_not_pruned(reason: Reason, build: Callable[[], nn.Module]) -> None:
    host = PruningHost(build())
    ours = host.pruned_gradients(SAMPLE.loss)
    assert _refused(host) is reason
    assert differences(ours, host.gradients(SAMPLE.loss, None)) == []


class Plain(nn.Module):
    """A stack of one kind of unit, called through the host's checkpoint function."""

    def __init__(self, unit: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.units = nn.ModuleList(unit() for _ in range(2))
        self.host: PruningHost | None = None

    def _set_gradient_checkpointing(self, enable: bool, gradient_checkpointing_func: Any = None) -> None:
        self._function = gradient_checkpointing_func if enable else None

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for unit in self.units:
            result = unit(x, **kwargs) if self._function is None else self._function(unit.forward, x, **kwargs)
            x = result[0] if isinstance(result, tuple) else result
        return x


class Causal(nn.Module):
    """Running means: causal, and each row for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, **_: Any) -> Any:
        count = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return x + torch.tanh(self.mix(x.cumsum(1) / count))


class Anticausal(Causal):
    """Every position sees all of its row."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x + torch.tanh(self.mix(x.mean(1, keepdim=True).expand_as(x)))


class AcrossRows(Causal):
    """Every position sees the other rows."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x + torch.tanh(self.mix(x.mean(0, keepdim=True).expand_as(x)))


class TwoOutputs(Causal):
    """A second output that could carry a gradient."""

    def forward(self, x: Tensor, **_: Any) -> Any:
        return super().forward(x), x.mean()


class KeptOnce(Causal):
    """Gives its hidden states, and lets a hook within it keep a tensor (see the test)."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.keeps = False
        self.mix.register_forward_hook(lambda _m, _a, output: self.kept.append(output) if self.keeps else None)


def _roles(_: nn.Module) -> UnitRoles:
    return UnitRoles({"x": Role.HIDDEN, "scale": Role.SETTING, "bias": Role.POSITIONS})


def _run(unit: Callable[[], nn.Module], **kwargs: Any) -> tuple[PruningHost, float]:
    """A host whose rows 1 and 3 are dead and row 2 is short, and its distance from the plain model."""
    host = PruningHost(Plain(unit), pruning=Pruning(_roles))
    weights = torch.randn(4, 64, 1, generator=torch.Generator().manual_seed(0))
    weights[1] = weights[3] = weights[2, 20:] = 0
    x = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module) -> Tensor:
        return (model(x, **kwargs) * weights).sum()

    ours = host.pruned_gradients(loss)
    return host, difference(host.gradients(loss, None), ours)


def test_a_causal_unit_is_pruned() -> None:
    host, error = _run(Causal)
    assert host.pruning.refused == {} and error < 1e-6
    assert host.pruning.live_share == (64 + 24) / 256


def test_a_unit_that_looks_ahead_loses_whole_rows_only() -> None:
    host, error = _run(Anticausal)
    assert host.pruning.refused == {} and error < 1e-6
    assert host.pruning.live_share == 0.5


@pytest.mark.parametrize(
    ("unit", "kwargs", "reason"),
    [
        (AcrossRows, {}, Reason.MIXES),
        (TwoOutputs, {}, Reason.OUTPUTS),
        (Causal, {"cu_seq_lens_q": torch.tensor([0, 16])}, Reason.ARGUMENT),
        (Causal, {"scale": torch.ones(1)}, Reason.ARGUMENT),
        (Causal, {"bias": torch.zeros(3, 64)}, Reason.LAYOUT),
        (Causal, {"bias": torch.zeros(1, 64, requires_grad=True)}, Reason.INPUT_GRADIENT),
    ],
)
def test_units_that_are_not_pruned(unit: Callable[[], nn.Module], kwargs: dict[str, Any], reason: Reason) -> None:
    host, error = _run(unit, **kwargs)
    assert _refused(host) is reason
    assert error < 1e-6


def test_refusals_are_told_once() -> None:
    told: list[str] = []
    host = PruningHost(
        mixtral(), pruning=Pruning(lambda _: UnitRoles({}), lambda name, why: told.append(f"{name}: {why}"))
    )
    for _ in range(2):
        host.pruned_gradients(SAMPLE.loss)
    assert len(told) == 1 and told[0].startswith("MixtralDecoderLayer: it routes tokens")


def test_undeclared_modules_are_not_pruned() -> None:
    host = PruningHost(llama(2), pruning=Pruning(lambda _: None))
    host.pruned_gradients(SAMPLE.loss)
    assert _refused(host) is Reason.UNDECLARED


def test_dropout_that_is_switched_on_later() -> None:
    """The class was proven; a call that draws random numbers is run again as R, with the same numbers."""
    host = PruningHost(llama(2))
    host.pruned_gradients(SAMPLE.loss)
    for layer in decoder_layers(host.model):
        layer.self_attn.attention_dropout = 0.3  # type: ignore[union-attr]
    ours = host.gradients(SAMPLE.loss, [])
    assert _refused(host) is Reason.RANDOM
    assert differences(ours, host.gradients(SAMPLE.loss, None)) == []


def test_a_hook_that_begins_to_keep_tensors_is_an_error() -> None:
    """The tensor that it kept has no gradient: nobody may go on with it."""
    host, _ = _run(KeptOnce)
    assert host.pruning.refused == {}
    unit: Any = host.model.units[0]  # type: ignore[index]
    unit.keeps = True
    with pytest.raises(UnsupportedError, match=r"mix.*run this update again"):
        host.pruned_gradients(lambda model: model(torch.randn(4, 16, 8)).sum())
    assert _refused(host) is Reason.ESCAPES


# -- rules that hold for every replay -------------------------------------------------------------------------------


def _forward(host: PruningHost) -> Tensor:
    host.pruned_gradients(SAMPLE.loss)
    host.calls.clear()
    return SAMPLE.loss(host._switched_on())


def test_r3_inputs_go_at_their_last_use() -> None:
    host = PruningHost(lora(llama(2)))
    loss = _forward(host)
    calls = [weakref.ref(call) for call in host.calls]
    host.calls.clear()
    assert all(call() is not None for call in calls)
    loss.backward()
    assert all(call() is None for call in calls)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_r3_retain_graph_keeps_them() -> None:
    host = PruningHost(lora(llama(2)))
    loss = _forward(host)
    host.model.zero_grad()
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in host.model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, parameter in host.model.named_parameters():
        if name in once:
            assert torch.equal(parameter.grad, 2 * once[name])  # type: ignore[arg-type]


def test_r5_changed_weights_are_noticed() -> None:
    host = PruningHost(llama(2))
    loss = _forward(host)
    with torch.no_grad():
        decoder_layers(host.model)[1].mlp.up_proj.weight.mul_(1.1)  # type: ignore[union-attr,operator]
    with pytest.raises(StateChanged, match=r"unit\.1"):
        loss.backward()


def test_r6_a_step_in_between_is_noticed() -> None:
    host = PruningHost(llama(2))
    loss = _forward(host)
    host.context.generation += 1
    with pytest.raises(StateChanged, match="stepped or loaded"):
        loss.backward()


def test_gradients_of_some_parameters_only() -> None:
    """`autograd.grad` beside backward: nothing is accumulated, and the same numbers come back."""
    host = PruningHost(llama(2))
    loss = _forward(host)
    weight = decoder_layers(host.model)[0].mlp.up_proj.weight  # type: ignore[union-attr]
    host.model.zero_grad()
    (found,) = torch.autograd.grad(loss, weight)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in host.model.parameters())
    expected = host.gradients(SAMPLE.loss, None)["model.layers.0.mlp.up_proj.weight"]
    assert difference({"w": expected}, {"w": found}) < 1e-6
