"""The ledger against physical memory: what arithmetic says that an update peaks at, and what it peaks at.

    python -m benchmarks.ledger                              # ZeRO 0-3 x offload x accumulation, two ranks
    python -m benchmarks.ledger --stages 3 --tokens 512 1024
    python -m benchmarks.ledger --write docs/memory.md       # puts the table there

Two CPU ranks under the malloc variables of design fact 20 replay every unit. Predicted: the measured level before the
update, what the ledger's arithmetic adds at each moment, and what the analytic cost model says of layers and loss;
nothing of it is fitted. Error: (predicted - measured) / (measured - level). On CPU what is offloaded stays in the
process, so device and host count together.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_hilore.integration.rehearsal import free_port
from ds_hilore.memory.glibc import TIGHT_ENVIRONMENT

RANKS = 2
LAYERS, HIDDEN, VOCABULARY = 6, 320, 4096
#: An adapter's gradient is then a mapping of its own (64 KiB): what is smaller stays in glibc's heap when freed.
LORA_RANK = 64
#: Share of what the update adds that predictions may be wrong by.
AIM = 0.05
BEGIN, END = "<!-- table of benchmarks.ledger -->", "<!-- end of the table -->"

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "optimizer + parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@dataclass(frozen=True)
class Setting:
    """One engine. `tokens`: lengths of the two rows of a microbatch, one update each."""

    stage: int
    offload: str
    adapters: bool
    accumulation: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One update of one rank. Bytes; `moment`: where the ledger sees the peak."""

    setting: Setting
    update: str
    tokens: int
    rank: int
    level: int
    predicted: int
    measured: int
    moment: str

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / max(1, self.measured - self.level)


def settings(stages: list[int], tokens: tuple[int, ...]) -> list[Setting]:
    offloads = {0: ["none"], 1: ["none", "optimizer"], 2: ["none", "optimizer"], 3: list(OFFLOADS)}
    return [
        Setting(stage, offload, adapters, accumulation, tokens)
        for stage in stages
        for offload in offloads[stage]
        for adapters in (True, False)
        for accumulation in (1, 3)
    ]


# -- in a rank -----------------------------------------------------------------------------------------------------


def measure(setting: Setting) -> list[Result]:
    """The first update and one later one for each length, on this rank."""
    from ds_hilore.core.types import Action
    from ds_hilore.memory.meter import CpuMeter

    engine, causal = _engine(setting)
    engine.hilore.force(Action.RECOMPUTE)
    meter = CpuMeter()
    found = []
    lengths = [setting.tokens[0], setting.tokens[0], *setting.tokens]
    for number, tokens in enumerate(lengths):
        gc.collect()
        meter.reset()
        level = meter.level_bytes()
        predicted, moment = predict(engine, causal, tokens, level)
        _update(engine, tokens)
        update = "first" if number == 0 else "later"
        if number != 1:  # ZeRO-3 only learns its order in the first microbatch
            rank = int(os.environ["RANK"])
            found.append(Result(setting, update, tokens, rank, level, predicted, meter.peak_bytes(), moment))
    return found


def predict(engine: Any, causal: Any, tokens: int, level: int) -> tuple[int, str]:
    """Peak of an update that replays every unit, and the moment of it."""
    from ds_hilore.core.types import Shape, UnitId
    from ds_hilore.integration.architecture import Setting as Trained
    from ds_hilore.integration.architecture import read_model
    from ds_hilore.integration.zero_facts import facts_of
    from ds_hilore.memory.arithmetic import zero_account
    from ds_hilore.memory.reduction import growing_gradients, transient_gradients
    from ds_hilore.memory.zero import ZeroFacts
    from ds_hilore.objective.head import default_chunk_tokens
    from ds_hilore.profiling.cost_model import DeviceSpeed, LayerCosts, head_costs, layer_costs
    from ds_hilore.profiling.job import Job, Layer, Outcome

    facts, shape = facts_of(engine), Shape(2, tokens)
    chunk = min(shape.tokens, default_chunk_tokens(VOCABULARY, shape.tokens))
    geometry = read_model(causal, Trained(chunk_tokens=chunk, gated_function=True))
    paths = [path for path, _ in engine.hilore.parts.unit_names.values()]
    costs = [layer_costs(layer) for layer in geometry.layers]

    def outcome(facts: ZeroFacts, costs: list[LayerCosts]) -> Outcome:
        growing, transient = growing_gradients(facts), transient_gradients(facts)
        layers = [
            Layer(UnitId(path), path, cost, cost, growing.get(path, 0), transient.get(path, 0))
            for path, cost in zip(paths, costs, strict=True)
        ]
        account = zero_account(facts).at_level(level)
        speed = DeviceSpeed(1e11, 1e10)  # seconds do not matter here
        return Job(tuple(layers), head_costs(geometry.head), account, shape, speed).replayed

    found = [outcome(facts, costs)]
    if not facts.stepped:  # the first replay of a class is made a second time, to prove what is dead
        proving = [replace(c, gradient_bytes=c.replayed_bytes + c.gradient_bytes) for c in costs]
        found.append(outcome(replace(facts, accumulation=1), proving))
    fullest = max(found, key=lambda one: one.peak_bytes)
    return fullest.peak_bytes, fullest.fullest


def _engine(setting: Setting) -> tuple[Any, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_hilore
    from benchmarks.subject import Policy

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 8 * HIDDEN // 3,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "max_position_embeddings": 4096,
    }
    causal = LlamaForCausalLM(LlamaConfig(**shape))
    adapters = LoraConfig(r=LORA_RANK, target_modules="all-linear")
    model = get_peft_model(causal, adapters) if setting.adapters else causal
    policy = Policy(model.train(), causal)
    zero = {"stage": setting.stage, "stage3_param_persistence_threshold": 1000, **OFFLOADS[setting.offload]}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": setting.accumulation,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
        "hilore": {"memory_budget": "1.0x", "selfcheck": {"updates": 0}},
    }
    trained = [p for p in policy.parameters() if p.requires_grad]
    engine, *_ = ds_hilore.initialize(model=policy, model_parameters=trained, config=config)
    return engine, causal


def _update(engine: Any, tokens: int) -> None:
    import torch

    for k in range(engine.gradient_accumulation_steps()):
        ids = torch.randint(0, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(k))
        engine.backward(-engine(ids, torch.ones(2, tokens - 1, dtype=torch.bool)).mean())
        engine.step()


def serve(cases: Path, out: Path) -> None:
    """All cases on this rank; the first is run once more before, so that imports and pools are there."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    listed = [Setting(**{**case, "tokens": tuple(case["tokens"])}) for case in json.loads(cases.read_text())]
    linear, found = torch.nn.functional.linear, []
    for number, setting in enumerate([listed[0], *listed]):
        results = measure(setting)
        torch.nn.functional.linear = linear  # ZeRO-3 replaces it for good
        gc.collect()
        if number:
            found += [dataclasses.asdict(result) for result in results]
            out.write_text(json.dumps(found))


# -- outside -------------------------------------------------------------------------------------------------------


def run(cases: list[Setting]) -> list[Result]:
    """Starts the ranks and waits for them.

    Raises:
        RuntimeError: a rank failed; the end of its log is the message.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
        processes = []
        for rank in range(RANKS):
            env = {**os.environ, **TIGHT_ENVIRONMENT, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            worker = [sys.executable, "-m", "benchmarks.ledger", "--worker", str(folder), "--rank", str(rank)]
            with (folder / f"log-{rank}.txt").open("w") as log:
                processes.append(subprocess.Popen(worker, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {rank}: {(folder / f'log-{rank}.txt').read_text()[-3000:]}")
        found = []
        for rank in range(RANKS):
            for data in json.loads((folder / f"out-{rank}.json").read_text()):
                setting = Setting(**{**data["setting"], "tokens": tuple(data["setting"]["tokens"])})
                found.append(Result(**{**data, "setting": setting}))
        return found


def worst_ranks(results: list[Result]) -> list[Result]:
    """Of each update, the rank with the larger error."""
    worst: dict[tuple[Setting, str, int], Result] = {}
    for result in results:
        key = (result.setting, result.update, result.tokens)
        if key not in worst or abs(result.error) > abs(worst[key].error):
            worst[key] = result
    return list(worst.values())


COLUMNS = (
    "ZeRO",
    "offload",
    "trained",
    "microbatches",
    "tokens",
    "update",
    "predicted",
    "measured",
    "error",
    "peak at",
)


def row(result: Result) -> tuple[str, ...]:
    setting = result.setting
    return (
        str(setting.stage),
        setting.offload,
        "LoRA" if setting.adapters else "all",
        str(setting.accumulation),
        f"2 x {result.tokens}",
        result.update,
        f"{(result.predicted - result.level) / 1e6:.1f}",
        f"{(result.measured - result.level) / 1e6:.1f}",
        f"{result.error:+.1%}",
        result.moment,
    )


def within(result: Result) -> bool:
    return abs(result.error) <= AIM


def table(results: list[Result]) -> Table:
    shown = Table(*COLUMNS, title="MB above the level before the update; worse rank of two")
    for result in results:
        shown.add_row(*row(result))
    return shown


def write(results: list[Result], path: Path) -> None:
    """Replaces what stands between the two marks of the document. Rows that miss the aim are bold."""
    lines = [f"{sum(map(within, results))} of {len(results)} updates are within {AIM:.0%}; the others are bold.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for result in results:
        cells = row(result) if within(result) else tuple(f"**{cell}**" for cell in row(result))
        lines.append("| " + " | ".join(cells) + " |")
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    path.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512], help="lengths of the two rows")
    parser.add_argument("--json", type=Path, help="one record per update and rank")
    parser.add_argument("--write", type=Path, help="document to put the table into")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        serve(arguments.worker / "cases.json", arguments.worker / f"out-{arguments.rank}.json")
        return
    results = run(settings(arguments.stages, tuple(arguments.tokens)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**dataclasses.asdict(r), "error": r.error} for r in results], indent=1))
    shown = worst_ranks(results)
    Console(width=140).print(table(shown))
    if arguments.write is not None:
        write(shown, arguments.write)


if __name__ == "__main__":
    main()
