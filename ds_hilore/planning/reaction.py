"""What to do with prepared state once the true numbers are known: in microseconds, and always feasible.

After forward the exposures of units may differ from what the frontier assumed (token-resolved, MoE), and there may be
less memory than foreseen. `react` answers both, from the points of one q-plan: it takes the most that the true risks
allow, and gives memory back by replaying what saves least per byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ds_hilore.core.types import Plan, Solver, UnitId
from ds_hilore.planning.greedy import repair
from ds_hilore.planning.options import REPLAY, Option
from ds_hilore.planning.problem import RISK_TOLERANCE, Infeasible, Problem, evaluate_picked, make_plan_of, pick
from ds_hilore.planning.rows import Rows

#: Places of options, one a unit in forward order.
Places = tuple[int, ...]
#: Keeps densities finite: what is free at the true exposures comes first.
_FREE = 1e-300


def steps_of(points: Sequence[Places]) -> tuple[tuple[int, int], ...]:
    """(position, place) of every option that some point has: what `react` chooses from."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(map(enumerate, points))))


def react(problem: Problem, points: Sequence[Places], steps: Iterable[tuple[int, int]]) -> Plan | Infeasible:
    """Gives a plan that holds in `problem`, from a-plans known for the same q.

    Of all points that hold, and of what greedy adds to the best of them and to the calmest plan, the one that saves
    most. Where memory is short, units are replayed until every row holds.

    Args:
        points: places of `problem.options`, in order of risk; the first without any as far as was foreseen.
        steps: `steps_of(points)`.
    """
    options = problem.options
    limit = problem.risk_limit * (1 + RISK_TOLERANCE)
    starts = [[_exact(each, each[place]) for each, place in zip(options, points[0])]]
    for places in reversed(points):
        if sum([each[place].risk_cost for each, place in zip(options, places)]) <= limit:
            starts.append([each[place] for each, place in zip(options, places)])
            break
    denser = _densest_first(problem, starts[0], steps)
    best = max([_bolder(picked, denser, limit) for picked in starts], key=_seconds)
    evaluation = evaluate_picked(problem, best)
    if evaluation.feasible:
        return make_plan_of(problem, best, Solver.GREEDY)
    lighter = _lighter(problem, best)
    if lighter is not None:
        return make_plan_of(problem, lighter, Solver.GREEDY)
    units = [unit.unit for unit in problem.units]
    return repair(problem, Plan(choice=dict(zip(units, [option.name for option in best]))))


def replay_later(problem: Problem, choice: Mapping[UnitId, str], first: int) -> dict[UnitId, str]:
    """Gives `choice` with units from position `first` on replayed, those first that save least per byte, until the
    rows of `problem` hold; all of them where that is not enough."""
    picked = pick(problem, choice)
    lighter = _lighter(problem, picked, first)
    if lighter is None:
        later = list(zip(problem.options, picked))[first:]
        lighter = picked[:first] + [next((o for o in options if o.name == REPLAY), now) for options, now in later]
    return {unit.unit: option.name for unit, option in zip(problem.units, lighter)}


def _exact(options: Sequence[Option], option: Option) -> Option:
    """The option, or R where it has come to cost risk: a unit foreseen to be exposed to nothing may be after all."""
    if option.risk_cost == 0:
        return option
    return next((other for other in options if other.name == REPLAY), option)


def _densest_first(
    problem: Problem, calm: Sequence[Option], steps: Iterable[tuple[int, int]]
) -> list[tuple[int, Option]]:
    """Steps from the calm plan that gain, those first that gain most for their risk."""
    dense: list[tuple[float, int, int]] = []
    for position, place in steps:
        option = problem.options[position][place]
        gain = option.seconds - calm[position].seconds
        if gain > 0:
            # of equally dense steps the later unit comes first (T2 of ties.py)
            dense.append((-gain / (option.risk_cost + _FREE), -position, place))
    dense.sort()
    return [(-position, problem.options[-position][place]) for _, position, place in dense]


def _bolder(picked: Sequence[Option], steps: Sequence[tuple[int, Option]], limit: float) -> list[Option]:
    """Takes steps as far as risk allows."""
    bolder = list(picked)
    spent = _risk(picked)
    for position, option in steps:
        now = bolder[position]
        after = spent + option.risk_cost - now.risk_cost
        if option.seconds > now.seconds and after <= limit:
            bolder[position] = option
            spent = after
    return bolder if _risk(bolder) <= limit else list(picked)


def _lighter(problem: Problem, picked: Sequence[Option], first: int = 0) -> list[Option] | None:
    """Replays units from position `first` on, those first that save least per byte they hold, until the rows hold; then
    puts back what fits.

    None if replaying all of them is not enough, or replays themselves are what does not fit.
    """
    replays = [next((option for option in options if option.name == REPLAY), None) for options in problem.options]
    order: list[tuple[float, int]] = []
    for position, (option, replay) in enumerate(zip(picked, replays)):
        if position >= first and replay is not None and option.name != REPLAY:
            freed = max(1, option.backward_held_bytes - replay.backward_held_bytes)
            order.append(((option.seconds - replay.seconds) / freed, position))
    order.sort()  # of equals the earlier unit is replayed first (T2 of ties.py)

    def without(count: int) -> list[Option]:
        lighter = list(picked)
        for _, position in order[:count]:
            replay = replays[position]
            assert replay is not None
            lighter[position] = replay
        return lighter

    few, many = 0, len(order)
    if not evaluate_picked(problem, without(many)).feasible:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        if evaluate_picked(problem, without(middle)).feasible:
            many = middle
        else:
            few = middle
    rows = Rows(problem, without(many))
    for _, position in reversed(order[:many]):
        if rows.fits(position, picked[position]):
            rows.put(position, picked[position])
    return rows.picked


def _risk(picked: Sequence[Option]) -> float:
    return sum([option.risk_cost for option in picked])


def _seconds(picked: Sequence[Option]) -> float:
    return sum([option.seconds for option in picked])
