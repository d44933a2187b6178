"""Checks of `hilore doctor` on what is around a run: packages, the accelerator, the device, stored profiles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hilore.cli.account import gigabytes
from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.core import deps
from ds_hilore.core.budget import BudgetKind, MemoryBudget
from ds_hilore.core.config import BLOCK, HiLoReConfig
from ds_hilore.core.errors import UnsupportedError
from ds_hilore.core.host_rules import zero_stage

#: What a machine without a CUDA device runs on.
MAIN_MEMORY = "main memory"
#: What others may hold of a device without being named: contexts, desktops, drivers.
_UNREMARKABLE_SHARE = 0.03


def check_packages() -> list[Finding]:
    """What is missing or too old."""
    problems = [("python", deps.problem_with_python())]
    problems += [(floor.package, deps.problem_with(floor)) for floor in deps.REQUIRED]
    return [
        Finding(what, name, way_out) for name, problem in problems if problem for what, way_out in [_apart(problem)]
    ]


def _apart(problem: str) -> tuple[str, str]:
    """A line of core/deps.py: "what: way out"."""
    what, _, way_out = problem.rpartition(": ")
    return what, way_out


def check_backend(environment: Mapping[str, str] = os.environ, has_cuda: bool | None = None) -> list[Finding]:
    """Whether DeepSpeed, on the device that is here, is what will run.

    Args:
        has_cuda: None: torch is asked.
    """
    if has_cuda is None:
        import torch

        has_cuda = torch.cuda.is_available()
    name, found = environment.get("DS_ACCELERATOR", ""), []
    if name == "cuda" and not has_cuda:
        what = "DS_ACCELERATOR=cuda, and torch sees no CUDA device"
        found.append(Finding(what, "DS_ACCELERATOR", "unset it, or install a torch and a driver that see the device"))
    if name == "cpu" and has_cuda:
        what = "DS_ACCELERATOR=cpu: DeepSpeed runs on the CPU, beside a CUDA device"
        found.append(Finding(what, "DS_ACCELERATOR", "unset it", Severity.NOTE))
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        what = "accelerate is told to use FSDP: DeepSpeed is not used, and nobody reads the block"
        found.append(Finding(what, "ACCELERATE_USE_FSDP", "unset it, and choose DeepSpeed in `accelerate config`"))
    return found


@dataclass(frozen=True)
class Held:
    """The device now. `others_bytes`: what other processes hold of it."""

    name: str
    total_bytes: int
    others_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - self.others_bytes


def device_now() -> Held | None:
    """The first CUDA device, or the machine's memory where there is none. None: nobody tells."""
    import torch

    from ds_hilore.memory.host import HostMemory
    from ds_hilore.memory.meter import CudaMeter

    if torch.cuda.is_available():
        meter = CudaMeter(torch.device("cuda:0"))
        return Held(torch.cuda.get_device_name(0), meter.device_bytes(), meter.others_bytes())
    memory = HostMemory()
    try:
        total = memory.total_bytes()
        return Held(MAIN_MEMORY, total, max(0, total - memory.available_bytes()))
    except UnsupportedError:
        return None


def check_device(config: HiLoReConfig, held: Held) -> list[Finding]:
    """Whether what others hold of the device (a colocated sampler) leaves room for the budget.

    Multiples of the peak are known in the run only; "auto" and "free" look for themselves.
    """
    budget = config.memory_budget
    remedy = f'stop them, write "{BLOCK}": {{"memory_budget": "free"}}, or at most {held.left_bytes} bytes'
    where = f"{BLOCK}.memory_budget"
    if isinstance(budget, MemoryBudget) and budget.kind in (BudgetKind.BYTES, BudgetKind.DEVICE_SHARE):
        wanted = budget.bytes_on(held.total_bytes, 0)
        if wanted > held.left_bytes:
            what = (
                f"the budget is {gigabytes(wanted)}, and of {held.name} ({gigabytes(held.total_bytes)}) others hold "
                f"{gigabytes(held.others_bytes)}"
            )
            return [Finding(what, where, remedy)]
    automatic = isinstance(budget, MemoryBudget) and budget.kind is BudgetKind.AUTO
    if automatic or held.others_bytes <= _UNREMARKABLE_SHARE * held.total_bytes or held.name == MAIN_MEMORY:
        return []
    what = f"others hold {gigabytes(held.others_bytes)} of {held.name}: a sampler, or another job"
    return [Finding(what, where, remedy, Severity.NOTE)]


def check_profiles(config: HiLoReConfig, ds: Mapping[str, Any]) -> list[Finding]:
    """Stored profiles that the next run will not take over: damaged, or of other versions or another ZeRO stage."""
    from ds_hilore.profiling.store import folder_of, survey

    folder = folder_of(config.profile.path)
    if folder is None:
        return []
    found, of_this_stage, of_others = [], 0, set()
    for path, fingerprint in survey(folder):
        if isinstance(fingerprint, str):
            found.append(_stale(path, f"the stored profile {fingerprint}"))
            continue
        changed = [
            f"{name} {then} then, {now} now" for name, then, now in _versions(fingerprint) if then != (now or "")
        ]
        if changed:
            found.append(_stale(path, f"the stored profile is stale: {', '.join(changed)}"))
        elif fingerprint.zero_stage == zero_stage(ds):
            of_this_stage += 1
        else:
            of_others.add(fingerprint.zero_stage)
    if of_others and not of_this_stage:
        stages = ", ".join(f"ZeRO-{stage}" for stage in sorted(of_others))
        found.append(_stale(folder, f"stored profiles are of {stages}, and the JSON says ZeRO-{zero_stage(ds)}"))
    return found


def _versions(fingerprint: Any) -> list[tuple[str, str, str | None]]:
    import torch

    names = ("deepspeed", "transformers", "ds_hilore")
    found = [(name, getattr(fingerprint, name), deps.installed_version(name)) for name in names]
    return [("torch", fingerprint.torch, torch.__version__), *found]


def _stale(path: Path, what: str) -> Finding:
    remedy = "none needed: the next run measures anew; or do that now with `hilore profile`"
    return Finding(what, str(path), remedy, Severity.NOTE)
