"""Engines that are detached, made anew, destroyed, or not alone in their process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ds_hilore
from ds_hilore.core.types import Action
from tests.faults.bench import Bench, hilore_engine, policy_loss
from tests.faults.kinds.between import microbatches
from tests.faults.records import FAULTY, Fault, Pair, Place, Plans, update
from tests.models import batch


def _own(bench: Bench, action: Action = Action.RECOMPUTE, **block: Any) -> Any:
    """An engine of the fault's own, in the place of the common one."""
    made = bench.borrow(hilore_engine(bench.stage, **block))
    made.hilore.force(action)
    return made


def detached_between_updates(bench: Bench) -> Pair:
    """Plain DeepSpeed from there on."""
    made = _own(bench)
    bench.update(FAULTY)
    ds_hilore.detach(made)
    return update(bench)


def detached_before_backward(bench: Bench) -> Pair:
    """DeepSpeed's own backward meets units of ours."""
    _own(bench)

    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        loss = policy_loss(made, ids, advantages)
        if made is bench.ours:
            ds_hilore.detach(made)
        made.backward(loss)

    return microbatches(bench, one)


def detached_twice(bench: Bench) -> Pair:
    made = _own(bench)
    ds_hilore.detach(made)
    ds_hilore.detach(made)
    return update(bench)


def attached_again(bench: Bench) -> Pair:
    """Under ZeRO-3 units stay leaf modules, so the engine can have a controller again."""
    from ds_hilore.core.config import HiLoReConfig
    from ds_hilore.integration.deepspeed_engine import attach
    from tests.faults.bench import settings

    made = _own(bench)
    bench.update(FAULTY)
    ds_hilore.detach(made)
    attach(made, HiLoReConfig(), settings(bench.stage)).force(Action.RECOMPUTE)
    return update(bench)


def made_anew(bench: Bench) -> Pair:
    """The old one is forgotten, with a graph that is still alive."""
    first = hilore_engine(bench.stage)
    kept = policy_loss(first, *batch(1))
    ds_hilore.detach(first)
    del first
    gc.collect()
    _own(bench)
    found = update(bench)
    assert kept.isfinite()
    return found


def forgotten_with_a_controller(bench: Bench) -> Pair:
    """Nobody detaches the old one."""
    hilore_engine(bench.stage)
    gc.collect()
    _own(bench)
    return update(bench)


def destroyed(bench: Bench) -> Pair:
    first = hilore_engine(bench.stage)
    first.hilore.force(Action.STORE)
    first.backward(policy_loss(first, *batch(1)))
    ds_hilore.detach(first)
    first.destroy()
    _own(bench)
    return update(bench)


def interleaved(bench: Bench) -> Pair:
    """Forward, forward, backward, backward of two engines."""
    first, second = bench.ours, hilore_engine(bench.stage)
    second.hilore.force(Action.RECOMPUTE)

    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        if made is bench.reference:
            made.backward(policy_loss(made, ids, advantages))
            return
        numbers = torch.get_rng_state()
        losses = []
        for engine in (first, second):
            torch.set_rng_state(numbers)
            losses.append(policy_loss(engine, ids, advantages))
        for engine, loss in zip((first, second), losses):
            engine.backward(loss)
        second.step()

    found = microbatches(bench, one)
    ds_hilore.detach(second)
    return found


def in_turn(bench: Bench) -> Pair:
    """Updates of two engines in turn; the loss goes to the one that ran last."""
    second = hilore_engine(bench.stage)
    second.hilore.force(Action.STORE)
    common, bench.ours = bench.ours, second
    bench.update(FAULTY)
    bench.ours = common
    found = update(bench)
    ds_hilore.detach(second)
    return found


def detached_beside(bench: Bench) -> Pair:
    """The other engine of the process is detached between forward and backward."""
    second = hilore_engine(bench.stage)
    bench.between.append(lambda: ds_hilore.detach(second) if bench.microbatch == 1 else None)
    return update(bench)


def planner_closed(bench: Bench) -> Pair:
    """The controller was closed, and its engine runs on."""
    _own(bench)
    bench.between.append(lambda: bench.ours.hilore.close() if bench.microbatch == 0 else None)
    return update(bench)


def many(bench: Bench) -> Pair:
    """Six engines one after another leave no thread behind."""
    before = threading.active_count()
    for _ in range(6):
        ds_hilore.detach(hilore_engine(bench.stage))
    gc.collect()
    assert threading.active_count() <= before, [thread.name for thread in threading.enumerate()]
    return update(bench)


def _fault(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(name, Place.ENGINES, run=run, **{"plan": Plans.REPLAY, "stages": (2,), **more})


FAULTS: tuple[Fault, ...] = (
    _fault("detached between updates", detached_between_updates, stages=(2, 3)),
    _fault(
        "detached between forward and backward", detached_before_backward, becomes="RecoveryMismatch", stages=(2, 3)
    ),
    _fault("detached twice", detached_twice, thorough=True),
    _fault("attached again", attached_again, thorough=True),
    _fault("made anew while an old graph is alive", made_anew, stages=(2, 3)),
    _fault("made anew without a detach", forgotten_with_a_controller, thorough=True),
    _fault("made anew after `destroy`", destroyed),
    _fault("two engines: forward, forward, backward, backward", interleaved, stages=(2, 3)),
    _fault("two engines: updates in turn", in_turn, thorough=True),
    _fault("two engines: one is detached while the other awaits its backward", detached_beside),
    _fault("a controller that was closed", planner_closed, thorough=True),
    _fault("six engines one after another", many, thorough=True),
)
