"""`hilore plan`: what a plan would win for a model and a DeepSpeed JSON, without weights, a run or a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds_hilore.cli.account import account_table, gigabytes
from ds_hilore.core.budget import MemoryBudget, RankBudgets, parse_budget
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UsageError

if TYPE_CHECKING:
    from ds_hilore.integration.outlook import Outlook, Training
    from ds_hilore.planning.problem import Infeasible
    from ds_hilore.profiling.cost_model import DeviceSpeed
    from ds_hilore.profiling.job import Planned

#: Exit codes: a plan fits the JSON's own budget and the device; none does. 2: the request is wrong (main.py).
FITS, DOES_NOT_FIT = 0, 1

BUDGETS = ("1.0x", "1.1x", "1.2x", "1.5x", "2.0x")

#: Columns of the tables where nobody says how many there are.
_WIDTH = 150

HELP = "what a plan would win for a model and a DeepSpeed JSON, without weights, a run or a GPU"
EPILOG = """\
examples:
  hilore plan --config ds.json --model ./Llama-3.1-8B --tokens 4 4096 --world 8
  hilore plan --config ds.json --model ./Qwen2.5-3B --tokens 8 2048 --device H100 --budgets 1.1x 60GB 0.9
  hilore plan --config ds.json --model ./Qwen3-30B-A3B --tokens 2 4096 --lora-targets q_proj k_proj v_proj o_proj
  hilore plan --config ds.json --model . --tokens 4 4096 --full-finetuning --json | jq .own.outcome.recovered_share

--model is a folder with a config.json (or that file); no weights are read.

exit codes: 0 a plan fits the JSON's own budget and the device; 1 none does; 2 the command line, the JSON or the model
is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description, parser.epilog = HELP + ".", EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, required=True, metavar="DS.json", help="the DeepSpeed JSON")
    parser.add_argument("--model", required=True, metavar="PATH", help="folder with a config.json, or that file")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        required=True,
        metavar=("B", "T"),
        help="a microbatch: sequences, and their length",
    )
    parser.add_argument("--world", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--budgets", nargs="+", metavar="BUDGET", help=f"as memory_budget (default {' '.join(BUDGETS)})"
    )
    parser.add_argument("--json", action="store_true", help="for machines: one object, bytes and seconds")
    training = parser.add_argument_group("training")
    training.add_argument("--lora-rank", type=int, default=16, metavar="R", help="default 16")
    training.add_argument(
        "--lora-targets", nargs="+", default=["all-linear"], metavar="NAME", help="as peft's (default all-linear)"
    )
    training.add_argument("--lora-dropout", type=float, default=0.0, metavar="P")
    training.add_argument("--full-finetuning", action="store_true", help="every parameter is trained, no LoRA")
    training.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help='for "auto" in the JSON')
    training.add_argument("--accumulation", type=int, default=1, metavar="N", help='for "auto" in the JSON')
    training.add_argument(
        "--attention", choices=("eager", "sdpa", "flash_attention_2"), help="default: the model's own"
    )
    training.add_argument("--padded", action="store_true", help="batches come with a padding mask")
    training.add_argument("--whole-logits", action="store_true", help="the loss makes the logits of all tokens at once")
    machine = parser.add_argument_group("device")
    machine.add_argument("--device", metavar="NAME", help="A100-80GB, H100, ...: its memory, and shares of its speed")
    machine.add_argument("--device-gb", type=float, metavar="GB", help="its memory, in GiB")
    machine.add_argument("--flops", type=float, metavar="TFLOPS", help="that matrix products reach, in 1e12 per second")
    machine.add_argument("--bandwidth", type=float, metavar="GBPS", help="that memory reaches, in 1e9 bytes per second")
    machine.add_argument(
        "--held-by-others", type=float, default=0.0, metavar="GB", help="a colocated sampler's, in GiB"
    )


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


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; gives the exit code.

    Raises:
        HiLoReError: the command line, the JSON or the model is wrong.
    """
    ds = read_json(arguments.config)
    errors = Console(stderr=True)
    # DeepSpeed and transformers write to stdout as they are imported, which is for the answer
    with contextlib.redirect_stdout(sys.stderr), errors.status("reading the model"):
        from ds_hilore.integration.outlook import outlook

        machine = machine_of(arguments)
        training = _training(arguments)
        seen = outlook(arguments.model, ds, training, machine.speed)
        own, others = answers(seen, ds, arguments, machine)
    if arguments.json:
        print(json.dumps(as_json(seen, own, others, arguments, machine), indent=1))
    else:
        console = Console()
        # a file or a pipe has no width of its own
        show(console if console.is_terminal else Console(width=_WIDTH), seen, own, others, arguments, machine)
    return FITS if own.fits else DOES_NOT_FIT


def answers(seen: Outlook, ds: Any, arguments: argparse.Namespace, machine: Machine) -> tuple[Answer, list[Answer]]:
    """The plan under the JSON's own budget, and those under the budgets asked for."""
    config = HiLoReConfig.from_ds_json(ds) or HiLoReConfig()
    own = _answer(seen, config.memory_budget, arguments.world, machine)
    budgets = [_budget(text) for text in arguments.budgets or BUDGETS]
    others = [_answer(seen, budget, arguments.world, machine) for budget in budgets]
    return own, [answer for answer in others if answer.budget_bytes != own.budget_bytes]


def _answer(seen: Outlook, budget: MemoryBudget | RankBudgets, world: int, machine: Machine) -> Answer:
    from ds_hilore.planning.problem import Infeasible

    limit = budget.for_rank(0, world)
    count = limit.bytes_on(machine.memory_bytes, seen.job.replayed.peak_bytes)
    written = limit.as_json()
    text = written if isinstance(written, str) else f"{written:g}" if isinstance(written, float) else gigabytes(written)
    found = seen.job.planned(count)
    planned, refused = (None, found) if isinstance(found, Infeasible) else (found, None)
    return Answer(text, count, machine.memory_bytes, planned, refused)


def _budget(text: str) -> MemoryBudget | RankBudgets:
    value: Any = text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            break
    try:
        return parse_budget(value)
    except ValueError as error:
        raise UsageError(f"--budgets {text}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The DeepSpeed JSON of --config.

    Raises:
        UsageError: it cannot be read, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; name the DeepSpeed JSON") from None
    except ValueError as error:
        raise UsageError(f"--config {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {path} holds a {type(found).__name__}; a DeepSpeed JSON is an object")
    return found


def _training(arguments: argparse.Namespace) -> Training:
    from ds_hilore.core.types import Shape
    from ds_hilore.integration.outlook import ALL_LINEAR, Lora, Training
    from ds_hilore.profiling.geometry import Attention

    ways = {"eager": Attention.EAGER, "sdpa": Attention.SDPA, "flash_attention_2": Attention.FLASH, None: None}
    for name in ("world", "lora_rank", "accumulation"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    if min(arguments.tokens) < 1:
        raise UsageError(f"--tokens {arguments.tokens[0]} {arguments.tokens[1]}: both must be at least 1")
    targets = arguments.lora_targets
    lora = Lora(arguments.lora_rank, ALL_LINEAR if targets == [ALL_LINEAR] else tuple(targets), arguments.lora_dropout)
    return Training(
        shape=Shape(*arguments.tokens),
        world_size=arguments.world,
        lora=None if arguments.full_finetuning else lora,
        dtype=arguments.dtype,
        accumulation=arguments.accumulation,
        attention=ways[arguments.attention],
        padded=arguments.padded,
        whole_logits=arguments.whole_logits,
        foreign_bytes=int(arguments.held_by_others * 2**30),
    )


def machine_of(arguments: argparse.Namespace) -> Machine:
    """The named device, else the one that is here, else a usual one; memory and speeds as far as they were given."""
    from ds_hilore.profiling.cost_model import DeviceSpeed
    from ds_hilore.profiling.devices import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, USUAL, device_named

    here = None if arguments.device else _device_here()
    device = here or device_named(arguments.device or USUAL)
    why = "named" if arguments.device else "the one here" if here else "none was named and none is here"
    memory = device.memory_bytes if arguments.device_gb is None else int(arguments.device_gb * 2**30)
    flops = device.speed.flops_per_s if arguments.flops is None else arguments.flops * 1e12
    bandwidth = device.speed.bytes_per_s if arguments.bandwidth is None else arguments.bandwidth * 1e9
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


# -- what is shown -------------------------------------------------------------------------------------------------


def assumptions(seen: Outlook, machine: Machine) -> list[str]:
    """Everything that the answer rests on, one sentence each."""
    return [
        f"device: {machine.said}",
        "bytes are those of tensors: the CUDA context, cached blocks and fragmentation come on top",
        "seconds are those of layers, head and loss; the optimizer's step, communication and sampling, which no plan "
        "changes, are not counted",
        "gradients are exact (store and recompute); compression is planned from a calibration in the running job, and "
        "dead rows from what the update announces",
        *seen.assumptions,
        *seen.superseded,
        *(f"not counted: {name}" for name in seen.job.account.unknown),
    ]


def as_json(
    seen: Outlook, own: Answer, others: list[Answer], arguments: argparse.Namespace, machine: Machine
) -> dict[str, Any]:
    """Plain data: bytes and seconds. `own`: the JSON's own budget."""
    job, facts = seen.job, seen.facts
    return {
        "model": {
            "path": arguments.model,
            "read_as": seen.kind,
            "units": seen.units,
            "parameters": sum(p.numel for p in facts.parameters),
            "trainable_parameters": sum(p.numel for p in facts.trainable),
        },
        "update": {
            "segments": job.shape.segments,
            "length": job.shape.length,
            "microbatches": job.accumulation,
            "zero_stage": facts.stage,
            "world_size": facts.world_size,
        },
        "device": {
            "memory_bytes": machine.memory_bytes,
            "flops_per_s": machine.speed.flops_per_s,
            "bytes_per_s": machine.speed.bytes_per_s,
        },
        "account": job.full_account().as_json(),
        "checkpointing": job.checkpointing.as_json(),
        "no_checkpointing": job.no_checkpointing.as_json(),
        "all_replayed": job.replayed.as_json(),
        "storing_bytes": job.storing_bytes,
        "own": own.as_json(),
        "budgets": [answer.as_json() for answer in others],
        "assumptions": assumptions(seen, machine),
    }


def show(
    console: Console, seen: Outlook, own: Answer, others: list[Answer], arguments: argparse.Namespace, machine: Machine
) -> None:
    """For people: the account, the measures, a row per budget, and what it all rests on."""
    job, facts = seen.job, seen.facts
    trained = sum(p.numel for p in facts.trainable)
    console.print(
        f"[bold]{arguments.model}[/]: {sum(p.numel for p in facts.parameters) / 1e9:.2f} billion parameters, "
        f"{trained / 1e6:,.1f} million trained; {seen.units}; ZeRO-{facts.stage} on {facts.world_size} "
        f"{'rank' if facts.world_size == 1 else 'ranks'}; {job.accumulation} x ({job.shape}) tokens an update",
        highlight=False,
    )
    console.print(account_table(job.full_account(), "memory of rank 0 when every unit is replayed"))
    console.print(_budget_table(seen, own, others))
    console.print(_verdict(seen, own), highlight=False)
    for line in assumptions(seen, machine):
        console.print(f"- {line}", style="dim", highlight=False)


def _budget_table(seen: Outlook, own: Answer, others: list[Answer]) -> Table:
    job = seen.job
    table = Table(title="one update", caption="units: H stored, R replayed, R:attention replayed without that kernel")
    for name in ("budget", "bytes", "peak", "fullest in", "units", "seconds", "of checkpointing", "recovered share"):
        table.add_column(name, justify="left" if name in ("budget", "fullest in", "units") else "right", no_wrap=True)
    measures = {
        "torch checkpointing": job.checkpointing,
        "no checkpointing": job.no_checkpointing,
        "all replayed": job.replayed,
    }
    for name, outcome in measures.items():
        table.add_row(name, "", *_cells(outcome, job.checkpointing.seconds))
    table.add_section()
    for answer in (own, *others):
        name = f"{answer.written} (the JSON's)" if answer is own else answer.written
        style = "bold" if answer is own else None
        table.add_row(
            name, gigabytes(answer.budget_bytes), *_answer_cells(answer, job.checkpointing.seconds), style=style
        )
    return table


def _answer_cells(answer: Answer, checkpointing_s: float) -> tuple[str, ...]:
    if answer.planned is None:
        assert answer.refused is not None
        return "does not fit", answer.refused.row, f"{gigabytes(answer.refused.missing_bytes)} missing", "", "", ""
    peak, *others = _cells(answer.planned.outcome, checkpointing_s)
    return (f"{peak}, device too small" if answer.too_large else peak), *others


def _cells(outcome: Any, checkpointing_s: float) -> tuple[str, ...]:
    units = ", ".join(f"{count} {name}" for name, count in sorted(outcome.variants.items()))
    return (
        gigabytes(outcome.peak_bytes),
        outcome.fullest,
        units,
        f"{outcome.seconds:.3g}",
        f"{outcome.seconds / checkpointing_s:.1%}",
        f"{outcome.recovered_share:.0%}",
    )


def _verdict(seen: Outlook, own: Answer) -> str:
    job = seen.job
    replays = 1 - job.no_checkpointing.seconds / job.checkpointing.seconds
    start = f"recomputation is {replays:.0%} of a checkpointed update; "
    if own.planned is None:
        return f"{start}under {own.written} {own.refused}; a larger budget, shorter microbatches or ZeRO-3 would help"
    outcome = own.planned.outcome
    if own.too_large:
        missing = gigabytes(outcome.peak_bytes - own.device_bytes)
        return f"{start}the plan under {own.written} needs {missing} more than the device has: name a smaller budget"
    return (
        f"{start}under {own.written} the plan recovers {outcome.recovered_share:.0%} of it: an update takes "
        f"{1 - outcome.seconds / job.checkpointing.seconds:.1%} less time. Storing every unit would take "
        f"{gigabytes(job.storing_bytes)} more than replaying all."
    )
