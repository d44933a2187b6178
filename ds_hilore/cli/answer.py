"""What a plan would do under one budget on one device, before any run: for `plan`, `doctor` and the summary."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_hilore.cli.account import gigabytes
from ds_hilore.core.budget import MemoryBudget, RankBudgets, parse_budget
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UsageError

if TYPE_CHECKING:
    from ds_hilore.integration.outlook import Outlook
    from ds_hilore.planning.problem import Infeasible
    from ds_hilore.profiling.cost_model import DeviceSpeed
    from ds_hilore.profiling.job import Planned


@dataclass(frozen=True)
class Machine:
    """The device that is planned for. `said`: where its numbers come from."""

    memory_bytes: int
    speed: DeviceSpeed
    said: str


@dataclass(frozen=True)
class Answer:
    """One budget: as it was written, in bytes, and what comes of it: a plan, or what even replaying everything lacks.

    A plan may also be larger than the device, where the budget is.
    """

    written: str
    budget_bytes: int
    device_bytes: int
    planned: Planned | None
    refused: Infeasible | None

    @property
    def too_large(self) -> bool:
        """The plan keeps the budget, and does not fit the device."""
        return self.planned is not None and self.planned.outcome.peak_bytes > self.device_bytes

    @property
    def fits(self) -> bool:
        return self.planned is not None and not self.too_large

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"budget": self.written, "budget_bytes": self.budget_bytes, "fits": self.fits}
        if self.refused is not None:
            found |= {"min_bytes": self.refused.min_bytes, "missing_bytes": self.refused.missing_bytes}
            found |= {"fullest": self.refused.row}
        if self.planned is not None:
            choice = {str(unit): name for unit, name in self.planned.plan.choice.items()}
            found |= {"outcome": self.planned.outcome.as_json(), "gap": self.planned.gap, "choice": choice}
        return found


def own_answer(seen: Outlook, ds: Mapping[str, Any], world: int, machine: Machine) -> Answer:
    """That of the JSON's own budget."""
    config = HiLoReConfig.from_ds_json(ds) or HiLoReConfig()
    return answer_to(seen, config.memory_budget, world, machine)


def answer_to(seen: Outlook, budget: MemoryBudget | RankBudgets, world: int, machine: Machine) -> Answer:
    """That of rank 0's budget."""
    from ds_hilore.planning.problem import Infeasible

    limit = budget.for_rank(0, world)
    count = limit.bytes_on(machine.memory_bytes, seen.job.replayed.peak_bytes)
    written = limit.as_json()
    text = written if isinstance(written, str) else f"{written:g}" if isinstance(written, float) else gigabytes(written)
    found = seen.job.planned(count)
    planned, refused = (None, found) if isinstance(found, Infeasible) else (found, None)
    return Answer(text, count, machine.memory_bytes, planned, refused)


def budget_of(text: str) -> MemoryBudget | RankBudgets:
    """A budget of the command line.

    Raises:
        UsageError: it is none.
    """
    value: Any = text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            break
    try:
        return parse_budget(value)
    except ValueError as error:
        raise UsageError(f"--budgets {text}: {error}") from None


def machine_of(
    name: str | None = None,
    memory_gb: float | None = None,
    tera_flops: float | None = None,
    giga_bytes_per_s: float | None = None,
) -> Machine:
    """The named device, else the one that is here, else a usual one; memory and speeds as far as they were given.

    Args:
        memory_gb: in GiB; tera_flops: 1e12 per second; giga_bytes_per_s: 1e9 bytes per second.

    Raises:
        UsageError: the name is not known, or a number makes no sense.
    """
    from ds_hilore.profiling.cost_model import DeviceSpeed
    from ds_hilore.profiling.devices import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, USUAL, device_named

    here = None if name else _device_here()
    device = here or device_named(name or USUAL)
    why = "named" if name else "the one here" if here else "none was named and none is here"
    memory = device.memory_bytes if memory_gb is None else int(memory_gb * 2**30)
    flops = device.speed.flops_per_s if tera_flops is None else tera_flops * 1e12
    bandwidth = device.speed.bytes_per_s if giga_bytes_per_s is None else giga_bytes_per_s * 1e9
    if min(memory, flops, bandwidth) <= 0:
        raise UsageError("--device-gb, --flops and --bandwidth must be above 0")
    shares = f"{ATTAINED_FLOPS:.0%} of its stated FLOP/s and {ATTAINED_BANDWIDTH:.0%} of its bandwidth, unless given"
    said = f"{device.name} ({why}): {flops / 1e12:.0f} TFLOP/s and {bandwidth / 1e9:.0f} GB/s reached ({shares})"
    return Machine(memory, DeviceSpeed(flops, bandwidth), said)


def _device_here() -> Any:
    import torch

    from ds_hilore.profiling.devices import device_like

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return device_like(properties.name, properties.total_memory)
