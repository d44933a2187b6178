"""`hilore plan`: what a plan would win for a model and a DeepSpeed JSON, without weights, a run or a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds_hilore.cli.account import account_table, gigabytes
from ds_hilore.cli.answer import Answer, Machine, answer_to, budget_of, machine_of, own_answer
from ds_hilore.cli.options import add_subject, add_training, read_json, training_of
from ds_hilore.core.errors import UsageError

if TYPE_CHECKING:
    from ds_hilore.integration.outlook import Outlook

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
    add_subject(parser)
    parser.add_argument("--world", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--budgets", nargs="+", metavar="BUDGET", help=f"as memory_budget (default {' '.join(BUDGETS)})"
    )
    parser.add_argument("--json", action="store_true", help="for machines: one object, bytes and seconds")
    training = add_training(parser)
    training.add_argument("--padded", action="store_true", help="batches come with a padding mask")
    machine = parser.add_argument_group("device")
    machine.add_argument("--device", metavar="NAME", help="A100-80GB, H100, ...: its memory, and shares of its speed")
    machine.add_argument("--device-gb", type=float, metavar="GB", help="its memory, in GiB")
    machine.add_argument("--flops", type=float, metavar="TFLOPS", help="that matrix products reach, in 1e12 per second")
    machine.add_argument("--bandwidth", type=float, metavar="GBPS", help="that memory reaches, in 1e9 bytes per second")
    machine.add_argument(
        "--held-by-others", type=float, default=0.0, metavar="GB", help="a colocated sampler's, in GiB"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; gives the exit code.

    Raises:
        HiLoReError: the command line, the JSON or the model is wrong.
    """
    ds = read_json(arguments.config)
    if arguments.world < 1:
        raise UsageError(f"--world {arguments.world}: must be at least 1")
    errors = Console(stderr=True)
    # DeepSpeed and transformers write to stdout as they are imported, which is for the answer
    with contextlib.redirect_stdout(sys.stderr), errors.status("reading the model"):
        from ds_hilore.integration.outlook import outlook

        machine = machine_of(arguments.device, arguments.device_gb, arguments.flops, arguments.bandwidth)
        training = training_of(arguments, arguments.world)
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
    own = own_answer(seen, ds, arguments.world, machine)
    budgets = [budget_of(text) for text in arguments.budgets or BUDGETS]
    others = [answer_to(seen, budget, arguments.world, machine) for budget in budgets]
    return own, [answer for answer in others if answer.budget_bytes != own.budget_bytes]


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
