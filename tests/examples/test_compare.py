"""The comparison: what it leaves alone, what it measures, what it prints."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from arithmetic.compare import (
    Comparison,
    Method,
    RankFigures,
    frozen_parameters,
    full_gradients,
    gather,
    largest_difference,
)
from arithmetic.table import comparison_tables
from rich.console import Console
from torch import Tensor

from ds_hilore.core.types import Action, Plan, UnitId
from tests.examples import tiny
from tests.ranks import RankPool

TURNS = 2

FIGURES = RankFigures(
    rank=0,
    seconds={Method.NONE: [6.0, 7.0, 8.0], Method.CHECKPOINTING: [10.0, 10.0, 10.0], Method.HILORE: [8.0, 9.0, 7.0]},
    peak_bytes={Method.NONE: 4 << 30, Method.CHECKPOINTING: 2 << 30, Method.HILORE: 2_200 << 20},
    budget_bytes=None,
    actions={"H": 4, "R": 26},
    gradient_error={Method.NONE: 0.0, Method.CHECKPOINTING: 2e-7, Method.HILORE: 0.0},
    update_share=0.4,
)


def test_ratios_are_medians_within_turns() -> None:
    assert FIGURES.median_ratio(Method.HILORE, Method.CHECKPOINTING) == pytest.approx(0.8)
    assert FIGURES.median_ratio(Method.HILORE, Method.NONE) == pytest.approx(9 / 7)  # not 8 / 7 of the medians
    assert FIGURES.recovered_share() == pytest.approx(0.2 / 0.3)


def test_no_recovered_share_where_checkpointing_costs_next_to_nothing() -> None:
    cheap = replace(FIGURES, seconds={**FIGURES.seconds, Method.NONE: [9.6, 9.7, 9.8]})
    assert cheap.recovered_share() is None


def test_tables_have_a_row_per_rank() -> None:
    ranks = [FIGURES, replace(FIGURES, rank=1, budget_bytes=3 << 30, actions={"R": 30})]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(*comparison_tables(ranks))
    rows = [line.split("│")[1:-1] for line in capture.get().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    times = ["7.00", "10.00", "8.00", "0.800 x", "67%", "40%"]
    assert cells[:2] == [["0", *times], ["1", *times]]
    assert cells[2:] == [
        ["0", "4.000", "2.000", "2.148", "?", "1.074 x", "4 H 26 R", "2.0e-07, 0.0e+00"],
        ["1", "4.000", "2.000", "2.148", "3.000", "1.074 x", "30 R", "2.0e-07, 0.0e+00"],
    ]


@pytest.mark.parametrize(
    ("gradient", "exact", "difference"),
    [([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, 2.2], [1.0, 2.0], 0.1), ([0.0], [0.0], 0.0), ([1e-9], [0.0], float("inf"))],
)
def test_largest_difference(gradient: list[float], exact: list[float], difference: float) -> None:
    same = torch.ones(3)
    found = largest_difference([same, torch.tensor(gradient)], [same, torch.tensor(exact)])
    assert found == pytest.approx(difference, rel=1e-5)


def test_steps_inside_frozen_parameters_change_none() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    engine = SimpleNamespace(optimizer=optimizer, lr_scheduler="schedule")
    with pytest.raises(KeyError), frozen_parameters(engine):
        assert engine.lr_scheduler is None
        weight.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(weight, torch.ones(3))
        raise KeyError  # put back all the same
    assert engine.lr_scheduler == "schedule"
    optimizer.step()
    assert (weight < 0.9).all()


def test_comparison_on_two_ranks(ranks: RankPool) -> None:
    results = ranks.run("tests.examples.test_compare:compare_on_rank", stage=2)
    for result in results:
        figures = result["figures"]
        assert [f.rank for f in figures] == [0, 1]
        assert result["parameters_changed"] == 0
        assert result["gradients_seen"] > 0
        assert result["gradients_alive"] == [0] * (3 * (TURNS + 1))  # in every update whose time or peak is taken
        # One gradient pass, the timed turns and one peak pass, in which every method comes once.
        turns = [result["methods"][start : start + 3] for start in range(0, len(result["methods"]), 3)]
        assert len(turns) == TURNS + 2 and all(set(turn) == set(Method) for turn in turns)
        assert len({tuple(turn) for turn in turns[1 : 1 + TURNS]}) == TURNS  # another method begins each turn
        assert result["advanced"] == Comparison.updates(TURNS) == len(result["methods"])
        for found in figures:
            assert {method: len(times) for method, times in found.seconds.items()} == dict.fromkeys(Method, TURNS)
            assert found.actions == {"H": 1, "R": 2}
            # Wrong on purpose under checkpointing, on both ranks, because gradients are reduced.
            assert found.gradient_error[Method.CHECKPOINTING] == pytest.approx(0.25, rel=1e-4)
            assert found.gradient_error[Method.NONE] == found.gradient_error[Method.HILORE] == 0
            # The ballast that the methods hold is in the peaks.
            peaks = found.peak_bytes
            assert peaks[Method.NONE] - peaks[Method.HILORE] > 40 << 20
    assert results[0]["figures"] == results[1]["figures"]


class FakeController:
    """Stands for `engine.hilore`, and notes under which method updates run."""

    def __init__(self) -> None:
        self.method = Method.HILORE
        actions = {UnitId("a"): Action.STORE, UnitId("b"): Action.RECOMPUTE, UnitId("c"): Action.RECOMPUTE}
        self.plan = Plan(actions=actions)
        self.budget_bytes = 1 << 30

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self._under(Method.NONE)

    def host_checkpointing(self, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        assert function(torch.square, torch.tensor(3.0)) == 9
        return self._under(Method.CHECKPOINTING)

    @contextlib.contextmanager
    def _under(self, method: Method) -> Iterator[None]:
        self.method = method
        yield
        self.method = Method.HILORE


def compare_on_rank(stage: int) -> dict[str, Any]:
    """One rank of `test_comparison_on_two_ranks`: a plain engine, and updates that know their method."""
    import deepspeed

    policy = tiny.actor()
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=trainable, config=config)
    engine.hilore = FakeController()
    microbatch = tiny.microbatch(policy)
    copies: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    methods: list[Method] = []
    advanced: list[None] = []

    def noted_gradients(module: torch.nn.Module) -> list[Tensor]:
        gradients = full_gradients(module)
        copies.extend(weakref.ref(gradient) for gradient in gradients)
        return gradients

    def update(before_step: Callable[[], None] | None) -> None:
        method = engine.hilore.method
        if before_step is None:
            alive.append(sum(copy() is not None for copy in copies))
        methods.append(method)
        ballast = torch.ones((64 if method is Method.NONE else 1) << 18)
        factor = 1.25 if method is Method.CHECKPOINTING else 1.0
        loss = (engine(*microbatch.sequences) * microbatch.advantages[:, None]).sum() * factor
        engine.backward(loss + 0 * ballast[0])
        if before_step is not None:
            before_step()
        engine.step()

    before = [parameter.detach().clone() for parameter in trainable]
    with mock.patch("arithmetic.compare.full_gradients", noted_gradients):
        figures = Comparison(engine, update, lambda: advanced.append(None)).run(TURNS, update_share=0.5)
    return {
        "figures": gather(figures),
        "methods": methods,
        "gradients_seen": len(copies),
        "gradients_alive": alive,
        "advanced": len(advanced),
        "parameters_changed": sum(not torch.equal(a, b) for a, b in zip(before, trainable)),
    }
