"""Ranks that differ where they must not: a typed error on every rank, soon, and no hang (issue 9, control plane)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import ConfigError, RankMismatch
from ds_hilore.core.types import Action
from ds_hilore.integration.control_plane import control_plane
from ds_hilore.integration.deepspeed_engine import attach
from ds_hilore.integration.units import find_units
from tests.engines import config
from tests.engines import engine as plain_engine
from tests.models import batch, decoder_layers, llama, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_ranks_agree"
BLOCK = {"memory_budget": "1.0x"}
LIMIT_S = 60.0


def settings(stage: int, accumulation: int = 1, block: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    return config(stage, accumulation, lr=0.0, **zero) | {"hilore": BLOCK if block is None else block}


def start(model: nn.Module, ds: dict[str, Any]) -> Any:
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=model.parameters(), config=ds)
    return engine


def refused(action: Callable[[], Any]) -> tuple[str, float]:
    """Message and seconds of the RankMismatch that `action` must raise; the ranks are still in step afterwards."""
    started = time.monotonic()
    with pytest.raises(RankMismatch) as caught:
        action()
    seconds = time.monotonic() - started
    dist.barrier()
    return str(caught.value), seconds


# ------------------------------------------------------------------------------------------------ at start


class Stateless(nn.Module):
    """A unit without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Stack(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.units = nn.ModuleList(Stateless() for _ in range(units))


def differing(case: str, stage: int) -> tuple[str, float]:
    odd = dist.get_rank() == 1
    model: nn.Module = llama(layers=2)
    ds = settings(stage)
    if case == "block":
        ds = settings(stage, block=BLOCK | {"planner": {"time_limit_s": 11 if odd else 10}})
    elif case == "budget":
        ds = settings(stage, block={"memory_budget": "1.2x" if odd else "1.1x"})
    elif case == "json":
        ds = settings(stage, reduce_bucket_size=1000 if odd else 2000)
    elif case == "stage":
        ds = settings(stage - 1 if odd else stage)
    elif case == "layers":
        model = llama(layers=3 if odd else 2)
    elif case == "width":
        model = llama(layers=2, hidden=32 if odd else 64)
    elif case == "units":
        model = Stack(3 if odd else 2)
        ds = settings(stage, block=BLOCK | {"units": ["Stateless"]})
    return refused(lambda: start(model, ds))


AT_START = [
    ("block", 0, "hilore block", "11"),
    ("budget", 1, "hilore block", "1.2x"),
    ("json", 2, "DeepSpeed JSON", ""),
    ("stage", 3, "DeepSpeed JSON", ""),
    ("layers", 0, "model parameters", ""),
    ("layers", 3, "number of units", "3 on rank 1"),
    ("width", 3, "model parameters", ""),
    ("units", 1, "number of units", "2 on rank 0; 3 on rank 1"),
]


@pytest.mark.parametrize(("case", "stage", "key", "value"), AT_START)
def test_different_start(ranks: RankPool, case: str, stage: int, key: str, value: str) -> None:
    for message, seconds in ranks.run(f"{HERE}:differing", case=case, stage=stage):
        assert f"  {key}: " in message and value in message, message
        assert "rank 0" in message and "rank 1" in message
        assert seconds < LIMIT_S


def trained_with_own_budgets() -> tuple[float, float]:
    """A list of budgets is one thing for all ranks; each takes its own entry."""
    engine = start(llama(layers=2), settings(2, block={"memory_budget": ["900MB", "800MB"]}))
    ids, advantages = batch(seed=dist.get_rank())
    loss = plain_loss(engine, ids, advantages)
    engine.backward(loss)
    engine.step()
    return float(loss), float(engine.hilore.parts.planner.budget.value)


def test_a_list_of_budgets_is_legal(ranks: RankPool) -> None:
    seen = ranks.run(f"{HERE}:trained_with_own_budgets")
    assert [budget for _, budget in seen] == [900e6, 800e6]
    assert all(torch.isfinite(torch.tensor(loss)) for loss, _ in seen)


# ------------------------------------------------------------------------------------------------ at an update


def forward(engine: Any) -> Tensor:
    return plain_loss(engine, *batch(seed=dist.get_rank()))


def update(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(forward(engine))
        engine.step()


def apart(case: str, stage: int) -> tuple[str, float]:
    engine = start(llama(layers=2), settings(stage, accumulation=2))
    odd = dist.get_rank() == 1
    update(engine)
    if case == "microbatches":
        count = 3 if odd else 2
        ds_hilore.begin_update([torch.ones(2)] * count, [torch.ones(2, 15)] * count, 60.0)
    elif case == "forced":
        engine.hilore.force(Action.STORE if odd else None)
    elif case == "position" and odd:
        engine.micro_steps += 1  # as after an update that another rank did not make
    message, seconds = refused(lambda: forward(engine))
    if case == "forced":  # told in step, so the ranks can go on once they agree
        engine.hilore.force(None)
        update(engine)
    ds_hilore.detach(engine)
    return message, seconds


@pytest.mark.parametrize(
    ("case", "stage", "told"),
    [
        ("microbatches", 1, "announced microbatches: 2 on rank 0; 3 on rank 1"),
        ("microbatches", 3, "announced microbatches: 2 on rank 0; 3 on rank 1"),
        ("forced", 3, "forced: false on rank 0; true on rank 1"),
        ("position", 2, "micro_steps: 2 on rank 0; 3 on rank 1"),
    ],
)
def test_different_update(ranks: RankPool, case: str, stage: int, told: str) -> None:
    for message, seconds in ranks.run(f"{HERE}:apart", case=case, stage=stage):
        assert told in message
        assert seconds < LIMIT_S


def one_announces() -> tuple[str, float]:
    """Where plans may compress, ranks split an update's risk as it is announced: all of them, or none."""
    ds = settings(1, accumulation=2, block=BLOCK | {"max_gradient_error": 0.01})
    engine = start(llama(layers=2), ds)

    def announce() -> None:
        ds_hilore.begin_update([torch.ones(2)] * 2, [torch.ones(2, 15)] * 2, 60.0, engine=engine)

    announce()
    update(engine)
    found = refused(announce if dist.get_rank() == 0 else lambda: forward(engine))
    ds_hilore.detach(engine)
    return found


def test_an_update_that_only_one_rank_announces(ranks: RankPool) -> None:
    for message, seconds in ranks.run(f"{HERE}:one_announces"):
        assert "'price of risk'" in message and "'microbatch'" in message
        assert seconds < LIMIT_S


def other_plans(stage: int) -> list[str]:
    """Plans themselves are a rank's own affair: one rank stores, the other replays, twenty updates."""
    engine = start(llama(layers=2), settings(stage))
    engine.hilore.force(Action.STORE if dist.get_rank() == 1 else Action.RECOMPUTE)
    for _ in range(20):
        update(engine)
    return sorted({action.value for action in engine.hilore.microbatch.ran.values()})


def test_plans_may_differ(ranks: RankPool) -> None:
    assert ranks.run(f"{HERE}:other_plans", stage=3) == [["recompute"], ["store"]]


def one_rank_sleeps(stage: int, time_limit_s: float) -> tuple[str, float]:
    """Rank 1 does not come to the second update in time. The limit travels with the control plane that is handed in."""
    model = llama(layers=2)
    ds = settings(stage)
    units = decoder_layers(model) if stage == 3 else None
    found = find_units(model, "auto")
    engine = plain_engine(model, ds, units)
    parsed = HiLoReConfig.from_ds_json(ds)
    assert parsed is not None
    attach(engine, parsed, ds, units=found, plane=control_plane(time_limit_s))
    update(engine)
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(time_limit_s + 2)
    with pytest.raises(RankMismatch) as caught:
        forward(engine)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_does_not_come(ranks: RankPool, stage: int) -> None:
    limit_s = 3.0
    waiting, late = ranks.run(f"{HERE}:one_rank_sleeps", stage=stage, time_limit_s=limit_s)
    message, seconds = waiting
    assert "'microbatch'" in message and "time limit 3 s" in message and "rank 1" in message
    assert limit_s <= seconds < LIMIT_S
    assert "microbatch" in late[0]


# ------------------------------------------------------------------------------------------------ its cost


def exchange_ms(stage: int) -> list[float]:
    engine = start(llama(layers=2), settings(stage))
    host = engine._hilore_host
    seconds = []
    for _ in range(40):
        dist.barrier()
        started = time.perf_counter()
        host._meet_ranks()
        seconds.append(1e3 * (time.perf_counter() - started))
    return seconds


def test_meeting_before_a_microbatch_is_one_exchange(
    ranks: RankPool, record_property: Callable[[str, object], None]
) -> None:
    """The time is noted for reports, never judged."""
    for rank, times in enumerate(ranks.run(f"{HERE}:exchange_ms", stage=3)):
        assert len(times) == 40
        record_property(f"rank_{rank}_median_ms", statistics.median(times))
        print(f"rank {rank}: median {statistics.median(times):.3f} ms")


# ---------------------------------------------------------------------------------- last: it parts the ranks


def only_one_rank_has_a_bad_block() -> str:
    """Rank 1 finds its own fault before it meets anybody; rank 0 is told what happened, once the limit is over."""
    if dist.get_rank() == 1:
        with pytest.raises(ConfigError) as fault:
            start(llama(layers=2), settings(1, block={"memory_budgt": "1.0x"}))
        return str(fault.value)
    model = llama(layers=2)
    with pytest.raises(RankMismatch) as caught:
        control_plane(time_limit_s=2).agree("start", {"model": type(model).__name__})
    return str(caught.value)


def test_a_rank_that_never_starts(ranks: RankPool) -> None:
    waiting, faulty = ranks.run(f"{HERE}:only_one_rank_has_a_bad_block")
    assert "memory_budgt" in faulty
    assert "rank 1" in waiting
