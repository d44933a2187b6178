"""Bare `hilore`: this machine, the JSON and the model that lie here, what plans could save, what to type next."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ds_hilore.cli.account import gigabytes
from ds_hilore.cli.findings import Severity
from ds_hilore.cli.surroundings import MAIN_MEMORY, Held, device_now
from ds_hilore.core import deps
from ds_hilore.core.config import BLOCK, HiLoReConfig
from ds_hilore.core.errors import ConfigError, HiLoReError

if TYPE_CHECKING:
    from ds_hilore.cli.answer import Answer
    from ds_hilore.integration.outlook import Outlook

#: Keys by which a JSON of DeepSpeed is known; one without a block has at least two of them.
_DEEPSPEED_KEYS = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "bf16",
    "fp16",
    "activation_checkpointing",
    "steps_per_print",
)
#: Larger files are data.
_LARGEST_JSON_BYTES = 1 << 18
#: The microbatch that is reckoned with where nobody names one.
TOKENS = (4, 2048)


@dataclass(frozen=True)
class Prospect:
    """What a plan would make of the model here under the JSON here, before any run; bytes, and shares of 1.

    Args:
        least_bytes: peak of replaying everything: the smallest budget.
        storing_bytes: what storing every unit takes more.
        saved_share: of a checkpointed update's time, under the JSON's own budget; None where none fits.
        possible_share: of the same, if nothing were recomputed.
        device: that was reckoned with.
    """

    model: str
    units: str
    least_bytes: int
    storing_bytes: int
    budget: str
    saved_share: float | None
    possible_share: float
    device: str


@dataclass(frozen=True)
class Summary:
    """All that bare `hilore` says.

    Args:
        missing: of needed packages, each with the pip command.
        config, model: what lies here; None: nothing does.
        block: whether the JSON has a block that is right and switched on.
        next: what to type, or to write, next; the first one first.
    """

    missing: tuple[str, ...]
    versions: Mapping[str, str]
    device: Held | None
    config: str | None
    block: bool
    model: str | None
    prospect: Prospect | None
    next: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary of this machine and this folder; 0: everything needed is installed, 1: something is not."""
    with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("looking"):
        found = summary(Path())
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show(Console(), found)
    return int(bool(found.missing))


def summary(folder: Path) -> Summary:
    """Of this machine and of what lies in a folder."""
    floors = deps.REQUIRED
    problems = [deps.problem_with_python(), *(deps.problem_with(floor) for floor in floors)]
    missing = tuple(problem for problem in problems if problem is not None)
    versions = {floor.package: deps.installed_version(floor.package) or "" for floor in floors if floor.version}
    config, ds = json_here(folder)
    model = model_here(folder)
    device = prospect = None
    sound = False
    if not missing:
        device, sound = device_now(), _sound(ds)
        if model is not None and (sound or config is None):
            prospect = _prospect(str(model), ds or {BLOCK: {}})
    first = _next(missing, config, sound, model, has_cuda=device is not None and device.name != MAIN_MEMORY)
    named = (None if path is None else str(path) for path in (config, model))
    shown, shown_model = named
    return Summary(missing, versions, device, shown, sound, shown_model, prospect, first)


# -- what lies here ------------------------------------------------------------------------------------------------


def json_here(folder: Path) -> tuple[Path | None, Mapping[str, Any] | None]:
    """The first JSON in a folder that has a "hilore" block, else the first that looks like DeepSpeed's."""
    others = None
    for path in sorted(folder.glob("*.json")):
        ds = _object(path)
        if ds is not None and BLOCK in ds:
            return path, ds
        if others is None and ds is not None and sum(key in ds for key in _DEEPSPEED_KEYS) > 1:
            others = path, ds
    return others or (None, None)


def model_here(folder: Path) -> Path | None:
    """This folder, or the first one in it, that holds the config.json of a model."""
    for path in [folder / "config.json", *sorted(folder.glob("*/config.json"))]:
        found = _object(path) if path.is_file() else None
        if found is not None and "model_type" in found:
            return path.parent
    return None


def _object(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _LARGEST_JSON_BYTES:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _sound(ds: Mapping[str, Any] | None) -> bool:
    """Whether there is a block that is switched on, and nothing is wrong with it and the JSON around it."""
    from ds_hilore.cli.checks import check_json

    if ds is None:
        return False
    with contextlib.suppress(ConfigError):
        if HiLoReConfig.from_ds_json(ds) is not None:
            return not any(finding.severity is Severity.WRONG for finding in check_json(ds))
    return False


def _prospect(source: str, ds: Mapping[str, Any]) -> Prospect | None:
    """None where nothing can be reckoned of this model."""
    from ds_hilore.cli.answer import machine_of, own_answer
    from ds_hilore.core.types import Shape
    from ds_hilore.integration.outlook import Training, outlook

    machine = machine_of()
    try:
        seen = outlook(source, ds, Training(Shape(*TOKENS)), machine.speed)
        return _told(source, seen, own_answer(seen, ds, 1, machine), machine.said.partition(":")[0])
    except HiLoReError:
        return None


def _told(source: str, seen: Outlook, answer: Answer, device: str) -> Prospect:
    job = seen.job
    whole = job.checkpointing.seconds
    saved = None if answer.planned is None else 1 - answer.planned.outcome.seconds / whole
    possible = 1 - job.no_checkpointing.seconds / whole
    sizes = job.replayed.peak_bytes, job.storing_bytes
    return Prospect(source, seen.units, *sizes, answer.written, saved, possible, device)


# -- what to do next -----------------------------------------------------------------------------------------------


def _next(
    missing: tuple[str, ...], config: Path | None, sound: bool, model: Path | None, has_cuda: bool
) -> tuple[str, ...]:
    if missing:
        return tuple(problem.rpartition(": ")[2] for problem in missing)
    if config is None:
        return (f'write a DeepSpeed JSON with "{BLOCK}": {{"memory_budget": "1.10x"}} in it, then: hilore',)
    name = shlex.quote(str(config))
    if not sound:
        return (f"hilore doctor --config {name}",)
    subject = f"--config {name} --model {'PATH' if model is None else shlex.quote(str(model))}"
    subject += f" --tokens {'B T' if model is None else f'{TOKENS[0]} {TOKENS[1]}'}"
    measuring = (f"hilore bench {subject}",) if has_cuda else ()
    return (f"hilore plan {subject}", *measuring, f"hilore doctor --config {name} --script train.py")


def show(console: Console, found: Summary) -> None:
    """For people."""

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    for problem in found.missing:
        say(problem, "red")
    if not found.missing:
        say("installed: " + ", ".join(f"{name} {version}" for name, version in found.versions.items()))
    if found.device is not None:
        total, left = gigabytes(found.device.total_bytes), gigabytes(found.device.left_bytes)
        none = "no CUDA device; " if found.device.name == MAIN_MEMORY else ""
        say(f"device: {none}{found.device.name}, {left} of {total} free")
    state = "" if found.config is None else "" if found.block else f', in which no "{BLOCK}" block is in force'
    say(f"JSON: {'none here' if found.config is None else found.config}{state}")
    say(f"model: {'none here (no config.json)' if found.model is None else found.model}")
    if found.prospect is not None:
        for line in _prospects(found.prospect):
            say(line)
    say("next:", "bold")
    for line in found.next:
        say(f"  {line}", "bold")


def _prospects(found: Prospect) -> tuple[str, ...]:
    batch = f"{TOKENS[0]} x {TOKENS[1]} tokens on one rank, adapters trained, on {found.device}"
    saved = "no plan fits" if found.saved_share is None else f"a plan takes {found.saved_share:.1%} less time"
    return (
        f"what could be saved ({found.units}; {batch}): recomputation is {found.possible_share:.0%} of an update with "
        f"checkpointing; under memory_budget {found.budget} {saved}",
        f"smallest budget: {gigabytes(found.least_bytes)}; storing everything takes {gigabytes(found.storing_bytes)} "
        "more",
    )
