"""Freed means freed: weak references to the storages of a layer's state, views and replayed graphs included.

What a representation does not hold is gone when forward is over, whoever else looked at it; what was unpacked is gone
when its node has run; a replay leaves no node of its graph behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_hilore.core.treatment import REPLAYED, STORED, Treatment
from ds_hilore.recovery.encoded import Encoded
from tests import models
from tests.recovery.plans import Host, small_loss
from tests.recovery.scenes import tensor
from tests.recovery.units import CPU, H, R, Units

MLP = Treatment.parse("L:mlp=int8")
#: Of a gated MLP: what backward needs from outside of it, and what follows from that.
BASES, DERIVED = ("gate_proj", "up_proj"), ("act_fn",)


class Watched:
    """A model of one layer; storages of its MLP's tensors in forward, by module."""

    def __init__(self, treatment: Treatment) -> None:
        self.host = Host(models.lora(models.llama(layers=1)), actions=(treatment,))
        self.seen: dict[str, StorageWeakRef] = {}
        mlp: Any = models.decoder_layers(self.host.model)[0].mlp
        for name in (*BASES, *DERIVED):
            getattr(mlp, name).register_forward_hook(self._note(name))
        base: Any = self.host.model.get_base_model()  # type: ignore[operator]
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=self.host.checkpoint)

    def _note(self, name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if torch._C._current_graph_task_id() < 0:  # of forward, not of a replay
                self.seen[name] = StorageWeakRef(output.untyped_storage())

        return note

    def alive(self) -> list[str]:
        return [name for name, reference in self.seen.items() if not reference.expired()]


@pytest.mark.parametrize(
    ("treatment", "held"),
    [(STORED, [*BASES]), (REPLAYED, []), (MLP, [])],
    ids=["stored: bases, nothing derived", "replayed: nothing", "encoded: no original"],
)
def test_what_is_not_held_is_gone_when_forward_is_over(treatment: Treatment, held: list[str]) -> None:
    watched = Watched(treatment)
    for _ in range(2):  # the second time with recipes proven in the first
        loss = small_loss(watched.host.model)
        assert sorted(watched.alive()) == sorted(held)
        watched.host.calls.clear()
        loss.backward()
        assert watched.alive() == []


def test_originals_are_gone_when_they_are_encoded_after_forward() -> None:
    watched = Watched(STORED)
    watched.host.actions = (MLP,)
    small_loss(watched.host.model).backward()  # what belongs to which group is found when a call is encoded in forward
    watched.host.actions = (STORED,)
    watched.host.calls.clear()
    loss = small_loss(watched.host.model)
    (call,) = watched.host.calls
    assert watched.alive()
    call.compress(MLP)
    assert watched.alive() == []
    encoded = [StorageWeakRef(value.untyped_storage()) for value in _held(call)]
    watched.host.calls.clear()
    del call
    loss.backward()
    assert encoded and all(reference.expired() for reference in encoded), "payloads go at their last use"


def test_payloads_are_gone_when_an_encoded_unit_is_dropped() -> None:
    watched = Watched(MLP)
    loss = small_loss(watched.host.model)
    (call,) = watched.host.calls
    payloads = [StorageWeakRef(value.untyped_storage()) for value in _held(call)]
    call.drop()
    assert payloads and all(reference.expired() for reference in payloads)
    loss.backward()


def _held(call: Any) -> list[Tensor]:
    """Tensors of encoded values of a call; what encoding cost in precision, two numbers, is kept for its report."""
    kept = {statistic.squares.data_ptr() for statistic in call.statistics}
    encoded = [handle.value for handle in call._alive() if isinstance(handle.value, Encoded)]
    return [part for value in encoded for part in value.held() if part.data_ptr() not in kept]


# -- views ---------------------------------------------------------------------------------------------------------


class Sliced:
    """Saves views of tensors ten times their size: `sin` needs its argument."""

    def __init__(self) -> None:
        self.bases: list[StorageWeakRef] = []

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.repeat(10, 1, 1) * 1.5
        self.bases.append(StorageWeakRef(wide.untyped_storage()))
        view = wide[: len(x)].transpose(1, 2)
        return view.sin().transpose(1, 2).exp()


def test_the_base_of_a_view_goes_with_the_view() -> None:
    for action, drop in ((H, False), (R, False), (H, True)):
        sliced, units = Sliced(), Units(action)
        out = units.run(sliced, tensor(CPU))
        assert sliced.bases[0].expired() == (action is R)
        if drop:
            units.drop()
            assert sliced.bases[0].expired()
        units.calls.clear()
        out.sum().backward()
        assert all(base.expired() for base in sliced.bases), (action, drop)
        assert len(sliced.bases) >= 1 + (action is R or drop), "replayed, with a base of its own"


# -- autograd nodes ------------------------------------------------------------------------------------------------


class Node(torch.autograd.Function):
    """Its context lives as long as its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[weakref.ref[Any]]) -> Tensor:
        seen.append(weakref.ref(ctx))
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos(), None


@pytest.mark.parametrize("action", [H, R])
def test_no_node_of_a_replay_outlives_its_backward(action: Any) -> None:
    seen: list[weakref.ref[Any]] = []
    units = Units(action)

    def function(x: Tensor) -> Tensor:
        return Node.apply(Node.apply(x, seen), seen)

    loss = units.run(function, tensor(CPU) * 1).sum()
    units.calls.clear()
    forward = len(seen)
    loss.backward()
    assert (len(seen) > forward) == (action is R)
    assert all(node() is None for node in seen[forward:]), "of the replay, while the loss is there"
    del loss
    assert all(node() is None for node in seen)
