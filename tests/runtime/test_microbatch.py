"""Bytes of the units of a microbatch: what is shared, what a unit adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.treatment import STORED, Treatment, UniformPlan
from ds_hilore.core.types import Action, Shape, UnitId
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.unit import RecoveryContext, UnitCall
from ds_hilore.runtime.microbatch import footprints
from ds_hilore.runtime.sampling import SAMPLED
from tests.runtime.rig import Rig, same

ROWS, TOKENS, WIDTH = 2, 8, 16
FLOAT = 4


class Masked(nn.Module):
    """Saves its input, one wide state and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.linear(x) * mask).tanh()


def run(actions: list[Action]) -> tuple[list[UnitCall], Tensor]:
    x, mask = torch.randn(ROWS, TOKENS, WIDTH), torch.rand(ROWS, TOKENS, WIDTH)
    calls = []
    context = RecoveryContext()
    for number, action in enumerate(actions):
        unit = Masked()
        inputs = UnitInputs.capture(unit.forward, (x, mask), {})
        calls.append(UnitCall(context, UnitId(f"u{number}"), "Masked", Treatment(action), inputs))
        x = calls[-1].run(unit.forward, (x, mask), {})
    return calls, x


def test_an_input_of_several_units_is_no_units() -> None:
    hidden = ROWS * TOKENS * WIDTH * FLOAT
    calls, output = run([Action.RECOMPUTE] * 3)
    found = footprints(calls)
    assert [f.input_bytes for f in found] == [hidden] * 3  # without the mask, which all of them hold
    assert [f.stored_bytes for f in found] == [None] * 3
    assert (found[0].unit, found[0].unit_class, found[0].shape) == (UnitId("u0"), "Masked", Shape(ROWS, TOKENS))
    assert output.requires_grad


def test_storing_adds_the_same_whichever_unit_is_stored() -> None:
    hidden = ROWS * TOKENS * WIDTH * FLOAT
    added = []
    for stored in range(3):
        actions = [Action.STORE if k == stored else Action.RECOMPUTE for k in range(3)]
        calls, output = run(actions)
        found = footprints(calls)[stored]
        assert found.stored_bytes is not None and found.input_bytes == hidden
        added.append(found.stored_bytes - found.input_bytes)
        assert output.requires_grad
    assert added[0] == added[1] == added[2] > 0


def test_bytes_of_all_stored_units_count_every_storage_once() -> None:
    calls, output = run([Action.STORE] * 3)
    everything: dict[int, int] = {}
    for call in calls:
        everything |= call.held_storages()
    mask = ROWS * TOKENS * WIDTH * FLOAT
    total = sum(found.stored_bytes or 0 for found in footprints(calls))
    assert total == sum(everything.values()) - mask
    assert output.requires_grad


def test_no_calls() -> None:
    assert footprints([]) == []


def test_kept_outputs_of_a_sample_are_no_inputs() -> None:
    """A sampled unit is stored and keeps attention's outputs: they are state, or every plan would count them twice."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 4, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    found = []
    for treatment in (STORED, SAMPLED):
        call = UnitCall(RecoveryContext(), UnitId("unit"), "Unit", treatment, UnitInputs.capture(attend, (x,), {}))
        output = call.run(attend, (x,), {})
        (footprint,) = footprints([call])
        found.append((footprint.input_bytes, footprint.stored_bytes))
        output.sum().backward()
    assert found[0] == found[1]


MLP = Treatment.parse("L:mlp=int8")


def overflowing(rig: Rig, block: int) -> None:
    """State of this block, and of those behind it, is no number from now on."""
    with torch.no_grad():
        rig.net.blocks[block].up.bias[0] = float("nan")  # type: ignore[union-attr, index, operator]


@pytest.mark.parametrize("when", ["in forward", "after forward", "both"])
def test_encoded_state_that_is_not_finite_is_never_used(when: str) -> None:
    """Whatever plan said so: here no row of a frontier was prepared, and no loss told its coefficients."""
    rig = Rig()
    rig.controller.force(MLP)  # what can be encoded is learnt from a call that is
    rig.update()
    assert rig.actions == "LLL"
    overflowing(rig, 1)
    rig.controller.force(Action.STORE if when == "after forward" else MLP)
    loss = rig.forward()
    if when != "in forward":
        rig.controller.microbatch.follow(UniformPlan(treatment=MLP))
    rig.backward(loss)
    assert rig.actions == "LRR"


def test_state_that_is_finite_is_compressed_after_forward() -> None:
    rig = Rig()
    rig.controller.force(MLP)
    rig.update()
    rig.gradients()
    rig.backward(rig.forward())
    at_once = rig.gradients()
    rig.controller.force(Action.STORE)
    loss = rig.forward()
    rig.controller.microbatch.follow(UniformPlan(treatment=MLP))
    rig.backward(loss)
    assert rig.actions == "LLL" and same(at_once, rig.gradients())
