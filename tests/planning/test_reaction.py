"""In the middle of a forward: units that have run stay, later ones are replayed until the rows hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import UnitId
from ds_hilore.planning.options import REPLAY
from ds_hilore.planning.problem import Row, evaluate
from ds_hilore.planning.reaction import replay_later
from tests.planning.planning_problems import decoder

UNITS = 12


@given(st.integers(0, UNITS), st.floats(0.0, 1.0), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_rows_hold_or_all_later_units_are_replayed(first: int, tightness: float, seed: int) -> None:
    """Nothing but R is put in the place of anything, and never more of it than needed."""
    problem = decoder(UNITS, 3, noise=0.02 * (seed % 7), risk_budget=1.0)
    names = [[variant.name for variant in unit.variants] for unit in problem.units]
    choice = {unit.unit: names[k][(seed + k) % 3] for k, unit in enumerate(problem.units)}
    peak = evaluate(problem, choice).peak_bytes
    least = evaluate(problem, {}).peak_bytes
    tighter = problem.now(budget_bytes=int(least + tightness * (peak - least)), risk_budget=1e9)
    found = replay_later(tighter, choice, first)
    changed = {unit for unit in choice if found[unit] != choice[unit]}
    later: list[UnitId] = [unit.unit for unit in problem.units][first:]
    assert changed <= set(later) and all(found[unit] == REPLAY for unit in changed)
    if not evaluate(tighter, found).feasible:
        assert all(found[unit] == REPLAY for unit in later)
    else:
        for unit in changed:  # each one is needed: with any of them as it was, some row breaks
            rows = evaluate(tighter, {**found, unit: choice[unit]}).violations
            assert any(violation.row in (Row.FORWARD, Row.LOSS, Row.BACKWARD) for violation in rows)
