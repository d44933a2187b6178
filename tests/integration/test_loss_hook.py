"""The loss hook (design section 5): omega, whatever stands between the loss and it; when the plan is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.integration.gradient_scale import EngineScale
from ds_hilore.objective import grpo
from ds_hilore.runtime.guard import Defence
from ds_hilore.runtime.microbatch import Phase
from ds_hilore.runtime.update import Source
from tests.engines import config, difference, gradients
from tests.models import batch, decoder_layers, llama
from tests.ranks import RankPool

HERE = "tests.integration.test_loss_hook"

#: Of the whole update, and the same for every number of ranks and microbatches, so that omega is the same too.
NUM_TOKENS = 64
LOSS = grpo.GRPOLossConfig(beta=0.05)


class Actor(nn.Module):
    """Gives log-probabilities [B, T - 1] of the next tokens, or logits; or observes the former and gives their loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.model = llama(layers=layers)

    def forward(self, ids: Tensor, gives: str = "logps", micro: int = 0) -> Any:
        logits = self.model(input_ids=ids, use_cache=False).logits
        if gives == "logits":
            return {"logits": logits}
        logps = log_probs(logits, ids)
        if gives == "logps":
            return logps
        observed = ds_hilore.observe_logps(logps, facts(ids, micro)["mask"])
        # a wrapped loss, or one beside log-probabilities that are an output as well
        loss = grpo.grpo_loss(observed, **facts(ids, micro), config=LOSS)
        return (observed, loss) if gives == "both" else loss


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def facts(ids: Tensor, micro: int) -> dict[str, Any]:
    """What the loss needs beside log-probabilities: some tokens are clipped, some masked."""
    generator = torch.Generator().manual_seed(50 + micro)
    shape = (ids.shape[0], ids.shape[1] - 1)
    old = -6.3 + 0.4 * torch.randn(shape, generator=generator)
    return {
        "old_logps": old,
        "ref_logps": old + 0.1,
        "advantages": torch.randn(shape[0], generator=generator),
        "mask": torch.rand(shape, generator=generator) < 0.8,
        "num_tokens": NUM_TOKENS,
    }


def ids_of(rank: int, micro: int) -> Tensor:
    return batch(seed=10 * rank + micro)[0]


def expected_omega(rank: int, micro: int) -> Tensor:
    """From the plain model, without any engine."""
    ids = ids_of(rank, micro)
    logps = Actor()(ids).detach()
    return grpo.token_coefficients(logps, **facts(ids, micro), config=LOSS)


def hilore_engine(stage: int, accumulation: int = 1, model: nn.Module | None = None, **settings: Any) -> Any:
    model = Actor() if model is None else model
    ds = config(stage, accumulation, lr=0.0) | {"hilore": {"memory_budget": "1.0x"}} | settings
    engine, *_ = ds_hilore.initialize(model=model, model_parameters=model.parameters(), config=ds)
    return engine


# ------------------------------------------------------------------------------------------------ omega


def ways(stage: int) -> Iterator[tuple[str, str, str]]:
    """(entry into backward, how omega is told, what the engine's forward gives)"""
    entries = ["backward", "backward without accumulation", *(["direct"] if stage > 0 else [])]
    for entry in entries:
        for gives in ("logps", "logits"):
            yield entry, "formula", gives
            yield entry, "gradient", gives
        yield entry, "gradient", "loss"
        # In a direct backward DeepSpeed divides once more at every output that the gradient passes: at this loss and at
        # these log-probabilities, so its own gradient is too small.
        if entry != "direct":
            yield entry, "gradient", "both"


def loss_of(engine: Any, rank: int, micro: int, told: str, gives: str) -> Tensor:
    ids = ids_of(rank, micro)
    result = engine(ids, gives=gives, micro=micro)
    if gives in ("loss", "both"):
        return result[1] if gives == "both" else result
    logps = result if gives == "logps" else log_probs(result["logits"], ids)
    if told == "formula":
        return ds_hilore.grpo_loss(logps, **facts(ids, micro), config=LOSS)
    ds_hilore.observe_logps(logps, facts(ids, micro)["mask"])
    return grpo.grpo_loss(logps, **facts(ids, micro), config=LOSS)


def run_backward(engine: Any, loss: Tensor, entry: str) -> None:
    """By the convention: the caller multiplies by data-parallel ranks x accumulation, or by the ranks alone."""
    ranks, steps = engine.dp_world_size, engine.gradient_accumulation_steps()
    if entry == "backward":
        engine.backward(loss * (ranks * steps))
    elif entry == "direct":
        (loss * (ranks * steps)).backward()
    else:
        engine.backward(loss * ranks, scale_wrt_gas=False)


def omegas(stage: int, accumulation: int) -> dict[tuple[str, str, str], tuple[list[Tensor], list[Source], float]]:
    """Per way: omega and source of each microbatch, and how far the update's gradient is from the first way's."""
    engine = hilore_engine(stage, accumulation)
    rank = torch.distributed.get_rank()
    engine.hilore.force(Action.RECOMPUTE)
    seen: dict[Any, Any] = {}
    reference: dict[str, Tensor] = {}
    for way in ways(stage):
        entry, told, gives = way
        found: list[Any] = []
        for micro in range(accumulation):
            loss = loss_of(engine, rank, micro, told, gives)
            run_backward(engine, loss, entry)
            (coefficients,) = engine.hilore.coefficients
            found.append(coefficients)
            if micro == accumulation - 1:
                reduced = gradients(engine)
                reference = reference or reduced
            engine.step()
        seen[way] = [c.omega for c in found], [c.source for c in found], difference(reduced, reference)
    ds_hilore.detach(engine)
    return seen


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(world=1) as pool:
        yield pool


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_omega_is_one_number(ranks: RankPool, one_rank: RankPool, world: int, stage: int, accumulation: int) -> None:
    pool = ranks if world == 2 else one_rank
    for rank, seen in enumerate(pool.run(f"{HERE}:omegas", stage=stage, accumulation=accumulation)):
        assert set(seen) == set(ways(stage))
        for (entry, told, gives), (found, sources, error) in seen.items():
            where = f"rank {rank} {entry}, {told}, {gives}"
            assert sources == [Source.FORMULA if told == "formula" else Source.GRADIENT] * accumulation, where
            assert error < 1e-5, where  # the convention itself is right: every way gives one gradient
            for micro, omega in enumerate(found):
                expected = expected_omega(rank, micro)
                distance = float((omega - expected).norm() / expected.norm())
                assert distance < 2e-7, f"{where}: {distance:.1e}"


class FakeEngine:
    """What `EngineScale` asks of an engine. `at_outputs`: DeepSpeed divides at the outputs in this backward."""

    dp_world_size = 2
    device = "cpu"
    torch_autocast_z0_gradscaler = None

    def __init__(self, at_outputs: bool = False, optimizer: Any = None) -> None:
        self._at_outputs = at_outputs
        self.optimizer = optimizer

    def gradient_accumulation_steps(self) -> int:
        return 4

    def _backward_prologue_per_tensor(self, gradient: Tensor) -> Tensor:
        return gradient / 4 if self._at_outputs else gradient


@pytest.mark.parametrize(
    ("at_outputs", "by_accumulation", "passed_outputs", "left"),
    [
        # engine.backward of 0.19: divided at the loss, or never multiplied
        (False, True, False, 1.0),
        (False, True, True, 1.0),
        (False, False, False, 1.0),
        (False, False, True, 1.0),
        # loss.backward, and engine.backward of 0.18
        (True, True, False, 4.0),
        (True, True, True, 1.0),
        # 0.18 divides at outputs although nobody multiplied
        (True, False, False, 1.0),
        (True, False, True, 0.25),
    ],
)
def test_accumulation_left_in_a_gradient(
    at_outputs: bool, by_accumulation: bool, passed_outputs: bool, left: float
) -> None:
    scale = EngineScale(FakeEngine(at_outputs))
    with scale.backward(scale_wrt_gas=by_accumulation):
        found = scale(passed_outputs)
    assert (found.data_parallel, found.accumulation, found.loss_scale) == (2, left, 1.0)
    assert EngineScale(FakeEngine(at_outputs))(passed_outputs) == scale(passed_outputs)  # outside: as loss.backward


class Scaler:
    """A GradScaler of torch, whose scale stays on the device."""

    def scale(self, value: Tensor) -> Tensor:
        return value * 512


def scaled_optimizer(**attributes: Any) -> Any:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    optimizer = ZeROOptimizer.__new__(ZeROOptimizer)
    optimizer.custom_loss_scaler, optimizer.torch_autocast_gradscaler = False, None
    optimizer.loss_scaler = SimpleNamespace(cur_scale=1.0)
    vars(optimizer).update(attributes)
    return optimizer


def test_loss_scale_left_in_a_gradient() -> None:
    """fp16 does not run on CPU under DeepSpeed: its scalers by their own names."""

    def seen(optimizer: Any, **engine: Any) -> float:
        made = FakeEngine(optimizer=optimizer)
        vars(made).update(engine)
        return float(EngineScale(made)(True).loss_scale)

    assert seen(scaled_optimizer()) == 1.0
    assert seen(scaled_optimizer(loss_scaler=None)) == 1.0  # bf16
    assert seen(scaled_optimizer(loss_scaler=SimpleNamespace(cur_scale=256))) == 256.0  # static or dynamic
    assert seen(scaled_optimizer(custom_loss_scaler=True, external_loss_scale=8)) == 8.0
    assert seen(scaled_optimizer(torch_autocast_gradscaler=Scaler())) == 512.0
    assert seen(None, torch_autocast_z0_gradscaler=Scaler()) == 512.0
    assert seen(None) == 1.0


# ------------------------------------------------------------------------------------------------ when


def noted_order(engine: Any, when_settled: Callable[[], None] = lambda: None) -> list[str]:
    """A list that fills with what happens in the next backward: "settle", and "unit" as the gradient reaches one."""
    controller, events = engine.hilore, []
    settle = controller.settle

    def noting() -> None:
        if not controller.context.settled:
            events.append("settle")
            settle()
            when_settled()

    controller.settle = controller.context.settle = noting
    for layer in decoder_layers(engine.module):
        layer.register_full_backward_pre_hook(lambda *_: events.append("unit"))
    return events


def order(stage: int, told: str, direct: bool = False) -> list[str]:
    engine = hilore_engine(stage)
    events = noted_order(engine)
    rank = torch.distributed.get_rank()
    ids = ids_of(rank, 0)
    if told == "untold":
        loss = grpo.grpo_loss(engine(ids), **facts(ids, 0), config=LOSS)
    else:
        loss = loss_of(engine, rank, 0, told, "logps")
    assert engine.hilore.phase is Phase.FORWARD and not events
    run_backward(engine, loss, "direct" if direct else "backward")
    return events


@pytest.mark.parametrize("stage", [0, 3])
def test_plan_is_settled_before_any_unit(ranks: RankPool, stage: int) -> None:
    for events in ranks.run(f"{HERE}:order", stage=stage, told="gradient"):
        assert events == ["settle", "unit", "unit"]
    for events in ranks.run(f"{HERE}:order", stage=stage, told="formula"):
        assert events == ["settle", "unit", "unit"]


def test_plan_is_settled_at_the_first_unpack_where_no_loss_tells(ranks: RankPool) -> None:
    for direct in (True, False):
        for events in ranks.run(f"{HERE}:order", stage=2, told="untold", direct=direct):
            assert events == ["unit", "settle", "unit"]


def dropped_at_the_hook(stage: int) -> dict[str, Any]:
    """Gradients where all units are stored, and where they are until the hook: it drops all, or one, on each rank."""
    engine = hilore_engine(stage)
    controller, rank = engine.hilore, torch.distributed.get_rank()
    controller.force(Action.STORE)
    replays: list[str] = []
    found = []
    dropped: list[int] = []

    def drop() -> None:
        calls = controller.microbatch.alive()
        for call in calls if rank == 0 else calls[:1]:
            before = sum(call.held_storages().values())
            call.drop()
            dropped.append(before - sum(call.held_storages().values()))

    for when_settled in (lambda: None, drop):
        noted_order(engine, when_settled)
        loss = loss_of(engine, rank, 0, "gradient", "logps")
        for call in controller.microbatch.alive():
            replay = call._replay
            call._replay = lambda name=str(call.unit), replay=replay: (replays.append(name), replay())[1]
        run_backward(engine, loss, "backward")
        found.append(gradients(engine))
        engine.step()
    stored, mixed = found
    return {
        "bitwise": all(torch.equal(stored[name], mixed[name]) for name in stored),
        "norm": min(float(g.norm()) for g in stored.values()),
        "replays": sorted(replays),
        "freed": dropped,
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_store_becomes_recompute_at_the_hook(ranks: RankPool, stage: int) -> None:
    first, second = ranks.run(f"{HERE}:dropped_at_the_hook", stage=stage)
    layers = ["model.model.layers.0", "model.model.layers.1"]
    assert (first["replays"], second["replays"]) == (layers, layers[:1])
    for seen in (first, second):
        assert seen["bitwise"] and seen["norm"] > 0
        assert seen["freed"] and min(seen["freed"]) > 0


# ------------------------------------------------------------------------------------------------ several engines


def actor_and_critic() -> dict[str, Any]:
    """Interleaved forwards of two engines; to whom coefficients go, and both gradients against engines alone."""
    ids = ids_of(torch.distributed.get_rank(), 0)

    def gradient_alone(layers: int) -> dict[str, Tensor]:
        engine = hilore_engine(1, model=Actor(layers))
        engine.backward(grpo.grpo_loss(engine(ids), **facts(ids, 0), config=LOSS))
        return gradients(engine)

    alone = [gradient_alone(2), gradient_alone(3)]
    actor, critic = hilore_engine(1, model=Actor(2)), hilore_engine(1, model=Actor(3))
    engines = [actor, critic]
    counts = []

    def count() -> None:
        counts.append([len(engine.hilore.coefficients) for engine in engines])

    outputs = [engine(ids) for engine in engines]
    losses = [ds_hilore.grpo_loss(outputs[0], **facts(ids, 0), config=LOSS, engine=actor)]
    count()
    losses.append(ds_hilore.grpo_loss(outputs[1], **facts(ids, 0), config=LOSS))  # the latest forward is the critic's
    count()
    ds_hilore.observe_logps(outputs[0], engine=actor)
    ds_hilore.observe_logps(outputs[1])
    for engine, loss in zip(reversed(engines), reversed(losses)):
        engine.backward(loss)
        count()
    expected = [expected_omega(torch.distributed.get_rank(), 0), None]
    omegas = [[c.omega for c in engine.hilore.coefficients] for engine in engines]
    return {
        "counts": counts,
        "errors": [difference(gradients(e), single) for e, single in zip(engines, alone)],
        "actor": max(float((o - expected[0]).norm() / expected[0].norm()) for o in omegas[0]),
        "critic": float((omegas[1][0] - omegas[1][1]).norm() / omegas[1][0].norm()),
        "phases": [engine.hilore.phase.value for engine in engines],
    }


def test_two_engines_in_one_process(one_rank: RankPool) -> None:
    (seen,) = one_rank.run(f"{HERE}:actor_and_critic")
    assert seen["counts"] == [[1, 0], [1, 1], [1, 2], [2, 2]]
    assert seen["errors"] == [0.0, 0.0]
    assert seen["actor"] < 1e-6 and seen["critic"] < 1e-6
    assert seen["phases"] == ["idle", "idle"]


# ------------------------------------------------------------------------------------------------ announcements


def announced(stage: int) -> dict[str, Any]:
    """Which facts each microbatch of two updates got: num_tokens tells the entries apart."""
    engine = hilore_engine(stage, accumulation=3)
    rank, seen = torch.distributed.get_rank(), []

    def microbatch(micro: int) -> None:
        ids = ids_of(rank, micro)
        with torch.no_grad():
            engine(ids)
        engine.eval()
        engine(ids)  # with grad, but transformers does not checkpoint in eval(): no unit runs
        engine.train()
        loss = grpo.grpo_loss(engine(ids), **facts(ids, micro), config=LOSS)
        told = engine.hilore.microbatch.facts
        seen.append(None if told is None else (float(told.num_tokens), float(told.advantages.sum())))
        engine.backward(loss)
        engine.step()

    masks = [torch.ones(2, 15) for _ in range(3)]
    ds_hilore.begin_update([torch.full((2,), float(k)) for k in range(3)], masks, 7.0)
    for micro in range(3):
        if micro == 1:
            ds_hilore.begin_microbatch(torch.full((2, 1), 9.0), masks[1], 8.0, engine=engine)
        microbatch(micro)
    for micro in range(3):
        microbatch(micro)
    return {"seen": seen}


@pytest.mark.parametrize("stage", [1, 3])
def test_facts_arrive_at_their_microbatch(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:announced", stage=stage):
        assert seen["seen"] == [(7.0, 0.0), (8.0, 18.0), (7.0, 4.0), None, None, None]


# ------------------------------------------------------------------------------------------------ ends of microbatches


def backward_twice(stage: int, action: Action) -> dict[str, Any]:
    """`engine.backward(retain_graph=True)` and again without it; the oracle does the same with the plain model.

    DeepSpeed's affair: ZeRO-1 keeps the second backward's gradients alone, and ZeRO-3 cannot do it (parameters are not
    gathered again).
    """
    engine = hilore_engine(stage)
    engine.hilore.force(action)
    rank = torch.distributed.get_rank()

    def twice() -> tuple[dict[str, Tensor], Tensor]:
        loss = loss_of(engine, rank, 0, "formula", "logps")
        engine.backward(loss, retain_graph=True)
        engine.backward(3 * loss)
        found = gradients(engine)
        engine.step()
        return found, loss

    with engine.hilore.paused():
        expected, _ = twice()
    found, loss = twice()
    try:
        (2 * loss).backward()
        third = ""
    except RuntimeError as error:
        third = str(error)
    return {
        "bitwise": all(torch.equal(found[name], expected[name]) for name in expected),
        "norm": min(float(g.norm()) for g in expected.values()),
        "third": third,
    }


@pytest.mark.parametrize("action", [Action.STORE, Action.RECOMPUTE])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_retained_graph(ranks: RankPool, stage: int, action: Action) -> None:
    for seen in ranks.run(f"{HERE}:backward_twice", stage=stage, action=action):
        assert seen["bitwise"] and seen["norm"] > 0
        assert "backward through the graph a second time" in seen["third"]


def direct_backward() -> list[str]:
    """Phases and replayed units around microbatches whose backward is torch's own."""
    engine = hilore_engine(2, accumulation=2)
    seen = []

    def phase() -> None:
        seen.append(engine.hilore.phase.value)

    for micro in range(2):
        loss = loss_of(engine, torch.distributed.get_rank(), micro, "gradient", "logps")
        phase()
        loss.backward()
        phase()
        if micro == 1:
            engine.step()
            phase()
        else:
            engine.step()  # no boundary: nothing is over for the controller
            phase()
    return seen


def test_direct_backward_is_finished_by_the_next_forward_or_step(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:direct_backward"):
        assert seen == ["forward", "backward", "backward", "forward", "backward", "idle"]


def monitored(folder: str) -> dict[str, list[str]]:
    csv = {"enabled": True, "output_path": folder, "job_name": "job"}
    engine = hilore_engine(1, csv_monitor=csv, steps_per_print=1)
    engine.hilore.force(Action.STORE)
    for _ in range(2):
        engine.backward(loss_of(engine, torch.distributed.get_rank(), 0, "formula", "logps"))
        engine.step()
    ds_hilore.detach(engine)
    return engine.dp_world_size


def test_metrics_reach_the_monitor(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(f"{HERE}:monitored", folder=str(tmp_path)) == [2, 2]
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "job").glob("*hilore*")}
    stem = "Train_hilore_{}.csv"
    units = ["stored_units", "compressed_units", "replayed_units", "offloaded_units"]
    guard = [f"guard_{defence.value}" for defence in Defence]
    names = [*units, "saved_seconds", "predicted_peak_bytes", "budget_bytes", *guard, "guard_room_bytes"]
    assert sorted(files) == sorted(stem.format(name) for name in names)
    rows = files[stem.format("stored_units")]
    assert [row.split(",")[1] for row in rows[1:]] == ["2", "2"]  # once per update, by rank 0 alone
    assert [row.split(",")[1] for row in files[stem.format("replayed_units")][1:]] == ["0", "0"]
