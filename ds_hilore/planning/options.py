"""A unit's variants as the rows of one problem see them: which are still possible, and what each row charges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import LATTICE, Action, Place, UnitProfile, Variant

#: Name of the reference variant that every unit has.
REPLAY = "R"


class Option(NamedTuple):
    """What a variant costs in each row and pays in the objective. Bytes are on the device but for `host_bytes`.

    Args:
        seconds: saved against R, encoding charged where it is still to be done.
        risk_cost: what the unit adds to the left side of the risk row (r^2, or r in paper mode).
        held_bytes, forward_bytes: for the forward, loss and conversion rows.
        backward_held_bytes: held while the backward of later units runs.
        own_backward_bytes: held plus workspace while the unit's own backward runs.
        converting_bytes: held while prepared state is being converted.
        converts: whether choosing it encodes state that was stored.
    """

    name: str
    action: Action
    seconds: float
    risk_cost: float
    held_bytes: int
    forward_bytes: int
    backward_held_bytes: int
    own_backward_bytes: int
    converting_bytes: int
    host_bytes: int
    converts: bool


def options_of(
    unit: UnitProfile,
    prepared_name: str | None,
    allowed: tuple[str, ...] | None,
    exposure: float,
    linear_risk: bool,
) -> tuple[Option, ...]:
    """Gives what `unit` may become, in the order of its variants.

    Args:
        prepared_name: the variant prepared in forward, or None before forward.
        allowed: names that the unit may have, or None for all. Of those, the prepared variant may stay what it is or
            become one of a lower kind of the lattice, or be replayed.
        exposure: E_u.

    Raises:
        UsageError: a name is unknown, or nothing is left to choose.
    """
    prepared = None
    if allowed is not None or prepared_name is not None:
        prepared = _named(unit, allowed, prepared_name)
    variants: Sequence[Variant] = unit.variants
    if allowed is not None:
        variants = [variant for variant in variants if variant.name in allowed]
    if prepared is not None:
        below = LATTICE[prepared.action]
        variants = [v for v in variants if v is prepared or v.name == REPLAY or _reachable(v, prepared, below)]
    if not variants:
        raise UsageError(f"unit {unit.unit} has no variant left: prepared {prepared_name}, allowed {allowed}")
    return tuple([_option(unit, variant, prepared, exposure, linear_risk) for variant in variants])


def _named(unit: UnitProfile, allowed: tuple[str, ...] | None, prepared_name: str | None) -> Variant | None:
    """The prepared variant, after a look at all names."""
    known = {variant.name: variant for variant in unit.variants}
    unknown = {*(allowed or ()), prepared_name or REPLAY} - set(known)
    if unknown:
        raise UsageError(f"unit {unit.unit} has no variants {sorted(unknown)}; known: {sorted(known)}")
    return None if prepared_name is None else known[prepared_name]


def reweighted(
    unit: UnitProfile, options: tuple[Option, ...], exposure: float, linear_risk: bool
) -> tuple[Option, ...]:
    """The same options under another exposure of the unit: only risk depends on it."""
    risky = {variant.name: variant for variant in unit.variants if variant.risk}
    if not risky:
        return options
    # _replace takes twice as long, and this runs for every unit between loss and backward
    return tuple(
        [
            Option._make((*option[:3], risk_cost(risky[option.name], exposure, linear_risk), *option[4:]))
            if option.name in risky
            else option
            for option in options
        ]
    )


def risk_cost(variant: Variant, exposure: float, linear_risk: bool) -> float:
    """What `variant` adds to the left side of the risk row at unit exposure `exposure`: r^2, or r in paper mode."""
    # inf * 0 is not a number, and an exact variant is exact at any exposure
    risk = variant.risk * exposure if variant.risk else 0.0
    return risk if linear_risk else risk * risk


def validate_unit(unit: UnitProfile) -> None:
    """Refuses a profile that no plan can be made from.

    Raises:
        UsageError: names the unit, the variant and the number.
    """
    names = [variant.name for variant in unit.variants]
    if len(set(names)) < len(names):
        raise UsageError(f"unit {unit.unit} has two variants of one name: {names}")
    if REPLAY not in names:
        raise UsageError(f"unit {unit.unit} has no variant {REPLAY!r}; it is the reference of all others")
    for v in unit.variants:
        if min(v.held_bytes, v.workspace_bytes, v.forward_bytes, unit.grad_bytes) < 0:
            raise UsageError(f"unit {unit.unit}, variant {v.name}: bytes must be >= 0")
        if not (math.isfinite(v.saved_seconds) and math.isfinite(v.prepare_seconds) and 0 <= v.risk < math.inf):
            raise UsageError(f"unit {unit.unit}, variant {v.name}: seconds must be finite, risk finite and >= 0")
        if v.risk and v.action is not Action.COMPRESS:
            raise UsageError(f"unit {unit.unit}, variant {v.name}: {v.action.value} is exact, so its risk must be 0")


def _reachable(variant: Variant, prepared: Variant, below: Sequence[Action]) -> bool:
    """Compressing what was stored on the device. Outputs of operators that were not kept for a replay cannot be had any
    more, nor is what was sent to host memory fetched for it."""
    if prepared.place is Place.HOST:
        return False
    return variant.action is Action.COMPRESS and variant.action in below and prepared.action is not variant.action


def _option(
    unit: UnitProfile, variant: Variant, prepared: Variant | None, exposure: float, linear_risk: bool
) -> Option:
    held = device_bytes(variant)
    backward_held, own = held, held + variant.workspace_bytes
    charged = prepared is None or prepared.name != variant.name
    converts = prepared is not None and charged and variant.action is Action.COMPRESS
    if prepared is None and variant.action is Action.COMPRESS:
        # risk may force it to be replayed once the true coefficients are known: M3 of problem.py
        replay = unit.variant(REPLAY)
        backward_held = max(held, device_bytes(replay))
        own = max(own, device_bytes(replay) + replay.workspace_bytes)
    return Option(
        name=variant.name,
        action=variant.action,
        seconds=variant.saved_seconds - (variant.prepare_seconds if charged else 0.0),
        risk_cost=risk_cost(variant, exposure, linear_risk),
        held_bytes=held,
        forward_bytes=variant.forward_bytes,
        backward_held_bytes=backward_held,
        own_backward_bytes=own,
        converting_bytes=device_bytes(prepared) if converts and prepared is not None else held,
        host_bytes=variant.held_bytes if variant.place is Place.HOST else 0,
        converts=converts,
    )


def device_bytes(variant: Variant) -> int:
    """Held bytes of `variant` that lie on the device."""
    return variant.held_bytes if variant.place is Place.DEVICE else 0
