"""Forecasts of a job: what must hold of any layers, any account and any budget, and one update by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import Shape, UnitId
from ds_hilore.memory.ledger import ALWAYS, Account, Entry, Item, Moment
from ds_hilore.planning.problem import Infeasible
from ds_hilore.profiling.cost_model import DeviceSpeed, head_costs, layer_costs
from ds_hilore.profiling.geometry import Adapters, HeadGeometry, LayerGeometry
from ds_hilore.profiling.job import Job, Layer, Planned

LAYER = LayerGeometry(576, 1536, query_heads=9, kv_heads=3, head_dim=64, adapters=Adapters.everywhere(16))
HEAD = HeadGeometry(576, 49152, chunk_tokens=256)
WEIGHTS = 270 * 10**6
SPEED = DeviceSpeed(1e14, 1e12)
USUAL = Shape(2, 1024)


def job(layers: int = 12, shape: Shape = USUAL, step_bytes: int = 0, accumulation: int = 1) -> Job:
    account = Account(
        (
            Entry(Item.FROZEN, WEIGHTS, moments=ALWAYS),
            Entry(Item.OPTIMIZER_STEP, step_bytes, moments=frozenset({Moment.STEP})),
        )
    )
    plain, ours = layer_costs(LAYER), layer_costs(replace(LAYER, gated_function=True))
    units = tuple(Layer(UnitId(f"layers.{i}"), "Layer", ours, plain) for i in range(layers))
    return Job(units, head_costs(HEAD), account, shape, SPEED, accumulation)


def test_one_update_by_hand() -> None:
    """Checkpointing: weights, an input per layer, one layer's state and gradients; stored: all states and the loss."""
    found, costs, shape = job(), layer_costs(LAYER), USUAL
    inputs, state, wide = (r.of(shape) for r in (costs.input_bytes, costs.torch_bytes, costs.gradient_bytes))
    assert found.checkpointing.peak_bytes == pytest.approx(WEIGHTS + 12 * inputs + state + wide, abs=40)
    loss = head_costs(HEAD).workspace_bytes.of(shape)
    assert found.no_checkpointing.peak_bytes == pytest.approx(WEIGHTS + 12 * (inputs + state) + loss, abs=40)
    assert found.no_checkpointing.fullest == "loss" and loss > wide
    replays = 12 * SPEED.seconds(costs.replay_with_dead).of(shape)
    assert found.checkpointing.seconds - found.no_checkpointing.seconds == pytest.approx(replays)
    assert (found.checkpointing.recovered_share, found.no_checkpointing.recovered_share) == (0.0, 1.0)
    assert found.checkpointing.fullest == "backward" and found.checkpointing.variants == {"R": 12}


def test_an_update_takes_the_time_of_its_microbatches() -> None:
    one, three = job(), job(accumulation=3)
    assert three.checkpointing.seconds == pytest.approx(3 * one.checkpointing.seconds)
    assert three.checkpointing.peak_bytes == one.checkpointing.peak_bytes


SHAPES = st.builds(Shape, st.integers(1, 4), st.integers(1, 4096))


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.lists(st.floats(0.5, 8.0), min_size=2, max_size=4), st.integers(0, 10**9))
def test_plans_keep_their_budgets_and_more_memory_never_costs_time(
    shape: Shape, multiples: list[float], step_bytes: int
) -> None:
    found = job(6, shape, step_bytes)
    before = 0.0
    for multiple in sorted(multiples):
        budget = int(multiple * found.replayed.peak_bytes)
        answer = found.planned(budget)
        if isinstance(answer, Infeasible):
            assert budget < found.replayed.peak_bytes and answer.min_bytes <= found.replayed.peak_bytes
            continue
        outcome = answer.outcome
        assert outcome.peak_bytes <= budget and sum(outcome.variants.values()) == 6
        assert before <= outcome.recovered_share * (1 + 1e-9) <= 1 + 1e-9
        # a greedy plan may be short of the best by what it says itself
        before = outcome.recovered_share / (1 + answer.gap) if answer.gap < 1 else 0.0


def test_the_step_is_part_of_the_peak_and_no_plan_lowers_it() -> None:
    found = job(step_bytes=10**9)
    assert found.replayed.peak_bytes == WEIGHTS + 10**9 and found.replayed.fullest == "step"
    refused = found.planned(WEIGHTS + 10**9 - 1)
    assert isinstance(refused, Infeasible) and refused.row == "step" and refused.missing_bytes == 1
    allowed = found.planned(WEIGHTS + 10**9)
    assert isinstance(allowed, Planned) and allowed.outcome.variants.get("H", 0) > 0, "storing is free below the step"


def test_the_full_account_peaks_where_the_rows_do() -> None:
    """Every unit's inputs, and the widest replay: never less than the rows say, nothing twice."""
    found = job()
    moment, peak = found.full_account().peak()
    assert (moment.value, peak) == (found.replayed.fullest, found.replayed.peak_bytes)
    assert found.storing_bytes == pytest.approx(12 * layer_costs(LAYER).base_bytes.of(Shape(2, 1024)), abs=40)
