"""Exceptions at every point of an update: they reach the caller as they are, and the update can be done again.

On both ranks at once first, as from a bug or from data that all share; then on one rank, where the other must be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.faults.bench import Bench
from tests.faults.records import Fault, Place, Plans, Site
from tests.faults.sites import (
    Strike,
    between,
    by_stage,
    calls,
    module_forward,
    patched,
    unit_backward,
    unit_forward,
    unit_replay,
)

#: Where each ZeRO stage reduces gradients.
REDUCTION = {
    0: "deepspeed.runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback",
    1: "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor",
    2: "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor",
    3: "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
}
GATHERING = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator.fetch_sub_module"
STEP = "torch.optim.adamw:AdamW.step"
ENCODE, DECODE = "ds_hilore.codecs.bf16.codec:Bf16.encode", "ds_hilore.codecs.bf16.codec:Bf16.decode"
HOLD = "ds_hilore.recovery.recipes:BundleBuilder.hold"
ALL_STAGES = (0, 1, 2, 3)
#: Those that reduce gradients when a backward is over; the others do so in it (endings.py).
UNSHARDED = (0, 1)


def fault(name: str, site: Site, **more: Any) -> Fault:
    return Fault(name, Place.MICROBATCH, site, **{"becomes": "Planted", **more})


def one_rank(name: str, site: Site, **more: Any) -> Fault:
    """The other rank is told, and starts its update again too."""
    return fault(name + ", on one rank", site, **{"ranks": (1,), "others": "RankMismatch", **more})


@contextmanager
def half_a_step(bench: Bench, strike: Strike) -> Iterator[None]:
    """The optimizer fails when it has stepped half of its parameters."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not strike.left or bench.microbatch != strike.at:
                return original(self, *args, **kwargs)
            whole = [group["params"] for group in self.param_groups]
            for group, parameters in zip(self.param_groups, whole):
                group["params"] = parameters[: len(parameters) // 2]
            original(self, *args, **kwargs)
            for group, parameters in zip(self.param_groups, whole):
                group["params"] = parameters
            return strike()

        return step

    with patched({STEP: make}):
        yield


def exit_now() -> BaseException:
    return SystemExit(3)


FAULTS: tuple[Fault, ...] = (
    fault("an exception in the embedding's forward", module_forward("embed_tokens")),
    fault("an exception in the first unit's forward", unit_forward(0), stages=(0, 3)),
    fault("an exception in a middle unit's forward", unit_forward(1)),
    fault("an exception in the last unit's forward", unit_forward(2)),
    fault("an exception in the first microbatch", unit_forward(1), at=0),
    fault("an exception in the head's forward", module_forward("lm_head")),
    fault("an exception in the loss", calls("tests.faults.bench:ds_hilore.observe_logps"), outside=True, stages=(0, 3)),
    fault("an exception between forward and backward", between(), outside=True, stages=(0, 3)),
    fault("an exception while the loss is heard", calls("ds_hilore.runtime.controller:Controller._hear")),
    fault("an exception in the last unit's backward", unit_backward(2), stages=(0, 3)),
    fault("an exception in the first unit's backward", unit_backward(0), stages=(0, 3)),
    fault("an exception while inputs are captured", calls("ds_hilore.recovery.inputs:tree_flatten")),
    fault("an exception while state is packed", calls(HOLD), plan=Plans.STORE),
    fault("an exception while state is unpacked", calls("ds_hilore.recovery.bundle:Kept.get"), plan=Plans.STORE),
    fault("an exception while state is derived", calls("ds_hilore.recovery.bundle:Derived.get"), plan=Plans.STORE),
    fault("an exception while the plan is applied", calls("ds_hilore.runtime.microbatch:Microbatch.follow")),
    fault("an exception while state is encoded", calls(ENCODE), plan=Plans.COMPRESS),
    fault("an exception while state is decoded", calls(DECODE), plan=Plans.COMPRESS),
    fault("an exception in a unit's replay", unit_replay(1), plan=Plans.REPLAY, stages=(0, 3)),
    fault(
        "an exception while random numbers are put back",
        calls("ds_hilore.recovery.surroundings:Surroundings.restored"),
        plan=Plans.REPLAY,
    ),
    fault(
        "an exception when a replay is over",
        calls("ds_hilore.recovery.replay:Replay.run", after=True),
        plan=Plans.REPLAY,
    ),
    fault("an exception in the reduction of gradients", by_stage(REDUCTION), stages=(0, 3)),
    fault("an exception while parameters are gathered", calls(GATHERING), stages=(3,)),
    fault("an exception in the optimizer before it steps", calls(STEP), stages=(0, 3)),
    fault("an exception in the optimizer, half of it stepped", half_a_step, stages=(0, 3)),
    fault("an exception when the optimizer has stepped", calls(STEP, after=True), stages=(0, 3)),
    fault(
        "Ctrl-C in a replay", unit_replay(0), plan=Plans.REPLAY, error=KeyboardInterrupt, becomes="KeyboardInterrupt"
    ),
    fault("sys.exit in a unit's forward", unit_forward(1), error=exit_now, becomes="SystemExit"),
    one_rank("an exception in the first unit's forward", unit_forward(0), stages=ALL_STAGES),
    one_rank("an exception in the last unit's forward", unit_forward(2), stages=ALL_STAGES),
    one_rank("an exception in the first microbatch", unit_forward(1), at=0, stages=ALL_STAGES),
    one_rank("an exception between forward and backward", between(), outside=True, stages=ALL_STAGES),
    one_rank("an exception in the last unit's backward", unit_backward(2), stages=UNSHARDED),
    one_rank("an exception in a unit's replay", unit_replay(1), plan=Plans.REPLAY, stages=UNSHARDED),
)
