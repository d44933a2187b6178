"""Facts that travel between levels: actions, units, variants, plans.

Bytes are integers, seconds are floats, risk is a share of the whole update's gradient norm (design section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Action(Enum):
    """How the saved state of a recovery unit reaches backward (design section 2)."""

    STORE = "store"  # H: kept as it is, or derivable from what is kept; exact
    COMPRESS = "compress"  # L: held by a codec; small gradient error
    RECOMPUTE = "recompute"  # R: only the unit's inputs are kept, the unit is replayed; exact

    @property
    def letter(self) -> str:
        return {Action.STORE: "H", Action.COMPRESS: "L", Action.RECOMPUTE: "R"}[self]


#: What a representation prepared in forward can still become after it. What was dropped cannot come back.
LATTICE: Mapping[Action, tuple[Action, ...]] = {
    Action.STORE: (Action.STORE, Action.COMPRESS, Action.RECOMPUTE),
    Action.COMPRESS: (Action.COMPRESS, Action.RECOMPUTE),
    Action.RECOMPUTE: (Action.RECOMPUTE,),
}


class Place(Enum):
    """Where held bytes live."""

    DEVICE = "device"
    HOST = "host"  # offload, charged to the node's host budget


@dataclass(frozen=True, order=True)
class UnitId:
    """One call of one recovery unit within a microbatch: module path (or function name) and ordinal of the call."""

    name: str
    call: int = 0

    def __str__(self) -> str:
        return self.name if self.call == 0 else f"{self.name}#{self.call}"


@dataclass(frozen=True, order=True)
class Shape:
    """Size of what a unit works on: segments (sequences) and the positions in each, padding included."""

    segments: int
    length: int

    @property
    def tokens(self) -> int:
        return self.segments * self.length

    def __str__(self) -> str:
        return f"{self.segments} x {self.length}"


@dataclass(frozen=True)
class Variant:
    """What a plan may choose for a unit. H, L and R are the kinds; a kind may have several variants.

    Every unit has a variant named "R" whose `saved_seconds` and `risk` are 0: the reference of all others.

    Args:
        name: unique within its unit, for example "H", "R", "L:mlp=int8".
        held_bytes: bytes kept on `place` from the end of the unit's forward to its backward, unit inputs included.
        workspace_bytes: extra device bytes while the unit's backward runs: replayed or decoded state and transients.
        forward_bytes: extra device bytes while the unit runs and encodes in forward.
        saved_seconds: seconds of backward that this variant saves against R of the same unit; may be negative.
        prepare_seconds: seconds that preparing it costs in forward (encoding, copies). Sunk after forward.
        risk: r_u at unit exposure E = 1, as a share of the update's gradient norm; 0 for exact variants.
        codecs: (state group, codec name) pairs of an L variant.
    """

    name: str
    action: Action
    held_bytes: int
    workspace_bytes: int = 0
    forward_bytes: int = 0
    saved_seconds: float = 0.0
    prepare_seconds: float = 0.0
    risk: float = 0.0
    place: Place = Place.DEVICE
    codecs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class UnitProfile:
    """A unit as the planner sees it: its class (equal classes have equal variants), gradient bytes, variants.

    `grad_bytes`: device bytes of parameter gradients that appear when this unit's backward has run and stay until
    they are reduced.
    """

    unit: UnitId
    unit_class: str
    variants: tuple[Variant, ...]
    grad_bytes: int = 0

    def variant(self, name: str) -> Variant:
        for candidate in self.variants:
            if candidate.name == name:
                return candidate
        raise KeyError(f"unit {self.unit} has no variant {name!r}; known: {[v.name for v in self.variants]}")


class Solver(Enum):
    """Who made a plan."""

    FIXED = "fixed"  # all-R, all-H, or handed in by the user or a test
    GREEDY = "greedy"
    HIGHS = "highs"
    CBC = "cbc"
    BRUTE_FORCE = "brute_force"
    DYNAMIC = "dynamic"  # dynamic programme over intervals of memory and risk (`paper` mode)


@dataclass(frozen=True)
class Plan:
    """One variant name per unit, on one rank, for one shape class, with what it promises.

    `choice` is keyed by unit; a unit that is not in it is R (a unit that appeared after planning must be exact and
    cost no memory). `bound_seconds` is a proven upper limit of `saved_seconds` over all feasible plans, or None.
    """

    choice: Mapping[UnitId, str] = field(default_factory=dict)
    actions: Mapping[UnitId, Action] = field(default_factory=dict)
    saved_seconds: float = 0.0
    peak_bytes: int = 0
    risk: float = 0.0
    solver: Solver = Solver.FIXED
    bound_seconds: float | None = None

    def action_of(self, unit: UnitId) -> Action:
        return self.actions.get(unit, Action.RECOMPUTE)

    def count(self, action: Action) -> int:
        return sum(1 for a in self.actions.values() if a is action)
