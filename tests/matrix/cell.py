"""What one rank does with a cell: updates under plans that differ between ranks, beside DeepSpeed without any
checkpointing."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from ds_hilore.core.errors import HiLoReError
from ds_hilore.core.types import Action
from tests.engines import difference
from tests.integration import updates
from tests.matrix.build import build_model, build_settings, loss_of

#: Largest relative difference of a parameter's gradient where not all bits are the same (float32 only).
TOLERANCE = 1e-6
#: Those after the first, which replays everything.
CHECKED_UPDATES = 2

#: How a result begins that is as it should be.
BITWISE, CLOSE, REFUSED, HOST = "same bits", "within 1e-6", "refused", "not the host's"


def run_cell(**cell: str) -> str:
    """The result of a cell on this rank: one of the above, with what was said; else what went wrong."""
    try:
        reference = updates.reference_engine(build_model(cell), build_settings(cell))
        expected = partial(updates.run_update, reference, loss=loss_of(cell))
        first = expected(0)
    except Exception as error:  # DeepSpeed, transformers or peft do not go together here
        return f"{HOST}: {_said(error)}"
    try:
        # what the self-check takes for a fault ends the cell
        made = updates.hilore_engine(build_model(cell), build_settings(cell), selfcheck={"updates": CHECKED_UPDATES})
    except HiLoReError as error:
        return f"{REFUSED}: {_said(error)}"
    worst, equal = 0.0, True
    mine = (Action.STORE, Action.RECOMPUTE)[dist.get_rank()]
    for number, plan in enumerate((Action.RECOMPUTE, mine, updates.alternating(made, Action.STORE))):
        made.hilore.force(plan)
        found = updates.run_update(made, number, loss_of(cell))
        wanted = first if number == 0 else expected(number)
        if made.hilore.microbatch.ran == {}:
            return "no unit ran"
        equal = equal and updates.unequal_bits(wanted, found) == []
        worst = max(worst, difference(wanted, found))
        if not equal:  # weights differ from here on
            break
    check = made._hilore_host.selfcheck
    if equal and check.updates < CHECKED_UPDATES:
        return f"the self-check says nothing: {check.passed_over}"
    if equal:
        return BITWISE
    return CLOSE if worst <= TOLERANCE and cell["precision"] == "fp32" else f"DIFFERENT by {worst:.1e}"


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
