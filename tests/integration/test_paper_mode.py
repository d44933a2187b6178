"""Mode `paper` in real engines: its one tensor a layer, its planner, and nothing of ours beside; on any world size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ds_hilore.core.types import Action, Solver
from ds_hilore.planning.problem import Problem
from ds_hilore.recovery.bundle import Derived, Handle
from ds_hilore.recovery.encoded import Encoded
from ds_hilore.recovery.unit import UnitCall
from ds_hilore.runtime.parts import Stage
from tests.engines import config
from tests.integration import updates
from tests.integration.test_compress import grpo, update
from tests.models import llama, lora
from tests.ranks import RankPool

HERE = "tests.integration.test_paper_mode"
LIMIT = 0.5  # linear sums of unscaled fp8 on tiny layers: less would leave everything exact
CODEC = "fp8_e4m3:unscaled"
#: Small models have no bfloat16 tensor of 32 MiB.
ANY_TENSOR = {"least_tensor_bytes": 0, "dtypes": ["float32"]}


def paper_engine(stage: int, paper: dict[str, Any]) -> Any:
    return updates.hilore_engine(
        lora(llama(layers=4, hidden=128)),
        config(stage, accumulation=2),
        memory_budget="1000x",
        mode="paper",
        max_gradient_error=LIMIT,
        paper=paper,
        profile={"calibration_microbatches": 4, "audit_interval": 1},
    )


def settled(engine: Any) -> int:
    """Runs updates until plans may compress; gives the number of the next."""
    number = 0
    while engine.hilore.stage is not Stage.PLANNED or not engine._hilore_host.checks.calibrated:
        update(engine, number)
        number += 1
    update(engine, number)  # the first that plans with what was calibrated
    return number + 1


def problem_of(engine: Any) -> Problem:
    planner = engine.hilore.parts.planner
    return planner.problem_for(planner.planning_shape(engine.hilore.microbatch.shape))


def seen_of(call: UnitCall) -> dict[str, Any]:
    """What one call holds between forward and backward."""
    values = [handle.value for reference in call._handles if isinstance(handle := reference(), Handle)]
    packed = {id(value.packed): value.packed for value in values if isinstance(value, Encoded)}
    return {
        "action": call.action.value,
        "encoded": [
            [each.codec.name, each.payload.dtype.itemsize * each.payload.codes.numel()] for each in packed.values()
        ],
        "derived": sum(isinstance(value, Derived) for value in values),
        "kept outputs": call.outputs is not None,
    }


def followed(stage: int) -> dict[str, Any]:
    """Updates in which units are compressed: what calls hold, who planned, and what the plans' risks add up to."""
    engine = paper_engine(stage, ANY_TENSOR)
    hilore, number = engine.hilore, settled(engine)
    problem = problem_of(engine)
    for unit_class in {unit.unit_class for unit in problem.units}:
        hilore.measurements.strike(unit_class, "H", "there is memory for everything")
    # what compressing saves on layers this small, on a busy machine, is chance
    hilore.measurements._gained = lambda unit_class, shape, variant: 1.0
    hilore.measurements.outdate()
    hilore.parts.planner.replan()
    calls: list[dict[str, Any]] = []
    solvers: Counter[str] = Counter()
    sums: list[tuple[float, float]] = []
    for _ in range(3):
        for k in range(engine.gradient_accumulation_steps()):
            loss = grpo(engine, 100 * number + 10 * k + engine.global_rank)
            calls += [seen_of(call) for call in hilore.microbatch.alive()]
            engine.backward(loss)
            row = hilore.microbatch.prepared
            now = hilore.learning.exposed
            decided = hilore.microbatch.treated
            solvers[row.plan.solver.value] += 1
            risks = [unit.variant(decided[unit.unit].name).risk * now.of(unit.unit) for unit in row.problem.units]
            sums.append((hilore.learning.risk.spent[-1], sum(risks)))
            engine.step()
        number += 1
    checks = engine._hilore_host.checks
    return {
        "calls": calls,
        "solvers": dict(solvers),
        "sums": sums,
        "variants": sorted({variant.name for unit in problem.units for variant in unit.variants}),
        "dead": dict(hilore.dead),
        "audits": [(audit.predicted, audit.measured) for audit in checks.audits],
        "mlp bytes": 4 * 32 * engine.module.config.intermediate_size * 4,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_one_tensor_a_layer_and_nothing_beside(ranks: RankPool, stage: int) -> None:
    for seen in ranks.run(f"{HERE}:followed", stage=stage, timeout=150.0):
        compressed = [call for call in seen["calls"] if call["action"] == Action.COMPRESS.value]
        assert compressed, {k: v for k, v in seen.items() if k != "calls"}
        assert all(call["encoded"] == [[CODEC, seen["mlp bytes"]]] for call in compressed)
        assert not any(call["derived"] or call["kept outputs"] for call in seen["calls"])
        assert seen["variants"] == ["H", f"L:mlp={CODEC}", "R"]
        assert seen["dead"] == {}
        assert set(seen["solvers"]) <= {Solver.GREEDY.value, Solver.DYNAMIC.value}
        assert all(spent == pytest.approx(added) for spent, added in seen["sums"])
        assert any(spent > 0 for spent, _ in seen["sums"])
        # errors of units are added up as they are: what is measured stays below
        assert all(measured <= predicted for predicted, measured in seen["audits"] if measured > 1e-5)


def too_small() -> dict[str, Any]:
    """As the paper has it: no tensor of these layers is large enough, or bfloat16."""
    engine = paper_engine(2, {})
    settled(engine)
    problem = problem_of(engine)
    return {"variants": sorted({variant.name for unit in problem.units for variant in unit.variants})}


def test_small_tensors_are_not_compressed(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:too_small", timeout=150.0):
        assert seen["variants"] == ["H", "R"]
