"""Rows as linear inequalities over 0/1 choices, cut down to what can bind, and the symmetry that is left in them.

Decoder layers are near-identical, so a programme with one binary per unit and variant drowns in equal plans. Three
exact reductions, in plain Python:

1. A row that another row implies for every choice is dropped (mostly all but the loss row and a few backward rows).
2. Units of equal options that stand alike in every row left are one **group**, chosen by counts.
3. Where exchanging two equal units so that more is held later never hurts a row, only plans sorted that way are
   searched (T2 of ties.py): each group of a class holds at least the share of high ranks of the group before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ds_hilore.planning.options import Option
from ds_hilore.planning.problem import Problem, Row
from ds_hilore.planning.ties import late_rank

Coefficients = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LinearRow:
    """sum over units of coefficients[unit][option] <= limit_bytes, counted above the row's constants."""

    row: Row
    position: int | None
    coefficients: Coefficients
    limit_bytes: int


@dataclass(frozen=True)
class Group:
    """Units at `positions` with equal `options` that no row tells apart."""

    positions: tuple[int, ...]
    options: tuple[Option, ...]

    @property
    def size(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Reduced:
    """What the programme has to state: rows that can bind, groups, and chains of groups sorted by `late_rank`."""

    rows: tuple[LinearRow, ...]
    groups: tuple[Group, ...]
    chains: tuple[tuple[Group, ...], ...]


def reduce_problem(problem: Problem) -> Reduced:
    """Gives rows, groups and chains of `problem`: at least one best plan satisfies them, and only feasible plans do.

    The conversion row is left out: it has a variable of its own (program.py).
    """
    rows = _binding_rows(_linear_rows(problem))
    classes: dict[tuple[Option, ...], dict[tuple[object, ...], list[int]]] = {}
    for position, options in enumerate(problem.options):
        stands = tuple(row.coefficients[position] for row in rows)
        classes.setdefault(options, {}).setdefault(stands, []).append(position)
    groups: list[Group] = []
    chains: list[tuple[Group, ...]] = []
    for options, by_standing in classes.items():
        members = [Group(tuple(positions), options) for positions in by_standing.values()]
        groups += members
        if len(members) > 1 and _late_first_is_safe(problem, rows, members):
            chains.append(tuple(members))
    return Reduced(tuple(rows), tuple(groups), tuple(chains))


def _linear_rows(problem: Problem) -> list[LinearRow]:
    """Rows M1, M2, M3 and M5 of problem.py, those first that tend to imply others."""
    options = problem.options
    others = problem.in_flight - 1  # microbatches that hold all they keep meanwhile
    none: Coefficients = tuple(tuple(others * o.held_bytes for o in choices) for choices in options)
    held: Coefficients = tuple(tuple((1 + others) * o.held_bytes for o in choices) for choices in options)
    kept: Coefficients = tuple(
        tuple(o.backward_held_bytes + others * o.held_bytes for o in choices) for choices in options
    )
    rows: list[LinearRow] = []
    if any(option.host_bytes for choices in options for option in choices):
        host = tuple(tuple(o.host_bytes for o in choices) for choices in options)
        rows.append(LinearRow(Row.HOST, None, host, problem.host_budget_bytes))
    if problem.prepared is None:
        rows.append(LinearRow(Row.LOSS, None, held, problem.budget_bytes - problem.base_loss_bytes))
    grads = 0
    for here in reversed(range(len(options))):
        own = tuple(option.own_backward_bytes + others * option.held_bytes for option in options[here])
        grads += problem.units[here].grad_bytes
        limit = problem.budget_bytes - problem.base_backward_bytes - grads
        rows.append(LinearRow(Row.BACKWARD, here, (*kept[:here], own, *none[here + 1 :]), limit))
    if problem.prepared is None:
        limit = problem.budget_bytes - problem.base_forward_bytes
        for here in reversed(range(len(options))):
            own = tuple((1 + others) * option.held_bytes + option.forward_bytes for option in options[here])
            rows.append(LinearRow(Row.FORWARD, here, (*held[:here], own, *none[here + 1 :]), limit))
    return rows


def _binding_rows(rows: Sequence[LinearRow]) -> list[LinearRow]:
    """Rows that neither always hold nor follow from one that is kept."""
    kept: list[LinearRow] = []
    for row in rows:
        most = sum(max(choices) for choices in row.coefficients)
        # comparing with every kept row would be quadratic; the first few and the last one imply nearly all
        if most > row.limit_bytes and not any(_implies(other, row) for other in (*kept[:4], *kept[-1:])):
            kept.append(row)
    return kept


def _implies(strong: LinearRow, weak: LinearRow) -> bool:
    """Whether every choice that satisfies `strong` satisfies `weak`: the gap, at its widest, is not above 0."""
    if strong.row is Row.HOST:
        return False
    widest = strong.limit_bytes - weak.limit_bytes
    for weak_choices, strong_choices in zip(weak.coefficients, strong.coefficients):
        widest += max(w - s for w, s in zip(weak_choices, strong_choices))
    return widest <= 0


def _late_first_is_safe(problem: Problem, rows: Sequence[LinearRow], members: Sequence[Group]) -> bool:
    """Whether in every row more can be held by the later of two units of this class and less by the earlier."""
    if any(a.positions[-1] > b.positions[0] for a, b in pairwise(members)):
        return False
    options = members[0].options
    ranked = sorted(range(len(options)), key=lambda place: late_rank(options[place]))
    positions = [position for group in members for position in group.positions]
    for early, late in pairwise(positions):
        for low, less in enumerate(ranked):
            for more in ranked[low + 1 :]:
                if not all(_exchange_is_safe(problem, row, (early, late), (less, more)) for row in rows):
                    return False
    return True


def _exchange_is_safe(problem: Problem, row: LinearRow, units: tuple[int, int], places: tuple[int, int]) -> bool:
    """Whether `row` survives when early unit gives the larger option to the late one and takes its lesser."""
    (early, late), (less, more) = units, places
    at_early, at_late = row.coefficients[early], row.coefficients[late]
    if at_early[less] + at_late[more] <= at_early[more] + at_late[less]:
        return True
    if row.row is not Row.BACKWARD or row.position != early:
        return False
    # M3 at the late unit held before the exchange; it covers M3 at the early one after it if what was held from
    # early on outweighs the gradients that are already there
    between = range(early + 1, late)
    held = problem.options[early][more].backward_held_bytes
    held += sum(min(option.backward_held_bytes for option in problem.options[v]) for v in between)
    return held >= sum(problem.units[v].grad_bytes for v in range(early, late))
