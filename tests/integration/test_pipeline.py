"""Pipelines: gradients are those of the pipeline without checkpointing, whatever the plan of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UnsupportedError, UsageError
from ds_hilore.core.types import Action, UnitId
from ds_hilore.integration.pipeline import pipeline_notes
from ds_hilore.runtime.budget import all_units
from tests.engines import difference
from tests.integration import pipelines
from tests.ranks import RankPool

HERE = "tests.integration.test_pipeline"
H, R = Action.STORE, Action.RECOMPUTE


def compared(
    stages: int, updates: int, interval: int = 1, streams: int = 1, microbatches: int = 4, blocks: int = 4
) -> dict[str, Any]:
    """Updates of both pipelines; ours with plans that differ by rank and change every update."""
    ds = pipelines.settings(microbatches)
    plain = pipelines.start(pipelines.build(stages, blocks, streams), ds)
    block = {"hilore": {"memory_budget": "1.0x"}}
    ours = pipelines.start(pipelines.build(stages, blocks, streams, interval), ds | block)
    errors, losses, ran = [], [], []
    for number in range(updates):
        ours.hilore.force([H, R, _mixed(ours)][(number + dist.get_rank()) % 3])
        expected, loss = pipelines.update(plain, number)
        found, our_loss = pipelines.update(ours, number)
        errors.append(difference(found, expected))
        losses.append((loss, our_loss))
        ran.append("".join(action.letter for action in ours.hilore.microbatch.ran.values()))
    return pipelines.facts(ours) | {
        "errors": errors,
        "losses": losses,
        "ran": ran,
        "gradients": len(expected),
        "norm": min(float(g.norm()) for g in expected.values()),
        "in_flight": ours.hilore.learning.in_flight,
        "units": [path for path, _ in ours.hilore.parts.unit_names.values()],
    }


def _mixed(engine: Any) -> Any:
    units = [UnitId(path) for path, _ in engine.hilore.parts.unit_names.values()]
    first, second = all_units(units[::2], H), all_units(units[1::2], R)
    return type(first)(choice={**first.choice, **second.choice}, actions={**first.actions, **second.actions})


@pytest.mark.parametrize(
    ("block", "noted"),
    [
        ({}, []),  # defaults are nobody's wish
        ({"prune_zero_exposure": False, "selfcheck": {"updates": 0}}, []),
        ({"prune_zero_exposure": True}, ["prune_zero_exposure"]),
        ({"selfcheck": {"updates": 5}}, ["selfcheck"]),
    ],
)
def test_only_what_the_block_asks_for_in_vain_is_noted(block: dict[str, Any], noted: list[str]) -> None:
    config = HiLoReConfig.model_validate({"memory_budget": "1.10x"} | block)
    found = pipeline_notes(SimpleNamespace(activation_checkpoint_interval=1), config)
    assert [line.split()[0] for line in found] == noted


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(world=4) as pool:
        yield pool


def check(seen: dict[str, Any], updates: int) -> None:
    assert len(seen["errors"]) == updates and max(seen["errors"]) < 1e-6
    assert seen["gradients"] > 0 and seen["norm"] > 0
    assert all(loss == our_loss for loss, our_loss in seen["losses"])


def test_two_stages(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:compared", stages=2, updates=3):
        check(seen, 3)
        assert seen["in_flight"] == (2 if seen["stage"] == 0 else 1)
        count = len(seen["units"])
        patterns = {"H" * count, "R" * count, "".join("HR"[k % 2] for k in range(count))}
        assert set(seen["ran"]) == patterns


@pytest.mark.parametrize(
    ("interval", "streams", "microbatches"), [(2, 1, 3), (1, 2, 4)], ids=["ranges of two layers", "two outputs"]
)
def test_two_stages_of_other_forms(ranks: RankPool, interval: int, streams: int, microbatches: int) -> None:
    form = {"interval": interval, "streams": streams, "microbatches": microbatches}
    case = {"stages": 2, "updates": 3, "blocks": 6, **form}
    for seen in ranks.run(f"{HERE}:compared", **case):
        check(seen, 3)
        assert len(set(seen["ran"])) == 3


def test_four_stages(four: RankPool) -> None:
    answers = four.run(f"{HERE}:compared", stages=4, updates=3, microbatches=6, blocks=6)
    for seen in answers:
        check(seen, 3)
        assert seen["in_flight"] == 4 - seen["stage"]
    assert {path for seen in answers for path in seen["units"]} == {f"layers-{k}" for k in range(8)}


def test_four_stages_with_two_outputs(four: RankPool) -> None:
    for seen in four.run(f"{HERE}:compared", stages=4, updates=3, streams=2, blocks=6, microbatches=5):
        check(seen, 3)


def test_two_stages_on_two_replicas(four: RankPool) -> None:
    """Data-parallel replicas of one stage reduce their gradients; their plans differ too."""
    answers = four.run(f"{HERE}:compared", stages=2, updates=3)
    for seen in answers:
        check(seen, 3)
    assert {(seen["stage"], seen["replica"]) for seen in answers} == {(0, 0), (0, 1), (1, 0), (1, 1)}


# ------------------------------------------------------------------------------------------ measured plans


UPDATES = 10


def planned(budgets: list[str]) -> dict[str, Any]:
    """Ten updates beside the pipeline without checkpointing. Nothing is forced: a stage per rank, each under its own
    budget."""
    stages, ds = len(budgets), pipelines.settings(rows=8)
    plain = pipelines.start(pipelines.build(stages, blocks=6), ds)
    block = {"hilore": {"memory_budget": budgets, "planner": {"trial_microbatches": 0}}}
    ours = pipelines.start(pipelines.build(stages, blocks=6, interval=1), ds | block)
    errors, learnt = [], []
    for number in range(UPDATES):
        shape = {"rows": 8, "tokens": 256}  # activations must outweigh the noise of a process's resident size
        expected, _ = pipelines.update(plain, number, **shape)
        found, _ = pipelines.update(ours, number, **shape)
        errors.append(difference(found, expected))
        learnt.append(ours.hilore.stage.value)
        ours.hilore.parts.planner.wait(60)
    controller = ours.hilore
    problem = controller.parts.planner.problem_for(controller.parts.planner.planning_shape(controller.microbatch.shape))
    return pipelines.facts(ours) | {
        "errors": errors,
        "learnt": learnt,
        "actions": [action.letter for action in controller.microbatch.ran.values()],
        "peak and budget": (controller.plan.peak_bytes, controller.budget_bytes),
        "in_flight": problem.in_flight,
    }


@pytest.mark.parametrize("budgets", [["1.01x", "1000x"], ["1.01x", "900x", "1.01x", "1000x"]], ids=["two", "four"])
def test_stages_measure_and_plan_for_themselves(request: pytest.FixtureRequest, budgets: list[str]) -> None:
    """Every other stage has little memory to spare, the rest have plenty."""
    pool = request.getfixturevalue("ranks" if len(budgets) == 2 else "four")
    answers = pool.run(f"{HERE}:planned", budgets=budgets)
    for seen in answers:
        assert len(seen["errors"]) == UPDATES and max(seen["errors"]) < 1e-6
        assert seen["learnt"] == ["measure_r", "measure_h", *["planned"] * (UPDATES - 2)]
        peak, budget = seen["peak and budget"]
        assert 0 < peak <= budget
    assert [seen["in_flight"] for seen in answers] == list(range(len(budgets), 0, -1))
    for tight, roomy in zip(answers[::2], answers[1::2], strict=True):
        assert set(roomy["actions"]) == {"H"} and "R" in tight["actions"]


# ------------------------------------------------------------------------------------------ what else an engine does


def used_otherwise() -> dict[str, Any]:
    """Evaluation between updates, `install`, coefficients and detaching."""
    import deepspeed

    ds = pipelines.settings() | {"hilore": {"memory_budget": "1.0x"}}
    seen: list[Tensor] = []

    def telling(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)
        seen.append(rows)
        return -ds_hilore.observe_logps(rows).mean()

    module = pipelines.build(2)
    module.loss_fn = telling
    before = dict(vars(module))
    ds_hilore.install()
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=ds
    )
    ds_hilore.uninstall()
    attributes = dict(vars(engine))
    controller = engine.hilore
    first = float(engine.eval_batch(pipelines.data(0, 0)))
    assert not controller.microbatch.ran
    pipelines.update(engine, 0)
    omega = [c.omega.sum() for c in controller.coefficients]  # of the newest microbatch
    second = float(engine.eval_batch(pipelines.data(0, 0)))
    gradients, _ = pipelines.update(engine, 1)
    ds_hilore.detach(engine)
    kept = {name for name, value in vars(module).items() if before.get(name, module) is not value}
    loss = float(engine.train_batch(pipelines.data(2, 0)))
    return pipelines.facts(engine) | {
        "stage of learning": controller.stage.value,
        "evaluated": (first, second),
        "omega": [float(value) for value in omega],
        "kept on the module": sorted(
            kept & {"forward", "activation_checkpoint_func", "activation_checkpoint_interval"}
        ),
        "kept on the engine": sorted({"hilore", "train_batch", "_INSTRUCTION_MAP"} & vars(engine).keys()),
        "was on the engine": sorted({"hilore", "train_batch", "_INSTRUCTION_MAP"} & attributes.keys()),
        "gradients": len(gradients),
        "loss after": loss,
    }


def test_evaluation_coefficients_and_detaching(ranks: RankPool) -> None:
    answers = ranks.run(f"{HERE}:used_otherwise")
    for seen in answers:
        assert seen["stage of learning"] == "measure_h"  # two updates: evaluation does not count
        assert seen["evaluated"][1] < seen["evaluated"][0]
        assert seen["was on the engine"] == ["_INSTRUCTION_MAP", "hilore", "train_batch"]
        assert seen["kept on the engine"] == seen["kept on the module"] == []
        assert seen["loss after"] > 0  # plain DeepSpeed again
    # -mean over the microbatch, of which there are four: the sum of omega is -1/4, and only the last stage knows.
    assert [seen["omega"] for seen in answers] == [[], [pytest.approx(-0.25)]]


class LayerFailure(Exception):
    pass


def broken_in_the_middle() -> list[str]:
    """Every stage fails in its second forward, and is not let into another update."""
    ds = pipelines.settings() | {"hilore": {"memory_budget": "1.0x"}}
    engine = pipelines.start(pipelines.build(2), ds)
    layer = engine.module.forward_funcs[1]
    handle = layer.register_forward_pre_hook(_second_call())
    with pytest.raises(LayerFailure):
        engine.train_batch(pipelines.data(0, 0))
    handle.remove()
    open_microbatches = len(engine._hilore_host.waiting)
    with pytest.raises(UsageError) as caught:
        engine.train_batch(pipelines.data(0, 0))
    return [str(caught.value), str(open_microbatches)]


def _second_call() -> Any:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise LayerFailure

    return fail


def refused() -> list[str]:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    ds = pipelines.settings() | {"hilore": {}}
    sliced = PipelineModule(
        [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)],
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1),
    )
    engine = pipelines.start(pipelines.build(2), ds)
    engine.module.set_checkpoint_interval(3)
    said = []
    for error, action in (
        (UnsupportedError, lambda: pipelines.start(sliced, ds)),
        (UsageError, lambda: engine.train_batch(pipelines.data(0, 0))),
    ):
        with pytest.raises(error) as caught:
            action()
        said.append(str(caught.value))
    return said


def test_refusals(ranks: RankPool) -> None:
    for sliced, changed in ranks.run(f"{HERE}:refused"):
        assert "tensor parallelism within the stages" in sliced
        assert "activation_checkpoint_interval was changed" in changed


def test_an_update_that_broke_cannot_begin_again(ranks: RankPool) -> None:
    for said, open_microbatches in ranks.run(f"{HERE}:broken_in_the_middle"):
        assert "start the job again from a checkpoint" in said
        assert open_microbatches == "0"
