"""Ranks that were started otherwise than the others, or do otherwise in an update: all are told what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_hilore
from ds_hilore.core import deps
from ds_hilore.core.types import Action
from tests.faults.bench import Bench, hilore_engine, model, settings
from tests.faults.records import Fault, Pair, Place, Plans, update
from tests.faults.sites import replaced
from tests.models import batch, llama, lora


def odd() -> bool:
    """Whether this is the rank that differs."""
    return dist.get_rank() == 1


def started(
    build: Callable[[], nn.Module] = model,
    ds: Callable[[int], dict[str, Any]] = settings,
    block: dict[str, Any] | None = None,
) -> Callable[[Bench], Pair]:
    """Rank 1 starts an engine of another model, JSON or block than rank 0."""

    def run(bench: Bench) -> Pair:
        stage = bench.stage
        if odd():
            hilore_engine(stage, build, ds(stage), **(block or {}))
        else:
            hilore_engine(stage)
        raise AssertionError("nobody noticed")

    return run


def other_json(stage: int) -> dict[str, Any]:
    return settings(stage) | {"gradient_clipping": 0.5}


def other_stage(stage: int) -> dict[str, Any]:
    return settings((stage + 1) % 4)


def other_accumulation(stage: int) -> dict[str, Any]:
    return settings(stage) | {"gradient_accumulation_steps": 4}


def one_layer_more() -> nn.Module:
    return lora(llama(layers=4), lora_dropout=0.1)


def narrower() -> nn.Module:
    return lora(llama(layers=3, hidden=32), lora_dropout=0.1)


def other_adapters() -> nn.Module:
    return lora(llama(layers=3), ["q_proj", "v_proj"], lora_dropout=0.1)


def one_frozen() -> nn.Module:
    made = model()
    next(p for p in made.parameters() if p.requires_grad).requires_grad_(False)
    return made


def other_version(package: str) -> Callable[[Bench], Pair]:
    """Rank 1 has another version of a package."""

    def run(bench: Bench) -> Pair:
        def version(name: str) -> str | None:
            return "99.0" if name == package and odd() else installed(name)

        installed = deps.installed_version
        with replaced({"ds_hilore.core.deps:installed_version": version})():
            hilore_engine(bench.stage)
        raise AssertionError("nobody noticed")

    return run


def own(bench: Bench) -> Any:
    made = bench.borrow(hilore_engine(bench.stage))
    made.hilore.force(Action.RECOMPUTE)
    return made


def other_tokens(bench: Bench) -> Pair:
    """Legal: ranks have batches of their own sizes."""
    from tests.faults.bench import policy_loss
    from tests.faults.kinds.between import microbatches

    rows, tokens = (4, 40) if odd() else (1, 3)
    return microbatches(bench, lambda made, ids, _: made.backward(policy_loss(made, *batch(1, rows, tokens))))


def other_plans(bench: Bench) -> Pair:
    """Legal: plans are a rank's own."""
    bench.ours.hilore.force(Action.STORE if odd() else Action.RECOMPUTE)
    return update(bench)


def announced_otherwise(bench: Bench) -> Pair:
    """Rank 1 announces three microbatches of an update of two."""
    count = 3 if odd() else 2
    ds_hilore.begin_update([torch.ones(2)] * count, [torch.ones(2, 15)] * count, 60.0, engine=own(bench))
    return once(bench)


def announced_by_one(bench: Bench) -> Pair:
    made = own(bench)
    if odd():
        ds_hilore.begin_update([torch.ones(2)] * 2, [torch.ones(2, 15)] * 2, 60.0, engine=made)
    return once(bench)


def forced_by_one(bench: Bench) -> Pair:
    bench.ours.hilore.force(Action.STORE if odd() else None)
    return update(bench)


def one_microbatch_ahead(bench: Bench) -> Pair:
    """Rank 1 counts a microbatch that rank 0 has not made."""
    made = own(bench)
    made.micro_steps += odd()
    return once(bench)


def one_update_ahead(bench: Bench) -> Pair:
    made = own(bench)
    made.hilore.update += odd()
    return once(bench)


def once(bench: Bench) -> Pair:
    """An update of an engine whose ranks will be apart for good."""
    try:
        return update(bench)
    finally:
        bench.end()


def _fault(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(
        name, Place.RANKS, run=run, **{"becomes": "RankMismatch", "plan": Plans.REPLAY, "stages": (2,), **more}
    )


FAULTS: tuple[Fault, ...] = (
    _fault("another block", started(block={"memory_budget": "1.3x"})),
    _fault("another DeepSpeed JSON", started(ds=other_json)),
    _fault("another ZeRO stage", started(ds=other_stage)),
    _fault("another accumulation", started(ds=other_accumulation)),
    _fault("another number of units", started(one_layer_more)),
    _fault("another width of the model", started(narrower)),
    _fault("other adapters", started(other_adapters)),
    _fault("one parameter frozen", started(one_frozen)),
    _fault("another version of torch", other_version("torch")),
    _fault("another version of ds_hilore", other_version("ds_hilore")),
    _fault("another number of microbatches is announced", announced_otherwise),
    _fault("only one rank announces its update", announced_by_one),
    _fault("only one rank has a forced plan", forced_by_one),
    _fault("one rank is a microbatch ahead", one_microbatch_ahead),
    _fault("one rank is an update ahead", one_update_ahead),
    _fault("another number of tokens", other_tokens, becomes="right", stages=(2, 3)),
    _fault("other plans", other_plans, becomes="right", stages=(2, 3)),
)
