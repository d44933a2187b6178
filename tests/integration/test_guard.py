"""Memory runs short on one rank of two: every defence, and gradients of plain DeepSpeed bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hilore.core.errors import MemoryExhausted
from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action, Plan, UnitId
from ds_hilore.memory.meter import CpuMeter
from ds_hilore.runtime.guard import Defence
from ds_hilore.runtime.parts import Stage
from tests.engines import config
from tests.integration.updates import H, build, hilore_engine, pair, run_update
from tests.models import decoder_layers
from tests.ranks import RankPool
from tests.runtime.shortage import Shortage

HERE = "tests.integration.test_guard"
ZERO = [0, 2, 3]


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _stored(made: Any, count: int) -> Plan:
    """The first `count` units stored, the others replayed."""
    names = list(made.hilore.parts.unit_names.values())
    units = [UnitId(name) for name, _ in names[:count]]
    return Plan(choice=dict.fromkeys(units, "H"), actions=dict.fromkeys(units, H))


def failing_replay(stage: int) -> dict[str, Any]:
    """On rank 0 the replay of the last layer fails once, then twice, while the first two are stored; rank 1 has all it
    wants. LoRA with dropout: a replay that is done again takes its forward's random numbers."""
    reference, ours = pair(lambda: build("llama"), config(stage, 2))
    ours.hilore.force(_stored(ours, 2))
    last = decoder_layers(ours.module)[-1]
    same, failed = [], []
    for number, times in enumerate((0, 1, 2)):
        expected = run_update(reference, number)
        shortage = Shortage(times if dist.get_rank() == 0 else 0)
        with shortage.in_replays_of(last.self_attn):  # type: ignore[attr-defined]
            same.append(_same(expected, run_update(ours, number)))
        failed.append(shortage.failed)
    metrics = ours.hilore.metrics()
    return {"same": same, "failed": failed, "events": metrics["guard_allocation"]}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_replay_fails_on_one_rank(ranks: RankPool, stage: int) -> None:
    first, second = ranks.run(f"{HERE}:failing_replay", stage=stage)
    assert first["failed"] == [0, 1, 2] and second["failed"] == [0, 0, 0]
    assert first["events"] == 3 and second["events"] == 0
    for seen in (first, second):
        assert seen["same"] == [True] * 3


def failing_decode(stage: int) -> dict[str, Any]:
    """A decode of the second layer fails on rank 0: the first, compressed too, is replayed instead. As if that had been
    the plan."""
    compressed = Treatment.parse("L:mlp=bf16,residual=bf16")

    def plan(made: Any, first: Treatment) -> Plan:
        units = [UnitId(name) for name, _ in list(made.hilore.parts.unit_names.values())[:2]]
        wanted = dict(zip(units, (first, compressed)))
        return Plan(
            choice={unit: treatment.name for unit, treatment in wanted.items()},
            actions={unit: treatment.action for unit, treatment in wanted.items()},
        )

    other, ours = (hilore_engine(build("llama"), config(stage)) for _ in range(2))
    struck = dist.get_rank() == 0
    ours.hilore.force(plan(ours, compressed))
    other.hilore.force(plan(other, Treatment(Action.RECOMPUTE) if struck else compressed))
    codec = type(next(iter(ours.hilore.context.codecs_of(compressed).values())))
    decode, shortage = codec.decode, Shortage(1 if struck else 0)

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        shortage.strike()
        return decode(self, *args, **kwargs)

    expected = run_update(other, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "decode", failing)
        found = run_update(ours, 0)
    return {"same": _same(expected, found), "failed": shortage.failed, "events": len(ours.hilore.events)}


def test_a_decode_fails(ranks: RankPool) -> None:
    first, second = ranks.run(f"{HERE}:failing_decode", stage=2)
    assert first == {"same": True, "failed": 1, "events": 1}
    assert second == {"same": True, "failed": 0, "events": 0}


def failing_update(stage: int) -> dict[str, Any]:
    """Nothing is left to give up, in the second of two microbatches, on both ranks: a typed error, and the update
    again."""
    reference, ours = pair(lambda: build("llama"), config(stage, 2))
    ours.hilore.force(Action.RECOMPUTE)
    last = decoder_layers(ours.module)[-1]
    same = [_same(run_update(reference, 0), run_update(ours, 0))]
    expected, said = run_update(reference, 1), ""
    torch.manual_seed(0)
    try:
        with Shortage(1, asked=4096).in_replays_of(last.self_attn):  # type: ignore[attr-defined]
            run_update(ours, 1)
    except MemoryExhausted as error:
        said = str(error)
    same.append(_same(expected, run_update(ours, 1)))
    same.append(_same(run_update(reference, 2), run_update(ours, 2)))
    return {"same": same, "said": said}


@pytest.mark.parametrize("stage", ZERO)
def test_nothing_is_left_to_give_up(ranks: RankPool, stage: int) -> None:
    for rank, seen in enumerate(ranks.run(f"{HERE}:failing_update", stage=stage)):
        assert seen["same"] == [True] * 3
        assert f"rank {rank} at or after unit " in seen["said"] and "4096 bytes" in seen["said"]


def failing_elsewhere() -> dict[str, Any]:
    """An allocation of the model's own forward and of autograd's own backward, outside of what can be done again."""
    reference, ours = pair(lambda: build("llama"), config(2))
    ours.hilore.force(Action.STORE)
    expected, said = run_update(reference, 0), []
    layer: Any = decoder_layers(ours.module)[1]
    shortage = Shortage(0)

    def in_forward(_module: Any, _args: Any, output: torch.Tensor) -> None:
        if where == "forward":
            shortage.strike()
        elif output.requires_grad:
            output.register_hook(lambda gradient: shortage.strike())

    with layer.mlp.register_forward_hook(in_forward):
        for where in ("forward", "backward"):  # noqa: B007  (the hook reads it)
            shortage.times = 1
            try:
                run_update(ours, 0)
            except MemoryExhausted as error:
                said.append(str(error))
    return {
        "same": _same(expected, run_update(ours, 0)),
        "said": said,
        "unit": list(ours.hilore.parts.unit_names.values())[1][0],
    }


def test_failures_outside_of_recovery_are_typed_too(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:failing_elsewhere"):
        assert seen["same"] and len(seen["said"]) == 2
        assert f"at or after unit {seen['unit']}" in seen["said"][0]


def short_by_the_meter(stage: int) -> dict[str, Any]:
    """A planned engine that would store everything; rank 0's meter says otherwise, in forward, then before backward."""
    reference, ours = pair(lambda: build("llama"), config(stage), memory_budget="1000x")
    number, same = 0, []

    def update() -> str:
        nonlocal number
        same.append(_same(run_update(reference, number), run_update(ours, number)))
        number += 1
        return "".join(action.letter for action in ours.hilore.microbatch.ran.values())

    while ours.hilore.stage is not Stage.PLANNED:
        update()
    ran = [update()]
    meter = ours.hilore.parts.meter
    assert type(meter) is CpuMeter
    if dist.get_rank() == 0:
        looks = iter([0, *[1 << 60] * 100])
        vars(meter).update(exact=True, quick_level_bytes=lambda: next(looks))
        ran.append(update())
        del meter.quick_level_bytes
        meter.exact = False
        ours.hilore.parts.planner.leave_room(0)
        vars(meter).update(free_bytes=lambda: -(1 << 50))
        ran.append(update())
        del meter.free_bytes
    else:
        ran += [update(), update()]
    ran.append(update())
    return {"same": same, "ran": ran, "counts": {d.value: n for d, n in ours.hilore.guard.counts.items()}}


@pytest.mark.parametrize("stage", [2, 3])
def test_short_by_the_meter(ranks: RankPool, stage: int) -> None:
    first, second = ranks.run(f"{HERE}:short_by_the_meter", stage=stage)
    assert all(first["same"]) and all(second["same"])
    assert first["ran"][:3] == ["HHH", "HRR", "RRR"] and second["ran"] == ["HHH"] * 4
    assert first["counts"] == {Defence.FORWARD.value: 1, Defence.BACKWARD.value: 1} and second["counts"] == {}
