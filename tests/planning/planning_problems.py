"""Problems for the planner's tests: hand-made units, decoder-like stacks, and random ones of every kind."""

from __future__ import annotations

import random
from dataclasses import replace

from ds_hilore.core.types import Action, Place, UnitId, UnitProfile, Variant
from ds_hilore.planning.problem import Problem, evaluate

MIB = 1 << 20


def unit_id(position: int) -> UnitId:
    return UnitId(f"layers.{position}")


def unit(position: int, *variants: Variant, grad_bytes: int = 0, unit_class: str = "layer") -> UnitProfile:
    return UnitProfile(unit_id(position), unit_class, variants, grad_bytes)


def stored(held: int, seconds: float, workspace: int = 0, name: str = "H", place: Place = Place.DEVICE) -> Variant:
    return Variant(name, Action.STORE, held, workspace, saved_seconds=seconds, place=place)


def replayed(held: int, workspace: int = 0) -> Variant:
    return Variant("R", Action.RECOMPUTE, held, workspace)


def letters(problem: Problem, plan_choice: dict[UnitId, str]) -> str:
    """The plan as one letter a unit, in forward order."""
    return "".join(plan_choice[profile.unit][0] for profile in problem.units)


def all_of(problem: Problem, name: str) -> dict[UnitId, str]:
    return {profile.unit: name for profile in problem.units}


def decoder(
    units: int,
    variants: int = 2,
    share: float = 0.4,
    noise: float = 0.0,
    risk_budget: float = 0.0,
    seed: int = 0,
) -> Problem:
    """A stack of decoder-like units under a budget that has `share` of what storing all of them needs.

    `variants` counts H, R and the COMPRESS ones; `noise` is the relative spread between units.
    """
    rng = random.Random(seed)

    def spread() -> float:
        return 1.0 + noise * rng.uniform(-1, 1)

    profiles = []
    for position in range(units):
        made = [stored(int(500 * MIB * spread()), 0.010 * spread(), 50 * MIB)]
        for level in range(variants - 2):
            size = 300 * MIB / (1 + 0.5 * level)
            made.append(
                Variant(
                    f"L{level}",
                    Action.COMPRESS,
                    held_bytes=int(size * spread()),
                    workspace_bytes=300 * MIB,
                    saved_seconds=0.009 * spread() - 0.0005 * level,
                    prepare_seconds=0.0005,
                    risk=0.003 * (1 + 2 * level) * spread(),
                )
            )
        made.append(replayed(50 * MIB, 520 * MIB))
        profiles.append(unit(position, *made, grad_bytes=4 * MIB))
    base = 20_000 * MIB
    problem = Problem(
        units=tuple(profiles),
        budget_bytes=1 << 50,
        base_forward_bytes=base,
        base_loss_bytes=base + 200 * MIB,
        base_backward_bytes=base,
        conversion_bytes=10 * MIB,
        risk_budget=risk_budget,
    )
    return with_budget(problem, share)


def with_budget(problem: Problem, share: float) -> Problem:
    """The problem with a budget between the peaks of all-R (0) and all-H (1)."""
    low = evaluate(problem, all_of(problem, "R")).peak_bytes
    high = evaluate(problem, all_of(problem, "H")).peak_bytes
    return replace(problem, budget_bytes=int(low + share * (high - low)))


def random_problem(seed: int, max_units: int = 8, max_choices: int = 1500) -> Problem:
    """A small problem of any kind: stage, place, lattice, risk in squares or linear, equal and unequal units."""
    rng = random.Random(seed)
    count = rng.randint(1, max_units)
    templates = [_random_variants(rng) for _ in range(rng.choice((1, 2, count)))]
    kinds = [rng.randrange(len(templates)) for _ in range(count)]
    while _choices(templates, kinds) > max_choices:
        kinds.pop()
    grads = rng.choice((0, 0, rng.randint(0, 40)))
    units = tuple(
        unit(position, *templates[kind], grad_bytes=grads, unit_class=f"class{kind}")
        for position, kind in enumerate(kinds)
    )
    base = rng.randint(0, 100)
    problem = Problem(
        units=units,
        budget_bytes=0,
        base_forward_bytes=base + rng.choice((0, 20)),
        base_loss_bytes=base + rng.choice((0, 10, 60)),
        base_backward_bytes=base,
        conversion_bytes=rng.randint(0, 20),
        host_budget_bytes=rng.choice((0, 60, 200)),
        risk_budget=rng.choice((0.0, 0.01, 0.03, 1.0)),
        in_flight=1 if seed % 3 else rng.choice((2, 4)),
        linear_risk=rng.random() < 0.3,
        exposures={units[0].unit: rng.choice((0.0, 0.5, 3.0, float("inf")))} if rng.random() < 0.3 else {},
    )
    if rng.random() < 0.4:
        problem = problem.after_forward(
            {profile.unit: rng.choice([v.name for v in profile.variants]) for profile in units}
        )
    elif rng.random() < 0.2:
        problem = replace(problem, allowed={units[-1].unit: (rng.choice(units[-1].variants).name,)})
    peaks = [
        evaluate(problem, {p.unit: pick(options).name for p, options in zip(problem.units, problem.options)}).peak_bytes
        for pick in (lambda o: min(o, key=lambda x: x.held_bytes), lambda o: max(o, key=lambda x: x.held_bytes))
    ]
    low, high = min(peaks), max(peaks)
    return replace(problem, budget_bytes=int(low + rng.choice((-0.05, 0.0, 0.2, 0.4, 0.6, 1.0)) * (high - low)))


def _choices(templates: list[tuple[Variant, ...]], kinds: list[int]) -> int:
    total = 1
    for kind in kinds:
        total *= len(templates[kind])
    return total


def _random_variants(rng: random.Random) -> tuple[Variant, ...]:
    inputs, replay = rng.randint(0, 20), rng.randint(0, 120)
    variants = [
        replayed(inputs, replay),
        stored(inputs + rng.randint(0, 100), rng.uniform(-0.1, 1), rng.randint(0, 50)),
    ]
    for level in range(rng.choice((0, 0, 1, 1, 2))):
        variants.append(
            Variant(
                f"L{level}",
                Action.COMPRESS,
                held_bytes=inputs + rng.randint(0, 60),
                workspace_bytes=rng.randint(0, 120),
                forward_bytes=rng.choice((0, rng.randint(0, 40))),
                saved_seconds=rng.uniform(0, 1),
                prepare_seconds=rng.choice((0.0, rng.uniform(0, 0.3))),
                risk=rng.uniform(0, 0.02),
            )
        )
    if rng.random() < 0.2:
        variants.append(stored(rng.randint(0, 100), rng.uniform(0, 1), rng.randint(0, 80), "O", Place.HOST))
    rng.shuffle(variants)
    return tuple(variants)
