"""Whom loss and announcements belong to; outside of any engine nothing is different."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective import grpo
from ds_hilore.runtime import current
from ds_hilore.runtime.current import begin_microbatch, begin_update, claim, forward_of, responsible, running
from tests.runtime.rig import Rig

LOSS = grpo.GRPOLossConfig(beta=0.1)


def fresh(function: Callable[[], Any]) -> Any:
    """Runs in a context that has seen no engine."""
    return contextvars.Context().run(function)


def loss_arguments() -> dict[str, Any]:
    return {
        "old_logps": torch.full((2, 3), -0.5),
        "ref_logps": torch.full((2, 3), -0.4),
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "num_tokens": 5,
        "config": LOSS,
    }


def logps() -> Tensor:
    return torch.linspace(-1, 0, 6).reshape(2, 3).requires_grad_() * 1


def test_outside_of_any_engine_the_functions_are_the_plain_ones() -> None:
    def outside() -> None:
        assert running() is None and responsible() is None
        mine, plain = logps(), logps()
        one = current.grpo_loss(mine, **loss_arguments())
        other = grpo.grpo_loss(plain, **loss_arguments())
        assert torch.equal(one, other)
        (gradient,), (expected,) = torch.autograd.grad(one, [mine]), torch.autograd.grad(other, [plain])
        assert torch.equal(gradient, expected)
        wild = logps()[None, None]  # shapes are the user's own affair here
        assert current.observe_logps(wild) is wild and not wild._backward_hooks
        mask = torch.ones(2, 3)
        for call in (
            lambda: begin_update([torch.ones(2)], [mask], 6),
            lambda: begin_microbatch(torch.ones(2), mask, 6),
        ):
            with pytest.raises(UsageError, match="no engine with a hilore block"):
                call()

    fresh(outside)


def test_an_engine_without_a_controller_is_outside_too() -> None:
    rig = Rig()
    claim(rig.controller)
    engine = SimpleNamespace()
    assert responsible(engine) is None
    current.grpo_loss(logps(), **loss_arguments(), engine=engine)
    assert not rig.controller.coefficients
    with pytest.raises(UsageError, match="begin_update"):
        begin_update([], [], 1, engine=engine)


def test_running_before_latest_and_the_named_one_before_both() -> None:
    def body() -> None:
        one, two = Rig(), Rig()
        claim(one.controller)
        assert responsible() is one.controller
        claim(two.controller)
        assert responsible() is two.controller
        with forward_of(one.controller):
            assert running() is one.controller and responsible() is one.controller
            assert responsible(SimpleNamespace(hilore=two.controller)) is two.controller
            with forward_of(two.controller):
                assert responsible() is two.controller
            assert responsible() is one.controller
        assert running() is None and responsible() is one.controller  # its forward ended last

    fresh(body)


def test_a_failing_forward_leaves_no_controller_running() -> None:
    rig = Rig()
    with pytest.raises(ZeroDivisionError), forward_of(rig.controller):
        _ = 1 / 0
    assert running() is None
    rig.backward(rig.forward())
    assert rig.actions == "RRR"


def test_an_engine_that_is_gone_is_not_kept() -> None:
    def body() -> None:
        rig = Rig()
        claim(rig.controller)
        del rig
        gc.collect()
        assert responsible() is None

    fresh(body)


def test_threads_do_not_meet() -> None:
    rig = Rig()
    seen: list[Any] = []
    with forward_of(rig.controller):
        thread = threading.Thread(target=lambda: seen.append((running(), responsible())))
        thread.start()
        thread.join()
    assert seen == [(None, None)]


def test_the_loss_tells_its_controller() -> None:
    rig, other = Rig(), Rig()
    rig.forward()
    engine = SimpleNamespace(hilore=other.controller)
    values = logps()
    loss = current.grpo_loss(values, **loss_arguments())
    (coefficients,) = rig.controller.coefficients
    (expected,) = torch.autograd.grad(loss, [values])
    torch.testing.assert_close(coefficients.omega, expected)
    current.grpo_loss(values, **loss_arguments(), engine=engine)
    assert (len(rig.controller.coefficients), len(other.controller.coefficients)) == (1, 1)
    current.grpo_loss(values.detach(), **loss_arguments())  # no gradient: nothing is learnt from it
    assert len(rig.controller.coefficients) == 1
    with torch.no_grad():  # a reference or evaluation pass through the same loss code
        assert current.observe_logps(values.detach()).requires_grad is False
    with pytest.raises(UsageError, match="no gradient"):
        current.observe_logps(values.detach())


def test_announcing_checks_what_it_is_told() -> None:
    rig = Rig()
    claim(rig.controller)
    mask = torch.ones(2, 3)
    for call, words in (
        (lambda: begin_update([torch.ones(2)], [mask, mask], 6), "1 advantages, 2 masks and no weights"),
        (lambda: begin_update([torch.ones(3)], [mask], 6), "advantages has shape"),
        (lambda: begin_microbatch(torch.ones(2), torch.ones(3), 6), "mask must be"),
        (lambda: begin_microbatch(torch.ones(2), mask, 6, torch.ones(4)), "weights has shape"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    begin_update([torch.ones(2)] * 2, [mask] * 2, 6)
    assert rig.controller.progress()["announced microbatches"] == 2
    begin_microbatch(torch.ones(2), mask, 7, engine=SimpleNamespace(hilore=rig.controller))
    rig.forward()
    assert rig.controller.microbatch.facts is not None and rig.controller.microbatch.facts.num_tokens == 7
