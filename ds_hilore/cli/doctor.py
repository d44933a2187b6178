"""`hilore doctor`: what is installed, what works on this machine, and what is not supported."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.cli.plan import read_json
from ds_hilore.core import deps
from ds_hilore.core.errors import HiLoReError, UsageError
from ds_hilore.core.limits import known_limits


@dataclass(frozen=True)
class Looked:
    """One thing that was looked at. `works` is None for something that is optional and not there."""

    name: str
    works: bool | None
    detail: str


def run(arguments: argparse.Namespace) -> int:
    """Prints what is found; 0: nothing is wrong, 1: something is.

    Raises:
        HiLoReError: the command line, or a file that it names, cannot be read.
    """
    found = _examined(arguments)
    wrong = any(finding.severity is Severity.WRONG for finding in found)
    if arguments.json:
        print(json.dumps({"findings": [finding.as_json() for finding in found]}, indent=1))
        return int(wrong)
    console = Console()
    healthy = print_diagnosis(console)
    for finding in found:
        console.print(f"{finding.severity.value}: {finding.where}: {finding.what}", markup=False, soft_wrap=True)
        console.print(f"  remedy: {finding.remedy}", markup=False, soft_wrap=True)
    if arguments.config is not None and not found:
        console.print(f"nothing is wrong with {arguments.config}", markup=False)
    return int(wrong or not healthy)


def _examined(arguments: argparse.Namespace) -> list[Finding]:
    """Findings on what the command line names."""
    if arguments.config is None:
        if arguments.model is not None or arguments.json:
            raise UsageError("--model and --json go with --config DS.json")
        return []
    ds = read_json(arguments.config)
    with contextlib.redirect_stdout(sys.stderr):  # hosts write to stdout as they are imported
        from ds_hilore.cli.checks import check_json, check_source

        found = check_json(ds)
        if arguments.model is not None and not any(finding.severity is Severity.WRONG for finding in found):
            found += check_source(arguments.model, ds)
    return found


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


def _table(title: str, findings: list[Looked]) -> Table:
    table = Table("", "", "", title=title, title_justify="left", show_header=False)
    signs = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for finding in findings:
        table.add_row(finding.name, signs[finding.works], finding.detail)
    return table


def _python() -> Looked:
    problem = deps.problem_with_python()
    return Looked("python", problem is None, problem or platform.python_version())


def _package(floor: deps.Floor) -> Looked:
    problem = deps.problem_with(floor)
    return Looked(floor.package, problem is None, problem or str(deps.installed_version(floor.package)))


def _optional(module: str) -> Looked:
    extra, purpose = deps.OPTIONAL[module]
    if deps.has(module):
        return Looked(module, True, f"{deps.installed_version(module) or 'version unknown'}: {purpose}")
    return Looked(module, None, f"{purpose}: pip install '{deps.PACKAGE}\\[{extra}]'")  # rich reads [ as markup


def _probed(name: str, probe: Callable[[], str]) -> Looked:
    try:
        return Looked(name, True, probe())
    except (HiLoReError, ImportError, OSError) as error:
        return Looked(name, False, str(error))


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
