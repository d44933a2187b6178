"""The pair of engines on which faults are tried, one pair per ZeRO stage and process, kept from one fault to the next.

Their learning rate is 0: the same data give the same gradients for as long as the engines live, so those of DeepSpeed
without checkpointing are computed once. Dropout is on: a replay that is done again must draw its forward's numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.treatment import Treatment, UniformPlan
from ds_hilore.core.types import Action
from ds_hilore.integration import deepspeed_engine
from ds_hilore.integration.control_plane import control_plane
from tests.engines import config
from tests.faults.records import FAULTY, NEXT, Gradients, Plans
from tests.integration import updates
from tests.models import llama, lora

#: Of the control plane: how long a rank waits for another. 60 s in a run.
LIMIT_S = 8.0
ACCUMULATION = 2
COMPRESSED = Treatment.parse("L:mlp=bf16,residual=bf16")


def model() -> nn.Module:
    return lora(llama(layers=3), lora_dropout=0.1)


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return config(stage, ACCUMULATION, lr=0.0, **zero)


def policy_loss(made: Any, ids: Tensor, advantages: Tensor) -> Tensor:
    """-mean(logp * advantage); an engine of ours reads its coefficients."""
    logps = made(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    if getattr(made, "hilore", None) is not None:
        ds_hilore.observe_logps(logps, engine=made)
    return -(logps * advantages).mean()


def hilore_engine(
    stage: int, build: Callable[[], nn.Module] = model, ds: Any = None, limit_s: float = LIMIT_S, **block: Any
) -> Any:
    """An engine of ours that waits no longer than `limit_s` for another rank."""
    original = deepspeed_engine.control_plane
    deepspeed_engine.control_plane = functools.partial(control_plane, limit_s)
    try:
        return updates.hilore_engine(build(), settings(stage) if ds is None else ds, **block)
    finally:
        deepspeed_engine.control_plane = original


class Bench:
    """One pair.

    Attributes:
        ours: the engine that faults are tried on.
        microbatch: the one that runs, from 0; -1 outside of an update.
        loss: of a microbatch.
        between: called between a loss and its backward.
    """

    def __init__(self, stage: int, limit_s: float = LIMIT_S) -> None:
        self.stage = stage
        self.reference = updates.reference_engine(model(), settings(stage))
        self.common = self.ours = hilore_engine(stage, limit_s=limit_s)
        self.microbatch = -1
        self.loss: updates.Loss = policy_loss
        self.between: list[Callable[[], None]] = []
        self._linear = torch.nn.functional.linear  # of ZeRO-3, from its first engine on
        self._expected: dict[int, Gradients] = {}
        for number in (FAULTY, NEXT):
            self.expected(number)

    def begin(self, plan: Plans) -> None:
        """A fault is about to be planted."""
        torch.nn.functional.linear = self._linear
        self.force(plan)

    def force(self, plan: Plans | None) -> None:
        """None: plans of its own."""
        hilore = getattr(self.ours, "hilore", None)
        if hilore is not None:
            hilore.force(None if plan is None else _PLANS[plan](self.ours))

    def borrow(self, made: Any) -> Any:
        """An engine of the fault's own takes the place of the common one until the fault is over."""
        self.ours = made
        return made

    def calm(self) -> None:
        """Nothing is amiss any more."""
        self.between.clear()
        self.loss = policy_loss

    def end(self) -> None:
        """The fault is over: its own engine goes."""
        self.calm()
        if self.ours is not self.common:
            ds_hilore.detach(self.ours)
            self.ours = self.common

    def update(self, number: int) -> Gradients:
        """One update of our engine. Reduced gradients, just before the step."""
        return self._update(self.ours, number, self.loss, self.between)

    def expected(self, number: int) -> Gradients:
        """Those of DeepSpeed without checkpointing."""
        if number not in self._expected:
            self._expected[number] = self.plain(number, policy_loss)
        return self._expected[number]

    def plain(self, number: int, loss: updates.Loss) -> Gradients:
        """The same for another loss."""
        return self._update(self.reference, number, loss, [])

    def _update(self, made: Any, number: int, loss: updates.Loss, between: Sequence[Callable[[], None]]) -> Gradients:
        def counted(engine: Any, ids: Tensor, advantages: Tensor) -> Tensor:
            self.microbatch += 1
            result = loss(engine, ids, advantages)
            for act in between:
                act()
            return result

        self.microbatch = -1
        try:
            return updates.run_update(made, number, counted)
        finally:
            self.microbatch = -1


@functools.cache
def bench(stage: int) -> Bench:
    """The pair of this process."""
    return Bench(stage)


_PLANS: dict[Plans, Callable[[Any], Any]] = {
    Plans.MIXED: lambda made: updates.different_plans(made)[2],
    Plans.STORE: lambda made: Action.STORE,
    Plans.REPLAY: lambda made: Action.RECOMPUTE,
    Plans.COMPRESS: lambda made: UniformPlan(treatment=COMPRESSED),
}
