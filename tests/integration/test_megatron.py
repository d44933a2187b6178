"""Tensor-parallel models: Megatron-Core's checkpointed layers are units; ranks that share them agree on replays."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hilore.core import deps
from ds_hilore.core.errors import RankMismatch, UnsupportedError
from ds_hilore.core.types import Action, Plan, UnitId
from tests.collectives import recorded
from tests.engines import config, difference, gradients
from tests.ranks import ROOT, RankPool

pytestmark = pytest.mark.skipif(not deps.has("megatron"), reason="megatron-core is not installed")

HERE = "tests.integration.test_megatron"
UPDATES = 10
BLOCK = {"memory_budget": "1.10x"}


@contextmanager
def said() -> Iterator[list[str]]:
    """What ds_hilore logs inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ds_hilore")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def updates(
    made: Any, loss: Callable[[Any, int], Tensor], before: Callable[[int], None] = lambda number: None
) -> tuple[list[dict[str, Tensor]], list[dict[str, str]]]:
    """Gradients of every update, and how units were treated in it. `before` is told of each update's number."""
    controller = getattr(made, "hilore", None)
    torch.manual_seed(1)
    found, treated = [], []
    for number in range(UPDATES):
        before(number)
        made.backward(loss(made, number))
        found.append(gradients(made))
        if controller is not None:
            treated.append({str(unit): action.letter for unit, action in controller.microbatch.ran.items()})
        made.step()
    return found, treated


def worst(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    return max(difference(one, other) for one, other in zip(found, expected, strict=True))


def core_engine(tp: int, settings: dict[str, Any], model: dict[str, Any]) -> Any:
    """An engine around a fresh GPT of the same weights and random states at every call."""
    import ds_hilore
    from ds_hilore.integration.megatron import MegatronMpu
    from tests.megatron import gpt, prepare

    prepare(tp)
    module = gpt(tp, **model)
    made, *_ = ds_hilore.initialize(
        model=module, model_parameters=list(module.parameters()), config=settings, mpu=MegatronMpu()
    )
    return made


def stored_here(stored: dict[int, list[UnitId]]) -> Plan:
    return Plan(actions=dict.fromkeys(stored[dist.get_rank()], Action.STORE))


# ------------------------------------------------------------------------------------------------ Megatron-Core


def forced(tp: int, recompute: int, stored: dict[int, list[str]], stage: int = 1) -> dict[str, Any]:
    """Ten updates of Megatron without any recompute, and of its full recompute under a forced plan of each rank."""
    import ds_hilore
    from tests.megatron import gpt_loss

    expected, _ = updates(core_engine(tp, config(stage), {"recompute": None}), gpt_loss)
    block = BLOCK | {"selfcheck": {"updates": 2}}
    made = core_engine(tp, config(stage) | {"hilore": block}, {"recompute": recompute})
    made.hilore.force(stored_here({rank: [UnitId(name) for name in names] for rank, names in stored.items()}))
    found, treated = updates(made, gpt_loss)
    shape, check = made.hilore.microbatch.shape, made._hilore_host.selfcheck
    ds_hilore.detach(made)
    return {
        "worst": worst(found, expected),
        "treated": treated,
        "shape": (shape.segments, shape.length),
        "checked": (check.updates, check.largest, check.passed_over),
    }


@pytest.mark.parametrize(
    ("recompute", "stored", "ran"),
    [
        (1, ["decoder.layers.1", "decoder.layers.2"], ["R", "H", "H", "R"]),
        (2, ["decoder.layers.0-1"], ["H", "R"]),
    ],
    ids=["layers", "groups"],
)
def test_core_alone_is_bitwise_the_model_without_recompute(
    ranks: RankPool, recompute: int, stored: list[str], ran: list[str]
) -> None:
    for seen in ranks.run(f"{HERE}:forced", tp=1, recompute=recompute, stored={0: stored, 1: stored}):
        assert [list(treated.values()) for treated in seen["treated"]] == [ran] * UPDATES
        assert set(stored) < set(seen["treated"][0])
        assert seen["worst"] == 0
        assert seen["shape"] == (2, 16)  # rows and length of [s, b, h]
        assert seen["checked"] == (2, 0, "")  # by our own self-check, dropout included


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_core_shards_replay_what_any_of_them_must(ranks: RankPool, stage: int) -> None:
    names = [f"decoder.layers.{number}" for number in range(4)]
    stored = {0: names[:3], 1: names[1:]}
    for seen in ranks.run(f"{HERE}:forced", tp=2, recompute=1, stored=stored, stage=stage):
        assert seen["treated"] == [dict(zip(names, "RHHR"))] * UPDATES
        assert seen["worst"] <= 1e-6
        assert seen["checked"][0] == 2 and seen["checked"][1] <= 1e-6


def budgets(name: str) -> dict[str, Any]:
    """Ten updates of a JSON of configs/ under plans that are measured and solved. Rank 0 has room for everything; rank
    1's budget falls, once plans are followed, to the middle between replaying everything and nothing."""
    import ds_hilore
    from ds_hilore.planning.problem import evaluate
    from tests.megatron import gpt_loss

    rows, length = 4, 64
    sizes = {"layers": 6, "hidden": 64, "length": length}
    settings = json.loads((ROOT / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    assert settings.pop("hilore") is not None
    settings |= {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 1}

    def loss(made: Any, seed: int) -> Tensor:
        return gpt_loss(made, seed, rows, length)

    expected, _ = updates(core_engine(2, settings, {"recompute": None, **sizes}), loss)
    block = {"hilore": {"memory_budget": ["1000x", "900x"]}}
    groups = len(dist.distributed_c10d._world.pg_map)
    with said() as lines:
        made = core_engine(2, settings | block, sizes)
        parts, stages = made.hilore.parts, []

        def tighten(number: int) -> None:
            stages.append(made.hilore.stage.value)
            if number == 5 and dist.get_rank() == 1:
                batch = made.hilore.microbatch
                problem = parts.planner.problem_for(parts.planner.planning_shape(batch.shape))
                bounds = [evaluate(problem, choice).peak_bytes for choice in ({}, batch.plan.choice)]
                parts.planner.set_budget(sum(bounds) // 2 + parts.meter.wander_bytes)

        found, treated = updates(made, loss, tighten)
        with recorded() as collectives:
            made.backward(loss(made, UPDATES))
        plan = made.hilore.plan
        seconds = list(parts.agreement.seconds)
        ds_hilore.detach(made)
    return {
        "worst": worst(found, expected),
        "treated": treated,
        "stages": stages,
        "planned": [action.letter for action in plan.actions.values()],
        "peak": plan.peak_bytes,
        "seconds": seconds,
        "said": [line for line in lines if "agreeing on replays" in line],
        "collectives": [(name, shapes) for name, shapes, _ in collectives],
        "groups": len(dist.distributed_c10d._world.pg_map) - groups,
    }


@pytest.fixture(scope="module")
def unequal(ranks: RankPool) -> list[dict[str, Any]]:
    """What both ranks saw of one run."""
    return ranks.run(f"{HERE}:budgets", name="megatron_zero1")


def test_core_shards_have_budgets_of_their_own(unequal: list[dict[str, Any]]) -> None:
    first, second = unequal
    for seen in unequal:
        assert seen["stages"] == ["measure_r"] * 2 + ["measure_h"] + ["planned"] * (UPDATES - 3)
        assert seen["worst"] <= 1e-6
    # Each has a plan of its own, of other bytes; both do what the tighter one says.
    assert set(first["planned"]) == {"H"} and set(second["planned"]) == {"H", "R"}
    assert first["peak"] > second["peak"] > 0
    assert first["treated"] == second["treated"]
    assert list(first["treated"][4].values()) == ["H"] * 6
    assert list(first["treated"][-1].values()) == second["planned"]
    assert first["collectives"] == second["collectives"]


def test_agreeing_is_one_small_all_reduce_per_microbatch(unequal: list[dict[str, Any]]) -> None:
    """Its cost is said once, by the group's first rank; the group goes with the controller."""
    from ds_hilore.integration.model_parallel import MAX_CALLS, SAID_AFTER

    for rank, seen in enumerate(unequal):
        ballots = [shapes for name, shapes in seen["collectives"] if name == "all_reduce" and "int64" in str(shapes)]
        assert ballots == [(((2 + MAX_CALLS,), "torch.int64"),)]
        assert len(seen["seconds"]) == SAID_AFTER and min(seen["seconds"]) > 0
        assert len(seen["said"]) == (1 if rank == 0 else 0)
        assert seen["groups"] == 0
    assert "with ranks [0, 1]" in unequal[0]["said"][0]


def told() -> dict[str, Tensor]:
    """Weights of every token, and the coefficients that are read of their log-probabilities."""
    import ds_hilore
    from tests.megatron import gpt_losses

    made = core_engine(2, config(1) | {"hilore": BLOCK}, {})
    logps = ds_hilore.observe_logps(-gpt_losses(made, 0))
    weights = torch.linspace(-1, 1, logps.numel()).reshape(logps.shape)
    made.backward((weights * logps).sum())
    (found,) = made.hilore.coefficients
    ds_hilore.detach(made)
    return {"weights": weights, "omega": found.omega}


def test_coefficients_come_through_vocabulary_parallel_log_probabilities(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:told"):
        assert seen["omega"].shape == (2, 16)
        torch.testing.assert_close(seen["omega"], seen["weights"])


def without_output() -> tuple[Tensor, Tensor]:
    """Gradient of exp(sin(x)) with the sine's output discarded by Megatron and recomputed, and what it should be."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    x = torch.linspace(0, 1, 8, requires_grad=True)
    discarded = CheckpointWithoutOutput(fp8=None)  # without Transformer Engine
    sine = discarded.checkpoint(torch.sin, x)
    result = sine.exp()
    product = result * sine
    discarded.discard_output_and_register_recompute(product)
    product.sum().backward()
    assert x.grad is not None
    expected = x.detach().requires_grad_()
    (expected.sin().exp() * expected.sin()).sum().backward()
    assert expected.grad is not None
    return x.grad, expected.grad


def asked() -> dict[str, Any]:
    """Ranks that list the same calls, and other ones; then ranks that have other units."""
    from ds_hilore.core.treatment import STORED, UniformPlan
    from ds_hilore.integration.control_plane import control_plane
    from ds_hilore.integration.model_parallel import GroupAgreement

    rank, plan = dist.get_rank(), UniformPlan(treatment=STORED)
    plane = control_plane()
    try:
        agreement = GroupAgreement(plane, [0, 1], ["unit"])
        same, other = UnitId("function", 1), UnitId("function", 2 + rank)
        found = {"same": agreement.stored(plan, [same]), "other": agreement.stored(plan, [same, other])}
        agreement.close()
        with pytest.raises(RankMismatch) as caught:
            GroupAgreement(plane, [0, 1], [f"unit of {rank}"])
    finally:
        plane.close()
    return found | {"mismatch": str(caught.value)}


def test_ranks_that_list_other_calls_replay_all(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:asked"):
        assert found["same"] == {UnitId("unit"), UnitId("function", 1)}
        assert found["other"] == frozenset()
        assert "other units" in found["mismatch"] and "give the same model and mpu" in found["mismatch"]


def patched() -> list[bool]:
    """Whether both names of Megatron's function, and CheckpointWithoutOutput, are its own: before, during, after."""
    import ds_hilore

    made = core_engine(1, config(1), {})
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    own, own_method = random.checkpoint, random.CheckpointWithoutOutput.checkpoint
    seen = [tensor_parallel.checkpoint is own]
    made = core_engine(1, config(1) | {"hilore": BLOCK}, {})
    seen += [tensor_parallel.checkpoint is own, random.checkpoint is own]
    seen.append(random.CheckpointWithoutOutput.checkpoint is own_method and torch.allclose(*without_output()))
    ds_hilore.detach(made)
    return [*seen, tensor_parallel.checkpoint is own, random.checkpoint is own]


def test_patch_goes_with_its_engine_and_leaves_the_rest(ranks: RankPool) -> None:
    assert ranks.run(f"{HERE}:patched") == [[True, False, False, True, True, True]] * 2


# ------------------------------------------------------------------------------------------------ Megatron-DeepSpeed


def sharded(stored: dict[int, list[int]]) -> dict[str, Any]:
    """Ten updates without any checkpointing, and through `deepspeed.checkpointing.checkpoint` under a forced plan of
    each rank, which names calls of one and the same function."""
    import deepspeed

    import ds_hilore
    from tests.megatron import OlderMpu, ShardedModel, tokens

    mpu = OlderMpu()
    deepspeed.checkpointing.configure(mpu, partition_activations=False)

    def start(checkpoints: bool, block: dict[str, Any]) -> Any:
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(7)
        torch.manual_seed(0)
        module = ShardedModel(mpu.get_model_parallel_group(), checkpoints=checkpoints)
        made, *_ = ds_hilore.initialize(
            model=module, model_parameters=list(module.parameters()), config=config(1) | block, mpu=mpu
        )
        return made

    def loss(made: Any, seed: int) -> Tensor:
        found: Tensor = made(tokens(seed, 2, 16))
        return found

    expected, _ = updates(start(False, {}), loss)
    made = start(True, {"hilore": BLOCK})
    name = "ShardedModel._custom.<locals>.custom_forward"
    calls = {rank: [UnitId(name, call) for call in places] for rank, places in stored.items()}
    made.hilore.force(stored_here(calls))
    found, treated = updates(made, loss)
    ds_hilore.detach(made)
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()
    return {"worst": worst(found, expected), "treated": treated}


def test_calls_of_deepspeeds_function_are_agreed_on_too(ranks: RankPool) -> None:
    """Nobody knows them before they ran once, so the first microbatch replays all."""
    for seen in ranks.run(f"{HERE}:sharded", stored={0: [0, 1, 2], 1: [1, 2, 3]}):
        assert ["".join(treated.values()) for treated in seen["treated"]] == ["RRRR"] + ["RHHR"] * (UPDATES - 1)
        assert seen["worst"] <= 1e-6


# ------------------------------------------------------------------------------------------------ refusals


def refused(
    tp: int, settings: dict[str, Any], model: dict[str, Any], mpu: bool = True, change: dict[str, Any] | None = None
) -> str:
    import ds_hilore
    from ds_hilore.integration.megatron import MegatronMpu
    from tests.megatron import gpt, prepare

    prepare(tp)
    module: Any = gpt(tp, **model)
    vars(module.config).update(change or {})
    given = config(1) | {"hilore": BLOCK} | settings
    with pytest.raises(UnsupportedError) as caught:
        ds_hilore.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config=given,
            mpu=MegatronMpu() if mpu else None,
        )
    return str(caught.value)


def all_refused() -> dict[str, str]:
    """Of both ranks: what cannot be had with tensor parallelism, and with Megatron-Core at all."""
    named = {"hilore": BLOCK | {"units": ["TransformerLayer"]}}
    selective = {"recompute": None, "recompute_granularity": "selective"}
    return {
        "error alone": refused(1, {"hilore": BLOCK | {"max_gradient_error": 0.01}}, {}),
        "error": refused(2, {"hilore": BLOCK | {"max_gradient_error": 0.01}}, {}),
        "zero3": refused(2, config(3), {}),
        "partitioned": refused(2, {"activation_checkpointing": {"partition_activations": True}}, {}),
        "distributed": refused(2, {}, {"distribute_saved_activations": True}),
        "no mpu": refused(2, {}, {}, mpu=False),
        "zero3 alone": refused(1, config(3), {}),
        "selective": refused(1, named, selective),
        "settings": refused(1, {}, {}, change=CHANGED),
    }


#: Settings for which a model cannot be built here: they are written into its configuration afterwards.
CHANGED = {
    "fp8": "hybrid",
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}


def test_what_is_not_supported_is_refused_with_a_way_out(ranks: RankPool) -> None:
    for messages in ranks.run(f"{HERE}:all_refused"):
        says = {
            "error alone": ("max_gradient_error", "Megatron-Core", "set it to 0"),
            "error": ("max_gradient_error", "over 2 ranks", "set it to 0"),
            "zero3": ("ZeRO-3 beside an mpu", "use ZeRO-0, 1 or 2"),
            "partitioned": ("partition_activations", "set it to false"),
            "distributed": ("distribute_saved_activations", "set it to false"),
            "no mpu": ("over 2 ranks", "mpu says 1", "MegatronMpu()"),
            "zero3 alone": ("ZeRO-3 gathers parameters inside", "use ZeRO-0, 1 or 2"),
            "selective": ("recompute something themselves", "leave hilore.units out"),
            "settings": ("leave them out", *(f"{name} = 2" for name in CHANGED if name != "fp8"), "set it to 1"),
        }
        for name, words in says.items():
            for word in words:
                assert word in messages[name], name


def refused_engines() -> dict[str, str]:
    """Engines that were made without us, by groups of ranks that DeepSpeed has itself."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    from ds_hilore.core.config import HiLoReConfig
    from ds_hilore.integration.deepspeed_engine import attach
    from ds_hilore.integration.megatron import MegatronMpu
    from tests.megatron import gpt, prepare
    from tests.models import llama

    def attached(module: nn.Module, mpu: Any, change: Callable[[Any], None] = lambda made: None) -> str:
        made, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=config(1), mpu=mpu
        )
        change(made)
        with pytest.raises(UnsupportedError) as caught:
            attach(made, HiLoReConfig(), config(1))
        assert getattr(made, "hilore", None) is None
        return str(caught.value)

    def auto(made: Any) -> None:
        made.autotp_size = lambda: 2

    prepare(2)
    found = {"AutoTP": attached(gpt(2), MegatronMpu(), auto)}
    deepspeed.checkpointing.configure(MegatronMpu(), partition_activations=True)
    found["partitioned"] = attached(gpt(2), MegatronMpu())
    deepspeed.checkpointing.configure(MegatronMpu(), partition_activations=False)
    parallel_state_sp.initialize_sequence_parallel(2)
    found["Ulysses"] = attached(llama(layers=2), parallel_state_sp)
    return found


def test_other_groups_of_ranks_are_refused(ranks: RankPool) -> None:
    for messages in ranks.run(f"{HERE}:refused_engines"):
        assert "AutoTP over 2 ranks" in messages["AutoTP"] and "use ZeRO-3" in messages["AutoTP"]
        assert "partition_activations" in messages["partitioned"]
        assert "sequence parallelism over 2 ranks" in messages["Ulysses"] and "set it to 1" in messages["Ulysses"]


# ------------------------------------------------------------------------------------------------ profiles


def stages_with_profile(folders: list[str]) -> list[str]:
    """Stage before each of four updates; profiles lie in a folder of each rank's own, or of all."""
    import os

    import ds_hilore
    from tests.megatron import gpt_loss

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folders[dist.get_rank()]
    try:
        made = core_engine(2, config(1) | {"hilore": BLOCK | {"profile": {"path": "auto"}}}, {})
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
    stages = []
    for number in range(4):
        stages.append(made.hilore.stage.value)
        made.backward(gpt_loss(made, number))
        made.step()
    ds_hilore.detach(made)
    return stages


def test_shards_go_by_a_stored_profile_together(ranks: RankPool, tmp_path: Any) -> None:
    """A rank that knows its units would store none while others measure them, so theirs would be replayed, for good."""
    own = [str(tmp_path / "first"), str(tmp_path / "second")]
    measured = ["measure_r", "measure_r", "measure_h", "planned"]
    assert ranks.run(f"{HERE}:stages_with_profile", folders=own) == [measured] * 2
    assert list((tmp_path / "first").rglob("*.json")) and not list((tmp_path / "second").rglob("*.json"))
    assert ranks.run(f"{HERE}:stages_with_profile", folders=own) == [measured] * 2
    shared = ["measure_r", "measure_r", "planned", "planned"]
    assert ranks.run(f"{HERE}:stages_with_profile", folders=[own[0]] * 2) == [shared] * 2


# ------------------------------------------------------------------------------------------------ selective recompute


def selective(block: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Gradients, and how many units ran.

    Of what Megatron 0.16.1 can recompute, this is what runs here: the backward of `mlp` never ends where there are
    biases, without DeepSpeed too (its function gives a parameter back); `layernorm` needs Transformer Engine.
    """
    import ds_hilore
    from tests.megatron import gpt_loss

    model = {"recompute": None, "recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    made = core_engine(1, config(1) | block, model)
    torch.manual_seed(1)
    made.backward(gpt_loss(made, 0))
    found = gradients(made), len(made.hilore.microbatch.treated) if block else 0
    if block:
        ds_hilore.detach(made)
    return found


def test_selective_recompute_stays_megatrons_own(ranks: RankPool) -> None:
    plain = ranks.run(f"{HERE}:selective", block={})
    for (expected, _), (found, units) in zip(plain, ranks.run(f"{HERE}:selective", block={"hilore": BLOCK})):
        assert units == 0 and difference(found, expected) == 0
