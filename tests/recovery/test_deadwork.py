"""Dead work is skipped where it is proven dead, and only there (recovery/deadwork.py)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_hilore.recovery.deadwork import MAX_KINDS, DeadWork
from ds_hilore.recovery.replay import Site
from ds_hilore.recovery.unit import RecoveryContext
from tests import models
from tests.recovery.plans import Host, differences
from tests.recovery.scenes import tensor, weights
from tests.recovery.units import CPU, R, Run, Scene, Units, assert_exact, gradients, same

Body = Callable[["Adapted", Tensor, Tensor], Tensor]


class Adapted(nn.Module):
    """x -> frozen projection next to a low-rank adapter, as peft orders them; `body` says what else is done with it."""

    def __init__(self, body: Body | None = None) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.down = nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)
        self.table = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.body = body or (lambda module, base, h: base + module.up(module.down(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        return self.body(self, self.frozen(h), h)


def _scene(module: nn.Module, rows: int = 3) -> Scene:
    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        module.zero_grad()
        x = tensor(device, shape=(rows, 8, 64))
        return run(module.forward, x * 1).square().sum(), [x, *module.parameters()]

    return scene


def _proven(units: Units) -> set[Site]:
    return {site for sites in units.context.dead_work.proven.values() for site in sites}


def _adapter(module: Adapted, h: Tensor) -> Tensor:
    return module.up(module.down(h))


#: What is done with the frozen projection's output -> whether the call is dead.
BODIES: dict[str, tuple[Body, bool]] = {
    "added at the end": (lambda m, base, h: base + _adapter(m, h), True),
    "never used": (lambda m, base, h: _adapter(m, h), True),
    "nonlinear function": (lambda m, base, h: base.sin() + _adapter(m, h), False),
    "argmax": (lambda m, base, h: m.table[base.argmax(-1)] * _adapter(m, h), False),
    "topk": (lambda m, base, h: h.gather(-1, base.topk(64).indices) * _adapter(m, h), False),
    "embedding lookup": (
        lambda m, base, h: nn.functional.embedding((base.sum(-1) * 7).long() % 64, m.table) * _adapter(m, h),
        False,
    ),
    "detached factor": (lambda m, base, h: base.detach() * _adapter(m, h), False),
    # true nowhere, for NaN neither; for infinity it is
    "comparison that NaN does not pass": (lambda m, base, h: _adapter(m, h).masked_fill(base > 1e6, 0).sin(), False),
    "comparison from below": (lambda m, base, h: _adapter(m, h).masked_fill(base < -1e6, 0).sin(), False),
    # the trials take the other branch, but nothing saves a number that a tensor is multiplied by
    "branch": (lambda m, base, h: _adapter(m, h).sin() * (2 if bool((base.detach().abs() < 1e6).all()) else 3), True),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_call_is_skipped_only_where_nothing_depends_on_it(name: str) -> None:
    body, dead = BODIES[name]
    module = Adapted(body)
    weights(CPU, module)
    module.table.data.normal_()
    scene = _scene(module)
    plain = gradients(scene, None)
    units = Units(R)
    for _ in range(2):
        assert same(plain, gradients(scene, units))
    assert _proven(units) == ({Site("frozen")} if dead else set())


class Finite(torch.autograd.Function):
    """Passes what is finite, gives 0 for the rest, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.nan_to_num(0, 0, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_structure_refuses_what_data_cannot_see() -> None:
    """All poisons are masked away, and the real output is zero: only autograd's graph tells of the dependence."""
    module = Adapted(lambda m, base, h: Finite.apply(base).exp() * _adapter(m, h))
    weights(CPU, module)
    nn.init.zeros_(module.frozen.weight)
    units = Units(R)
    assert same(gradients(_scene(module), None), gradients(_scene(module), units))
    assert _proven(units) == set()
    nn.init.normal_(module.frozen.weight)
    assert same(gradients(_scene(module), None), gradients(_scene(module), units))


def test_a_proof_leaves_nothing_behind() -> None:
    """It looks at the nodes of a replay, which hold the replay's bundle: gc would not see that circle."""
    kept: list[StorageWeakRef] = []

    def body(module: Adapted, base: Tensor, h: Tensor) -> Tensor:
        kept.append(StorageWeakRef(h.untyped_storage()))
        return base + _adapter(module, h)

    module = weights(CPU, Adapted(body))
    units = Units(R)
    gradients(_scene(module), units)
    assert _proven(units) and len(kept) > 2
    gc.collect()
    assert all(reference.expired() for reference in kept)


def test_skipped_calls_do_not_run() -> None:
    module = weights(CPU, Adapted())
    rows: list[int] = []
    module.frozen.register_forward_hook(lambda m, args, out: rows.append(args[0].shape[-2]))
    units = Units(R)
    gradients(_scene(module), units)
    rows.clear()
    gradients(_scene(module), units)
    assert rows == [8, 0]


def test_a_unit_on_no_rows_works_and_proves_nothing() -> None:
    module = weights(CPU, Adapted())
    units = Units(R)
    assert same(gradients(_scene(module, rows=0), None), gradients(_scene(module, rows=0), units))
    assert _proven(units) == set()


def test_keyword_calls_are_left_alone() -> None:
    class Keyword(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            h = x.sin()
            return self.frozen(input=h) + _adapter(self, h)

    assert_exact(_scene(weights(CPU, Keyword())))


def test_a_projection_that_learns_again_is_run_again() -> None:
    module = weights(CPU, Adapted())
    units = Units(R)
    gradients(_scene(module), units)
    assert _proven(units) == {Site("frozen")}
    module.frozen.requires_grad_(True)
    assert same(gradients(_scene(module), None), gradients(_scene(module), units))


def test_in_place_work_on_the_output_is_refused_not_broken() -> None:
    module = weights(CPU, Adapted(lambda m, base, h: base.add_(_adapter(m, h))))
    units = Units(R)
    for _ in range(2):
        assert same(gradients(_scene(module), None), gradients(_scene(module), units))


def test_each_of_several_calls_is_judged_by_itself() -> None:
    """The same projection twice: its first output is needed, its second is not."""

    class Twice(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            h = self.frozen(x.sin()).sin()
            return self.frozen(h) + _adapter(self, h)

    module = weights(CPU, Twice())
    units = Units(R)
    for _ in range(2):
        assert same(gradients(_scene(module), None), gradients(_scene(module), units))
    assert _proven(units) == {Site("frozen", 1)}


def test_switched_adapters_get_their_own_proof() -> None:
    model = models.lora(models.llama(layers=2))
    from peft import LoraConfig

    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.other" in name:
                parameter.normal_(std=0.02)
    host = Host(model)

    def loss(module: nn.Module) -> Tensor:
        return models.plain_loss(module, *models.batch(3))

    proofs = []
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        plain = host.gradients(loss, None)
        for _ in range(2):
            assert differences(plain, host.gradients(loss, (R,))) == [], adapter
        proofs.append(len(host.context.dead_work.proven))
    assert proofs[0] < proofs[1] == proofs[2]


def test_there_is_an_end_to_proofs_where_the_data_decides_what_is_saved() -> None:
    """Experts that are hit: each number of them is another kind of call."""

    class Varying(Adapted):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            h = x.sin()
            for _ in range(self.steps):
                h = h.sin()
            return self.frozen(h) + _adapter(self, h)

    module = weights(CPU, Varying())
    units = Units(R)
    for module.steps in range(MAX_KINDS + 3):
        assert same(gradients(_scene(module), None), gradients(_scene(module), units))
    assert len(units.context.dead_work.proven) == MAX_KINDS


def test_it_is_said_what_is_skipped_and_can_be_switched_off() -> None:
    said: list[tuple[str, frozenset[Site]]] = []
    module = weights(CPU, Adapted())
    for enabled in (True, False):
        context = RecoveryContext(dead_work=DeadWork(enabled, report=lambda name, sites: said.append((name, sites))))
        assert same(gradients(_scene(module), None), gradients(_scene(module), Units(R, context)))
    assert said == [("Unit", frozenset({Site("frozen")}))]
