"""Host memory for units' state: how much of it a rank's plans may use, and over what link."""

from __future__ import annotations

from typing import Any

import torch

from ds_hilore.core.config import BudgetKind, HiLoReConfig, MemoryBudget, Mode
from ds_hilore.core.fabric import ControlPlane, share_of_node
from ds_hilore.integration.pipeline import is_pipeline
from ds_hilore.memory.host import HostMemory
from ds_hilore.profiling.host_link import measured
from ds_hilore.runtime.controller import Controller


def offer_host_memory(engine: Any, config: HiLoReConfig, controller: Controller, plane: ControlPlane) -> list[str]:
    """Lets plans send state to host memory, where `host_budget` says so and there is something to gain.

    Returns:
        What to say at start: why nothing is sent, where the block asks for it in vain.
    """
    node = _node_bytes(config.host_budget, plane)
    if node == 0:
        return []
    device = torch.device(engine.device)
    link = controller.context.offload.link(device)
    if not link.apart:
        return ["hilore.host_budget has no effect: the device is the CPU, whose memory is the host's"]
    if is_pipeline(engine.module) or config.mode is Mode.PAPER:
        return ["hilore.host_budget has no effect in pipelines and in mode paper: nothing is sent to host memory"]
    controller.parts.planner.host_bytes = share_of_node(node, plane.node_ranks(), plane.rank)
    controller.measurements.link = measured(link, device)
    return []


def _node_bytes(budget: MemoryBudget, plane: ControlPlane) -> int:
    """The same on every rank of a node: of what they find free, the least. Where that is asked for, an exchange of all
    ranks."""
    if budget.kind is BudgetKind.BYTES:
        return int(budget.value)
    found = plane.exchange("free host memory", HostMemory().available_bytes())
    return int(budget.value * min(found[rank] for rank in plane.node_ranks()))
