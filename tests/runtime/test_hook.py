"""What the loss and the host tell a controller, and when its plan is settled."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action
from ds_hilore.runtime.current import forward_of
from ds_hilore.runtime.microbatch import Phase
from ds_hilore.runtime.parts import Stage
from ds_hilore.runtime.update import Source
from tests.runtime.rig import Rig, facts, same, told

STORE, RECOMPUTE = Action.STORE, Action.RECOMPUTE


def test_known_coefficients_settle_before_backward_runs() -> None:
    rig = Rig()
    loss = rig.forward()
    rig.controller.begin_backward()
    assert rig.controller.phase is Phase.FORWARD  # nothing told: the first unpack settles
    rig.controller.note_coefficients(torch.tensor([[2.0, -1.0]]), torch.tensor([[True, True]]))
    rig.controller.begin_backward()
    assert rig.controller.phase is Phase.BACKWARD
    (coefficients,) = rig.controller.coefficients
    assert coefficients.source is Source.FORMULA and float(coefficients.facts.exposure) == 3.0
    rig.backward(loss)


def observed(rig: Rig, shape: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    loss = rig.forward(tokens=6)
    logps = (loss * torch.arange(12.0)).reshape(shape)
    rig.controller.observe(logps, mask)
    return (logps * torch.arange(12.0).reshape(shape)).sum()


def test_observed_gradient_is_omega_as_rows() -> None:
    rig = Rig()
    mask = torch.arange(12) < 6
    rig.backward(observed(rig, (2, 6), mask.reshape(2, 6)))
    (rows,) = rig.controller.coefficients
    assert rows.source is Source.GRADIENT and rows.omega.shape == (2, 6)
    assert rows.facts.live_rows.tolist() == [True, False]
    rig.backward(observed(rig, (12,), mask))  # packed: one row
    (row,) = rig.controller.coefficients
    assert torch.equal(row.omega, torch.arange(12.0)[None]) and float(row.facts.exposure) == 15.0


def test_a_loss_observed_under_an_older_microbatch_tells_the_newer_nothing() -> None:
    rig = Rig()
    older = observed(rig, (2, 6))
    rig.controller.abort()
    newer = rig.forward()
    older.backward()
    assert not rig.controller.coefficients
    rig.gradients()
    rig.backward(newer)
    assert same(rig.gradients(), rig.expected(rig.plain()))


def test_observe_refuses_what_could_only_fail_in_backward() -> None:
    rig = Rig()
    grad = torch.ones(2, 3, requires_grad=True) * 1
    for logps, mask, words in (
        (torch.ones(2, 3), None, "no gradient"),
        (grad[None], None, r"shape \(1, 2, 3\)"),
        (grad, torch.ones(2, 4), r"mask has shape \(2, 4\)"),
    ):
        with pytest.raises(UsageError, match=words):
            rig.controller.observe(logps, mask)


def test_observing_keeps_no_graph_alive() -> None:
    rig = Rig()
    loss = observed(rig, (2, 6))
    calls = [weakref.ref(call) for call in rig.controller.microbatch.alive()]
    assert len(calls) == 3
    del loss  # never differentiated
    assert [call() for call in calls] == [None, None, None]


def test_facts_reach_their_microbatch_once() -> None:
    rig = Rig()
    rig.controller.announce_update([facts(k) for k in (1, 2, 3)])
    seen = []
    for micro in range(3):
        if micro == 1:
            rig.controller.announce_microbatch(facts(20))
        with torch.no_grad(), forward_of(rig.controller):
            rig.net(rig.inputs())
        one = rig.forward()
        two = rig.forward()  # of the same microbatch: takes nothing
        seen.append(told(rig))
        rig.backward(one + two)
    assert seen == [1, 20, 3] and rig.controller.progress()["announced microbatches"] == 3
    rig.backward(rig.forward())
    assert told(rig) is None  # more microbatches than announced
    rig.controller.end_update()
    assert rig.controller.progress() == {"update": 1, "announced microbatches": 0, "forced": False}
    rig.controller.announce_microbatch(facts(5))
    rig.backward(rig.forward())
    assert told(rig) == 5


def test_closing_ends_what_measuring_began() -> None:
    rig = Rig()
    rig.update()
    rig.forward()
    rig.controller.close()
    rig.controller.close()
    assert rig.controller.stage is Stage.MEASURE_R
