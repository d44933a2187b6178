"""`hilore doctor`: what is installed, what works on this machine, and what is not supported."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ds_hilore.core import deps
from ds_hilore.core.errors import HiLoReError
from ds_hilore.core.limits import known_limits


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `works` is None for something that is optional and not there."""

    name: str
    works: bool | None
    detail: str


def print_diagnosis(console: Console) -> bool:
    """Prints all findings. True if everything that is needed is there and new enough."""
    packages = [_python(), *(_package(floor) for floor in deps.REQUIRED)]
    console.print(_table("Needed", packages))
    console.print(_table("Optional", [_optional(module) for module in deps.OPTIONAL]))
    console.print(_table("Works here", [_probed(name, probe) for name, probe in PROBES.items()]))
    limits = Table("not supported", "instead", title="Limits", title_justify="left")
    for limit in known_limits():
        limits.add_row(limit.what, limit.way_out)
    console.print(limits)
    healthy = all(finding.works for finding in packages)
    console.print("everything needed is there" if healthy else "ds_hilore cannot run here; see the lines marked no")
    return healthy


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table("", "", "", title=title, title_justify="left", show_header=False)
    signs = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for finding in findings:
        table.add_row(finding.name, signs[finding.works], finding.detail)
    return table


def _python() -> Finding:
    problem = deps.problem_with_python()
    return Finding("python", problem is None, problem or platform.python_version())


def _package(floor: deps.Floor) -> Finding:
    problem = deps.problem_with(floor)
    return Finding(floor.package, problem is None, problem or str(deps.installed_version(floor.package)))


def _optional(module: str) -> Finding:
    extra, purpose = deps.OPTIONAL[module]
    if deps.has(module):
        return Finding(module, True, f"{deps.installed_version(module) or 'version unknown'}: {purpose}")
    return Finding(module, None, f"{purpose}: pip install '{deps.PACKAGE}\\[{extra}]'")  # rich reads [ as markup


def _probed(name: str, probe: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, probe())
    except (HiLoReError, ImportError, OSError) as error:
        return Finding(name, False, str(error))


def _cuda() -> str:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("this torch sees no CUDA device; units run on CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names)


def _gloo() -> str:
    distributed = importlib.import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise ImportError("this torch was built without gloo: jobs of several ranks have no control plane")
    return "control plane of jobs of several ranks"


def _cpu_meter() -> str:
    from ds_hilore.memory.glibc import tight_malloc
    from ds_hilore.memory.meter import peak_meter

    meter = peak_meter("cpu")
    with tight_malloc():
        level_bytes = meter.level_bytes()
    return f"{meter.device_bytes() / 2**30:.1f} GiB in all, {level_bytes / 2**20:.0f} MiB held by this process"


PROBES: dict[str, Callable[[], str]] = {
    "CUDA device": _cuda,
    "gloo": _gloo,
    "physical peaks on CPU": _cpu_meter,
}
