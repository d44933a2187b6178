"""Hidden states that are rows of an embedding are not held, and every gradient stays the plain one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.errors import StateChanged
from ds_hilore.recovery.unit import RecoveryContext
from tests.recovery.scenes import Block, T, W, weights
from tests.recovery.units import CPU, WAYS, H, R, Run, Scene, Units, gradients, plainly, same

ROWS, WORDS = 3, 11
STATE_BYTES = ROWS * T * W * 4


def _ids() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, T), generator=torch.Generator().manual_seed(3))


def _table(trained: bool) -> nn.Embedding:
    return weights(CPU, nn.Embedding(WORDS, W)).requires_grad_(trained)  # type: ignore[return-value]


def _scene(context: RecoveryContext, trained: bool, between: Callable[[Tensor], Tensor] = lambda x: x) -> Scene:
    """Two blocks over an embedding; `between` is what the model does with the embedding's output before."""

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        table = _table(trained)
        context.lookups.listen(table)
        blocks = [weights(device, Block(0.1), seed) for seed in (1, 2)]
        x = between(table(_ids()))
        for block in blocks:
            x = run(block.forward, x)
        leaves = [*table.parameters(), *blocks[0].parameters(), *blocks[1].parameters()]
        return x.square().sum(), leaves if trained else leaves[1:]

    return scene


def _doubled_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


#: name -> what happens to the rows on the way to the first unit, and whether they are still the table's
ON_THE_WAY: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing": (lambda x: x, True),
    "view of all": (lambda x: x.view(ROWS, T, W), True),
    "in place": (_doubled_in_place, False),
    "scaled": (lambda x: x * 2.0, False),
    "one row less": (lambda x: x[1:], False),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("way", WAYS, ids=[way[0] for way in WAYS])
def test_gradients_are_the_plain_ones(way: tuple[str, Any, bool], trained: bool, name: str) -> None:
    between, _ = ON_THE_WAY[name]
    _, action, drop = way
    context = RecoveryContext()
    scene = _scene(context, trained, between)
    plain = gradients(scene, None)
    assert all(gradient is not None for gradient in plain)
    for _again in range(2):
        assert same(plain, gradients(scene, Units(action, context), drop))


@pytest.mark.parametrize("name", ON_THE_WAY)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("action", [H, R])
def test_rows_of_the_table_are_not_held(action: Any, trained: bool, name: str) -> None:
    between, looked_up = ON_THE_WAY[name]
    units = Units(action)
    table, block = _table(trained), weights(CPU, Block(), 1)
    units.context.lookups.listen(table)
    x = between(table(_ids()))
    out = units.run(block.forward, x)
    call = units.calls[0]
    assert (x.untyped_storage().data_ptr() in call.held_storages()) is not looked_up
    inputs = sum(call.input_storages().values())
    assert inputs == _ids().nbytes if looked_up else inputs >= STATE_BYTES * 2 // 3
    storage = weakref.ref(x.untyped_storage())
    del x
    if action is R and not trained and name == "nothing":
        assert storage() is None, "somebody else holds it"
    out.sum().backward()


def test_units_of_other_hidden_states_keep_theirs() -> None:
    units = Units(R)
    gradients(_scene(units.context, False), None)
    _scene(units.context, False)(units.run, CPU)
    first, second = [sum(call.input_storages().values()) for call in units.calls]
    assert first < STATE_BYTES <= second


@pytest.mark.parametrize("edited", ["ids", "table"])
def test_what_it_is_looked_up_from_may_not_change(edited: str) -> None:
    units = Units(R)
    table, block, ids = _table(False), weights(CPU, Block(), 1), _ids()
    units.context.lookups.listen(table)
    out = units.run(block.forward, table(ids))
    with torch.no_grad():
        (ids if edited == "ids" else table.weight).zero_()
    with pytest.raises(StateChanged, match=r"unit\.0 \(rank 0\)"):
        out.sum().backward()


class _Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 8.0


def _sharded() -> nn.Embedding:
    table = _table(False)
    table.weight.ds_id = 0  # type: ignore[attr-defined]
    return table


@pytest.mark.parametrize(
    "embedding",
    [_Scaled(WORDS, W), nn.Embedding(WORDS, W, max_norm=1.0), nn.Linear(W, W), _sharded()],
    ids=["subclass", "max_norm", "linear", "ZeRO-3"],
)
def test_embeddings_that_are_no_plain_table_are_not_listened_to(embedding: nn.Module) -> None:
    assert RecoveryContext().lookups.listen(embedding) is None


def test_a_leaf_is_held_by_autograd_anyway() -> None:
    """As after transformers' `enable_input_require_grads`."""
    units = Units(R)
    table, block = _table(False), weights(CPU, Block(), 1)
    units.context.lookups.listen(table)
    leaf = table(_ids()).requires_grad_()
    out = units.run(block.forward, leaf)
    assert leaf.untyped_storage().data_ptr() in units.calls[0].held_storages()
    out.sum().backward()
    wanted = _table(False)(_ids()).requires_grad_()
    plainly(weights(CPU, Block(), 1).forward, wanted).sum().backward()
    assert same([leaf.grad], [wanted.grad])


def test_nothing_is_noted_once_the_hook_is_gone() -> None:
    units = Units(R)
    table, block = _table(False), weights(CPU, Block(), 1)
    handle = units.context.lookups.listen(table)
    assert handle is not None
    handle.remove()
    units.run(block.forward, table(_ids()))
    assert sum(units.calls[0].input_storages().values()) >= STATE_BYTES
