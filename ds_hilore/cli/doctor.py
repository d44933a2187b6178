"""`hilore doctor`: what is installed, what works on this machine, and what is not supported."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.cli.options import read_json
from ds_hilore.core import deps
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import ConfigError, HiLoReError, UsageError
from ds_hilore.core.host_rules import zero_stage
from ds_hilore.core.limits import known_limits

HELP = "what is installed, what works here, and what is wrong with a DeepSpeed JSON, a model or a script"
EPILOG = """\
examples:
  hilore doctor
  hilore doctor --config ds.json
  hilore doctor --config ds.json --model ./Llama-3.1-8B --tokens 4 4096 --script train.py
  hilore doctor --config ds.json --model ./Qwen2.5-0.5B --run
  hilore doctor --config ds.json --json | jq -r '.findings[] | .where + ": " + .remedy'

--model is a folder with a config.json (or that file); no weights are read. --script is read, never run. --run makes
updates with LoRA adapters on this machine, as many as plans need, until one has been compared with the plain model.

exit codes: 0 nothing is wrong (notes name what has no effect); 1 something is, each with a remedy; 2 the command line
or a file that it names is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--config", type=Path, metavar="DS.json", help="look at this DeepSpeed JSON, too")
    parser.add_argument("--model", metavar="PATH", help="and at this model: a folder with a config.json, or that file")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        default=(1, 1),
        metavar=("B", "T"),
        help="a microbatch: does the budget hold it? (default 1 1)",
    )
    parser.add_argument("--world", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument("--script", type=Path, metavar="TRAIN.py", help="and at this script, which is not run")
    parser.add_argument("--run", dest="runs", action="store_true", help="and make one checked update of the model here")
    parser.add_argument("--json", action="store_true", help="for machines: findings only")


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
    print_diagnosis(console)
    for finding in found:
        console.print(f"{finding.severity.value}: {finding.where}: {finding.what}", markup=False, soft_wrap=True)
        if finding.severity is not Severity.SOUND:
            console.print(f"  remedy: {finding.remedy}", markup=False, soft_wrap=True)
    named = " and ".join(str(path) for path in (arguments.config, arguments.model, arguments.script) if path)
    if named and not found:
        console.print(f"nothing is wrong with {named}", markup=False, soft_wrap=True)
    return int(wrong)


def _examined(arguments: argparse.Namespace) -> list[Finding]:
    """Findings on this machine, and on what the command line names."""
    if arguments.model is not None and arguments.config is None:
        raise UsageError("--model goes with --config DS.json")
    if arguments.runs and arguments.model is None:
        raise UsageError("--run goes with --config DS.json and --model PATH")
    if arguments.world < 1 or min(arguments.tokens) < 1:
        raise UsageError("--tokens and --world must be at least 1")
    ds = {} if arguments.config is None else read_json(arguments.config)
    # hosts write to stdout as they are imported
    with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("looking"):
        from ds_hilore.cli.surroundings import check_backend, check_packages

        found = check_packages()
        if any(deps.installed_version(floor.package) is None for floor in deps.REQUIRED):
            what = "nothing else is looked at while packages are missing"
            return [*found, Finding(what, "this machine", "install them, then look again", Severity.NOTE)]
        found += check_backend()
        if arguments.config is not None:
            found += _of_json(ds, arguments)
        if arguments.script is not None:
            from ds_hilore.cli.script import check_script

            json_name = "" if arguments.config is None else arguments.config.name
            found += check_script(arguments.script, ds, _readable_block(ds), json_name)
    return found + _of_run(ds, arguments, found) if arguments.runs else found


def _of_run(ds: Mapping[str, Any], arguments: argparse.Namespace, found: list[Finding]) -> list[Finding]:
    """The verdict of a checked update, where nothing that was found stands against one."""
    from ds_hilore.cli.checked_run import TOKENS, Request, check_run

    if any(finding.severity is Severity.WRONG for finding in found):
        what = "no update was made while something else is wrong"
        return [Finding(what, arguments.model, "mend that, then look again", Severity.NOTE)]
    said = tuple(arguments.tokens)
    with Console(stderr=True).status("making a checked update"):
        return [check_run(Request(ds, arguments.model, TOKENS if said == (1, 1) else said))]


def _of_json(ds: Mapping[str, Any], arguments: argparse.Namespace) -> list[Finding]:
    """The JSON, what its block says of this machine, and the model under it."""
    from ds_hilore.cli.checks import check_budget, check_json, check_source
    from ds_hilore.cli.surroundings import check_device, check_profiles, device_now

    found = check_json(ds)
    sound = not any(finding.severity is Severity.WRONG for finding in found)
    config = _readable_block(ds)
    if config is not None:
        held = device_now()
        found += [*check_profiles(config, ds), *([] if held is None else check_device(config, held))]
    if arguments.model is None:
        return found
    if config is None:
        what = "the model is looked at with a block of defaults, and whether it fits not at all: no block can be read"
        found.append(Finding(what, arguments.model, "mend the block, then look again", Severity.NOTE))
    of_model = check_source(arguments.model, config or HiLoReConfig(), zero_stage(ds))
    found += of_model
    if config is None:
        return found
    if not sound or any(finding.severity is Severity.WRONG for finding in of_model):
        what = "whether the budget holds the model is not looked at while something else is wrong"
        return [*found, Finding(what, arguments.model, "mend that, then look again", Severity.NOTE)]
    return found + check_budget(arguments.model, ds, tuple(arguments.tokens), arguments.world)


def _readable_block(ds: Mapping[str, Any]) -> HiLoReConfig | None:
    """The block, where it is there, switched on and right."""
    with contextlib.suppress(ConfigError):
        return HiLoReConfig.from_ds_json(ds)
    return None


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
