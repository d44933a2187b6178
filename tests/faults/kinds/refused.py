"""What design fact 6 says is refused, and what cannot work: on every rank, before anything is changed.

The same faults by their messages, on one rank: tests/integration/test_misuse.py and tests/core/test_host_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.faults.bench import Bench, hilore_engine, model, settings
from tests.faults.records import Fault, Pair, Place
from tests.models import decoder_layers


def started(
    build: Callable[[], nn.Module] = model, block: dict[str, Any] | None = None, **json: Any
) -> Callable[[Bench], Pair]:
    def run(bench: Bench) -> Pair:
        hilore_engine(bench.stage, build, settings(bench.stage) | json, **(block or {}))
        raise AssertionError("nothing was refused")

    return run


def zero(**keys: Any) -> Callable[[Bench], Pair]:
    def run(bench: Bench) -> Pair:
        hilore_engine(bench.stage, model, settings(bench.stage, **keys))
        raise AssertionError("nothing was refused")

    return run


def compiled_model() -> nn.Module:
    return torch.compile(model())  # type: ignore[return-value]


def compiled_in_place() -> nn.Module:
    made = model()
    made.compile()
    return made


def compiled_unit() -> nn.Module:
    made = model()
    decoder_layers(made)[1].compile()
    return made


def compiled_later(bench: Bench) -> Pair:
    bench.ours.compile()
    raise AssertionError("nothing was refused")


def without_sync(bench: Bench) -> Pair:
    with bench.ours.no_sync():
        raise AssertionError("nothing was refused")


def _fault(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(name, Place.REFUSED, run=run, **{"becomes": "UnsupportedError", "stages": (2,), **more})


FAULTS: tuple[Fault, ...] = (
    _fault("DeepCompile", started(compile={"deepcompile": True})),
    _fault("torch.compile of the whole model, by the JSON", started(compile={"enabled": True})),
    _fault("torch.compile of the whole model", started(compiled_model)),
    _fault("torch.compile of the whole model, in place", started(compiled_in_place)),
    _fault("torch.compile around a unit", started(compiled_unit)),
    _fault("engine.compile()", compiled_later),
    _fault("ZenFlow", zero(zenflow={"topk_ratio": 0.1}), stages=(2,)),
    _fault("SuperOffload", zero(offload_optimizer={"device": "cpu", "super_offload": True}), stages=(3,)),
    _fault("tensor parallelism", started(tensor_parallel={"autotp_size": 2})),
    _fault("sequence parallelism", started(sequence_parallel_size=2)),
    _fault("expert parallelism", started(expert_parallel={"enabled": True})),
    _fault("no_sync under ZeRO-2 and ZeRO-3", without_sync, stages=(2, 3)),
    _fault("an unknown key", started(block={"memory_budgt": "1.1x"}), becomes="ConfigError"),
    _fault("a budget that cannot be", started(block={"memory_budget": "0.5x"}), becomes="ConfigError"),
    _fault("units that match nothing", started(block={"units": ["GPT9Block"]}), becomes="ConfigError"),
    _fault(
        "budgets for three ranks", started(block={"memory_budget": ["1.1x", "1.2x", "1.3x"]}), becomes="ConfigError"
    ),
)
