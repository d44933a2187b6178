"""What the programme leaves out must change nothing: rows, single units, and plans that are not sorted."""

from __future__ import annotations

import itertools

import pytest

from ds_hilore.planning.problem import Problem, Row, evaluate
from ds_hilore.planning.symmetry import reduce_problem
from ds_hilore.planning.ties import late_rank
from tests.planning.planning_problems import decoder, random_problem, replayed, stored, unit

BYTES = (Row.FORWARD, Row.LOSS, Row.BACKWARD, Row.HOST)


def test_rows_left_out_follow_from_rows_kept() -> None:
    """For every choice of 150 random problems: the rows kept hold if and only if all byte rows do."""
    agreed = {True: 0, False: 0}
    for seed in range(150):
        problem = random_problem(seed, max_units=5, max_choices=200)
        rows = reduce_problem(problem).rows
        for places in itertools.product(*(range(len(options)) for options in problem.options)):
            choice = {u.unit: o[p].name for u, o, p in zip(problem.units, problem.options, places)}
            truth = not any(v.row in BYTES for v in evaluate(problem, choice).violations)
            kept = all(sum(c[p] for c, p in zip(row.coefficients, places)) <= row.limit_bytes for row in rows)
            assert kept == truth, (seed, choice)
            agreed[truth] += 1
    assert min(agreed.values()) > 1000


def test_chains_lose_no_feasible_counts() -> None:
    """Where a class is chained, sorting any feasible choice of it by rank stays feasible and saves the same."""
    sorted_choices = 0
    for seed in range(600):
        problem = random_problem(seed, max_units=6, max_choices=200)
        for chain in reduce_problem(problem).chains:
            positions = [position for group in chain for position in group.positions]
            options = chain[0].options
            for names in itertools.product(*([o.name for o in each] for each in problem.options)):
                choice = {u.unit: name for u, name in zip(problem.units, names)}
                if not evaluate(problem, choice).feasible:
                    continue
                picked = sorted((next(o for o in options if o.name == names[p]) for p in positions), key=late_rank)
                exchanged = {**choice, **{problem.units[p].unit: o.name for p, o in zip(positions, picked)}}
                assert evaluate(problem, exchanged).feasible, (seed, choice)
                sorted_choices += exchanged != choice
    assert sorted_choices > 200


@pytest.mark.parametrize("units", [12, 80])
def test_a_decoder_stack_needs_a_handful_of_counts(units: int) -> None:
    reduced = reduce_problem(decoder(units, 3, risk_budget=0.01))
    assert len(reduced.rows) <= 3
    assert len(reduced.groups) <= 3
    assert sum(group.size for group in reduced.groups) == units


@pytest.mark.parametrize(("grad_bytes", "chained"), [(0, True), (40, False), (1000, False)])
def test_large_gradients_forbid_the_order(grad_bytes: int, chained: bool) -> None:
    """Gradients there before an early unit's replay may outweigh what the later unit would hold: late is not safe."""
    units = tuple(unit(i, replayed(1, 100), stored(39, 1.0), grad_bytes=grad_bytes) for i in range(3))
    problem = Problem(units, budget_bytes=100 + 3 * grad_bytes, base_backward_bytes=10)
    assert bool(reduce_problem(problem).chains) is chained
