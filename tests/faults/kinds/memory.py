"""Allocations that fail, at every place that allocates.

Where stored state can be given up, the update goes on and is right; else it ends in `MemoryExhausted`.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.kinds.microbatch import (
    ALL_STAGES,
    DECODE,
    ENCODE,
    GATHERING,
    HOLD,
    REDUCTION,
    STEP,
)
from tests.faults.records import RIGHT, Fault, Place, Plans, Site
from tests.faults.sites import (
    between,
    by_stage,
    calls,
    module_forward,
    no_memory,
    unit_backward,
    unit_forward,
    unit_replay,
)


def fault(name: str, site: Site, **more: Any) -> Fault:
    return Fault(f"no memory {name}", Place.MEMORY, site, **{"error": no_memory, "becomes": "MemoryExhausted", **more})


def cuda_error() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FAULTS: tuple[Fault, ...] = (
    fault("in a unit's forward", unit_forward(1), stages=(0, 3)),
    fault("in a unit's forward, on one rank", unit_forward(1), ranks=(1,), others="RankMismatch", stages=ALL_STAGES),
    fault("in the head's forward", module_forward("lm_head")),
    fault("while state is packed", calls(HOLD), plan=Plans.STORE),
    fault("while state is encoded", calls(ENCODE), plan=Plans.COMPRESS),
    fault("while the plan is applied", calls("ds_hilore.runtime.microbatch:Microbatch.follow")),
    fault("in the loss", between(), becomes="RuntimeError", outside=True, stages=(0, 3)),
    fault("in the backward of a unit", unit_backward(1), stages=(0, 3)),
    fault("while state is decoded", calls(DECODE), plan=Plans.COMPRESS, becomes=RIGHT),
    fault("while state is decoded, until nothing is left", calls(DECODE), times=99, plan=Plans.COMPRESS),
    fault("while state is derived", calls("ds_hilore.recovery.bundle:Derived.get"), plan=Plans.STORE, becomes=RIGHT),
    fault("in a replay while others are stored", unit_replay(1), becomes=RIGHT, ranks=(0,)),
    fault("in a replay while nothing is stored", unit_replay(1), plan=Plans.REPLAY, stages=(0, 3)),
    fault("in a replay, as CUDA says it", unit_replay(1), plan=Plans.REPLAY, error=cuda_error),
    fault("in a replay, as Python says it", unit_replay(1), plan=Plans.REPLAY, error=MemoryError),
    fault("for the reduction of gradients", by_stage(REDUCTION), stages=(0, 3)),
    fault("for gathered parameters", calls(GATHERING), stages=(3,)),
    fault("in the optimizer's step", calls(STEP), stages=(0, 3)),
)
