"""The state machine: rules are what hosts do with an engine, in any order; an update that ends is compared.

What holds after every rule: losses, gradients before the step, weights and optimizer state after it are those of
DeepSpeed without checkpointing, bit for bit; a graph that is gone leaves no unit call behind.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.runtime.microbatch import Phase as MicrobatchPhase
from tests.faults.sites import patched
from tests.integration import updates
from tests.models import decoder_layers
from tests.stateful.bench import LAYERS, Engines, Forward, Microbatch, Planted, raising

#: Blocks between which an engine may change.
BLOCKS: dict[str, dict[str, Any]] = {
    "everything fits": {"memory_budget": "1000x"},
    "nothing fits": {"memory_budget": "1.0x"},
    "something fits": {"memory_budget": "1.05x"},
    "checked": {"memory_budget": "1000x", "selfcheck": {"updates": 2}},
    "static": {"memory_budget": "1000x", "mode": "exact", "prune_zero_exposure": False},
}
#: What is counted.
UPDATES, RESUMED = "updates compared", "engines resumed from a checkpoint and compared"
EXCEPTIONS, RESTARTED, ATTACHED = "exceptions", "updates restarted", "blocks changed in place"
SAMPLED = "forwards without grad compared"
FORCED = ("store", "replay", "in turn", "own plans")
#: Most forwards before one backward. ZeRO-2 cannot have two: it reduces a gradient at its first accumulation.
MOST_FORWARDS = {0: 2, 1: 2, 2: 1, 3: 2}


class EngineMachine(RuleBasedStateMachine):
    """One process, ZeRO 0 to 3, a model of two layers with dropout in its adapters.

    Attributes:
        counts: what was done, over all examples.
    """

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.engines: Engines | None = None
        self.stage = 0
        self.seed = 0
        self.waiting: list[tuple[Forward, Tensor]] = []  # forwards without their backward
        self.update: list[Microbatch] = []  # microbatches of the update so far
        self.losses: list[Tensor] = []
        self.owes_step = False

    @property
    def made(self) -> Any:
        """Our engine."""
        assert self.engines is not None
        return self.engines.ours

    # -- what a host does ------------------------------------------------------------------------------------------

    @initialize(
        stage=st.sampled_from(sorted(MOST_FORWARDS)), accumulation=st.integers(1, 2), block=st.sampled_from([*BLOCKS])
    )
    def make(self, stage: int, accumulation: int, block: str) -> None:
        self.stage = stage
        self.engines = Engines(stage, accumulation, BLOCKS[block])

    @precondition(lambda self: not self.owes_step and len(self.waiting) < MOST_FORWARDS[self.stage])
    @rule(rows=st.integers(1, 2), tokens=st.sampled_from([5, 16]))
    def forward(self, rows: int, tokens: int) -> None:
        forward = self._next(rows, tokens)
        self.waiting.append((forward, self.engines.loss(self.made, forward)))  # type: ignore[union-attr]

    @rule(evaluating=st.booleans())
    def forward_without_grad(self, evaluating: bool) -> None:
        """Sampling or evaluation, whatever else is under way."""
        assert self.engines is not None
        self.counts[SAMPLED] += 1
        forward = self._next(2, 16)
        found, expected = (
            self.engines.sampled(engine, forward, evaluating) for engine in (self.made, self.engines.reference)
        )
        assert torch.equal(found, expected)

    @precondition(lambda self: self.waiting)
    @rule()
    def graph_dropped(self) -> None:
        """A loss that the host throws away."""
        self.waiting.clear()

    @precondition(lambda self: self.waiting)
    @rule()
    def backward(self) -> None:
        losses = [loss for _, loss in self.waiting]
        total = losses[0] if len(losses) == 1 else losses[0] + losses[1]
        self.made.backward(total)
        self.update.append(tuple(forward for forward, _ in self.waiting))
        self.losses.append(total.detach())
        self.waiting.clear()
        self.owes_step = True

    @precondition(lambda self: self.owes_step)
    @rule()
    def step(self) -> None:
        """Of a microbatch, or of the whole update, which is compared then."""
        assert self.engines is not None
        self.owes_step = False
        if not self.made.is_gradient_accumulation_boundary():
            self.made.step()
            return
        unequal = self.engines.compare_update(self.update, self.losses)
        self.counts[UPDATES] += 1
        assert not unequal, f"ZeRO-{self.stage}, {self.update}: {unequal}"
        self._begin_update()
        gc.collect()
        assert self.made.hilore.microbatch.alive() == []

    @precondition(lambda self: not self.owes_step)
    @rule()
    def rest_of_update(self) -> None:
        """What most hosts do most of the time."""
        ends = False
        while not ends:
            if not self.waiting:
                self.forward(2, 16)
            self.backward()
            ends = self.made.is_gradient_accumulation_boundary()
            self.step()

    # -- what goes wrong -------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.owes_step)
    @rule(unit=st.integers(0, LAYERS - 1), in_backward=st.booleans())
    def exception_in_a_unit(self, unit: int, in_backward: bool) -> None:
        """The update begins again, and the caller need not say so."""
        self._drop_for(1)
        layer = decoder_layers(self.made.module)[unit]
        with raising(layer.mlp, in_backward):  # type: ignore[arg-type]
            self._fails(lambda: self.made.backward(self._loss()))

    @precondition(lambda self: not self.owes_step)
    @rule()
    def exception_in_the_loss(self) -> None:
        """In code of the caller's own, who says so."""
        self._drop_for(1)
        loss = self._loss()
        del loss
        self.counts[EXCEPTIONS] += 1
        ds_hilore.restart_update(self.made)
        self._begin_update()

    @precondition(lambda self: self.owes_step and self.made.is_gradient_accumulation_boundary())
    @rule()
    def exception_in_the_optimizer(self) -> None:
        def raises(_original: Any) -> Any:
            def step(*_: Any, **__: Any) -> None:
                raise Planted

            return step

        with patched({"torch.optim:AdamW.step": raises}):
            self._fails(self.made.step)

    @rule()
    def restart_update(self) -> None:
        self.counts[RESTARTED] += 1
        ds_hilore.restart_update(self.made)
        self._begin_update()

    # -- what is set anew ------------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(FORCED), first=st.sampled_from([Action.STORE, Action.RECOMPUTE]))
    def force(self, how: str, first: Action) -> None:
        """Counts from the next microbatch on."""
        plans = {"store": Action.STORE, "replay": Action.RECOMPUTE, "own plans": None}
        self.made.hilore.force(plans[how] if how in plans else updates.alternating(self.made, first))

    @precondition(lambda self: not self.owes_step)
    @rule(block=st.sampled_from([*BLOCKS]))
    def other_block(self, block: str) -> None:
        """Detached, and attached with another block, between two microbatches: their gradients stay."""
        assert self.engines is not None
        self.counts[ATTACHED] += 1
        self.waiting.clear()
        self.engines.attach_anew(BLOCKS[block])

    @rule(block=st.sampled_from([*BLOCKS]))
    def other_run(self, block: str) -> None:
        """A new engine with another block resumes from a checkpoint; an update that was under way begins again."""
        assert self.engines is not None
        self.waiting.clear()
        self.engines.resume(BLOCKS[block])
        self._begin_update()
        unequal = self.engines.unequal_state(moments=False)
        self.counts[RESUMED] += 1
        assert not unequal, f"ZeRO-{self.stage}, resumed: {unequal}"

    @invariant()
    def phases_fit(self) -> None:
        if self.engines is None:
            return
        controller = self.made.hilore
        assert controller.context.settled == (controller.phase is not MicrobatchPhase.FORWARD)
        assert not self.waiting or controller.microbatch.alive()

    def teardown(self) -> None:
        self.waiting.clear()
        if self.engines is not None:
            self.engines.close()
            self.engines = None
        gc.collect()

    # -- shared ----------------------------------------------------------------------------------------------------

    def _next(self, rows: int, tokens: int) -> Forward:
        self.seed += 1
        return Forward(self.seed, rows, tokens)

    def _loss(self) -> Tensor:
        assert self.engines is not None
        return self.engines.loss(self.made, self._next(2, 16))

    def _drop_for(self, forwards: int) -> None:
        """Makes room for so many forwards more."""
        if len(self.waiting) + forwards > MOST_FORWARDS[self.stage]:
            self.waiting.clear()

    def _fails(self, call: Any) -> None:
        try:
            call()
        except Planted:
            self.counts[EXCEPTIONS] += 1
            self._begin_update()
            return
        raise AssertionError("the planted exception did not come out")

    def _begin_update(self) -> None:
        self.waiting.clear()
        self.update.clear()
        self.losses.clear()
        self.owes_step = False


def explore(examples: int, steps: int, number: int | None = None, shrink: bool = False) -> Counter[str]:
    """Runs so many examples of at most so many rules each. Raises what an example raises, with its rules.

    Args:
        number: the seed; None: always the same examples.
        shrink: a failing example is made as short as can be, which takes minutes.

    Returns:
        What was done.
    """
    machine: type[EngineMachine] = type("Explored", (EngineMachine,), {"counts": Counter()})
    run_state_machine_as_test(
        machine if number is None else seed(number)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=number is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            print_blob=False,
        ),
    )
    return machine.counts
