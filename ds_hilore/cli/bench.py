"""`hilore bench`: the update step of the user's model under the user's JSON, way against way, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_hilore.cli.account import gigabytes
from ds_hilore.cli.bench_process import CHECKPOINTING, Way, written
from ds_hilore.cli.options import add_rehearsal, read_json, tokens_of
from ds_hilore.cli.statistics import Ratio
from ds_hilore.cli.worker import STDERR, worker_environment
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UsageError
from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT

HELP = "the update step of your model and JSON: no checkpointing, your checkpointing, hilore; times and peaks"
EPILOG = """\
examples:
  hilore bench --config ds.json --model ./Qwen2.5-3B --tokens 4 2048
  hilore bench --config ds.json --model ./Llama-3.1-8B --tokens 2 4096 --turns 40 --checkpointing deepspeed
  hilore bench --config ds.json --model . --tokens 4 2048 --json > bench.json && echo "hilore is faster here"

One rank, random tokens, GRPO's loss, a learning rate of 0; weights are read if they are there. The three ways take
turns in one engine. Ratios are taken within a turn; each is a median with its interval (95 %). Times and peaks come
from processes of their own.

exit codes: 0 hilore is faster than your checkpointing, beyond noise, within its budget; 1 it is not; 2 the command
line, the JSON or the model is wrong; 3 the updates failed.
"""

#: Fewer pairs have no interval worth the name.
LEAST_TURNS = 5
#: Columns of the table where nobody says how many there are.
_WIDTH = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_rehearsal(parser)
    parser.add_argument("--turns", type=int, default=20, metavar="N", help="updates of each way (default 20)")
    parser.add_argument(
        "--checkpointing",
        choices=CHECKPOINTING,
        default="torch",
        help="what yours is: torch's non-reentrant one, as Trainer and TRL have it (default), or DeepSpeed's",
    )


@dataclass(frozen=True)
class Measured:
    """One way. `peak_bytes` None: it does not fit on this device, and has no times then."""

    way: str
    peak_bytes: int | None
    seconds: float | None = None
    to_checkpointing: Ratio | None = None


@dataclass(frozen=True)
class Result:
    """All of them. `actions`: units of a planned microbatch by variant."""

    measured: tuple[Measured, ...]
    budget_bytes: int
    wander_bytes: int
    actions: Mapping[str, int]

    def of(self, way: Way) -> Measured:
        return next(each for each in self.measured if each.way == way.value)

    @property
    def over_bytes(self) -> int:
        """By how much hilore's peak is above its budget, beyond what peaks of equal updates differ by."""
        peak = self.of(Way.HILORE).peak_bytes
        return 0 if peak is None else max(0, peak - self.wander_bytes - self.budget_bytes)

    @property
    def faster(self) -> bool:
        """Than checkpointing, beyond noise."""
        ratio = self.of(Way.HILORE).to_checkpointing
        return ratio is not None and ratio.high < 1

    @property
    def recovered_share(self) -> float | None:
        """Of the time that checkpointing costs; None where that cannot be told."""
        ours, none = (self.of(way).to_checkpointing for way in (Way.HILORE, Way.NONE))
        if ours is None or none is None or none.median >= 1:
            return None
        return (1 - ours.median) / (1 - none.median)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; gives the exit code.

    Raises:
        HiLoReError: the request is wrong.
    """
    HiLoReConfig.from_ds_json(read_json(arguments.config))
    if arguments.turns < LEAST_TURNS:
        raise UsageError(f"--turns {arguments.turns}: at least {LEAST_TURNS}, or no interval can be given")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("hilore bench measures one rank: start it without a launcher")
    tokens_of(arguments)
    try:
        peaks, times = _reports(arguments)
    except _ProcessFailed as failed:
        return failed.code
    found = result(peaks, times)
    if arguments.json:
        print(json.dumps(as_json(found, times), indent=1))
    else:
        console = Console()
        show(console if console.is_terminal else Console(width=_WIDTH), found, times)
    return int(not found.faster or found.over_bytes > 0)


# -- the processes -------------------------------------------------------------------------------------------------


class _ProcessFailed(Exception):
    """A process has said on stderr why it failed, and ended with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _reports(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    ordinary = worker_environment(TIGHT_ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="hilore-bench-") as folder:
        spec = Path(folder) / "spec.json"
        spec.write_text(written(arguments), encoding="utf-8")
        peaks = _report("peaks", spec, {**ordinary, **TIGHT_ENVIRONMENT})
        return peaks, _report("times", spec, ordinary)


def _report(what: str, spec: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    from ds_hilore.cli.main import FAILED, INTERRUPTED, WRONG

    out = spec.with_name(f"{what}.json")
    worker = [sys.executable, "-m", "ds_hilore.cli.bench_process", what, str(spec), str(out)]
    code = subprocess.run(worker, env=dict(environment), stdout=STDERR, check=False).returncode
    if code in (WRONG, INTERRUPTED):
        raise _ProcessFailed(code)
    if code:
        said = (
            f"was ended by signal {-code} (out of memory? give smaller --tokens)" if code < 0 else "failed; see above"
        )
        print(f"hilore: the process that takes {what} {said}", file=sys.stderr)
        raise _ProcessFailed(FAILED)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


# -- what was found ------------------------------------------------------------------------------------------------


def result(peaks: Mapping[str, Any], times: Mapping[str, Any]) -> Result:
    """Puts the reports of both processes together."""
    base = times["seconds"].get(Way.CHECKPOINTING.value)
    found = []
    for way, peak in peaks["peaks"].items():
        taken = times["seconds"].get(way)
        ratio = None if taken is None or base is None else Ratio.of(taken, base)
        found.append(Measured(way, peak, None if taken is None else median(taken), ratio))
    return Result(tuple(found), peaks["budget_bytes"], peaks["wander_bytes"], times["actions"])


def as_json(found: Result, times: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data: bytes and seconds."""
    return {
        "update": times["update"],
        "ways": [asdict(each) for each in found.measured],
        "budget_bytes": found.budget_bytes,
        "over_bytes": found.over_bytes,
        "faster": found.faster,
        "recovered_share": found.recovered_share,
        "units": dict(found.actions),
        "seconds": times["seconds"],
        "notes": times["notes"],
    }


def show(console: Console, found: Result, times: Mapping[str, Any]) -> None:
    """For people."""
    table = Table(title=f"one update, budget {gigabytes(found.budget_bytes)}")
    for name in ("", "seconds", "of your checkpointing [95 %]", "peak"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for each in found.measured:
        if each.seconds is None or each.peak_bytes is None:
            table.add_row(each.way, "does not fit", "", "")
        else:
            table.add_row(each.way, f"{each.seconds:.4g}", str(each.to_checkpointing), gigabytes(each.peak_bytes))
    console.print(f"[bold]{times['said']}[/]", highlight=False)
    console.print(table)
    console.print(verdict(found), highlight=False, soft_wrap=True)
    for line in times["notes"]:
        console.print(f"- {line}", style="dim", markup=False, highlight=False)


def verdict(found: Result) -> str:
    """What it comes to, and what to do next."""
    ratio = found.of(Way.HILORE).to_checkpointing
    if ratio is None:
        return "your checkpointing does not fit on this device, so there is nothing to compare with"
    units = ", ".join(f"{count} {name}" for name, count in sorted(found.actions.items()))
    if found.over_bytes:
        return (
            f"hilore's peak is {gigabytes(found.over_bytes)} above its budget: write bytes in place of a multiple, and "
            f"see Troubleshooting, Out of memory. Units: {units}"
        )
    if not found.faster:
        return (
            f"no gain beyond noise: {ratio} of your checkpointing's time. More memory_budget, longer sequences or more "
            f"--turns may show one; Troubleshooting, No gain, has the usual reasons. Units: {units}"
        )
    share = "" if found.recovered_share is None else f", {found.recovered_share:.0%} of what checkpointing costs"
    return f"hilore takes {1 - ratio.median:.1%} less time than your checkpointing{share}. Units: {units}"
