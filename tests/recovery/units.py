"""Runs functions as recovery units, without model or engine, in each way in which a unit's state can be recovered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, Treatment
from ds_hilore.core.types import Action, UnitId
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.unit import RecoveryContext, UnitCall, inside_unit

H, R = Action.STORE, Action.RECOMPUTE
#: (name, what is done in forward, dropped after forward)
WAYS: tuple[tuple[str, Action | Treatment, bool], ...] = (
    ("stored", H, False),
    ("replayed", R, False),
    ("stored, then dropped", H, True),
    ("offloaded", OFFLOADED, False),
    ("replayed from offloaded inputs", INPUT_OFFLOADED, False),
    ("offloaded, then dropped", OFFLOADED, True),
)
#: Calls a function with its arguments: plainly, or as a unit.
Run = Callable[..., Any]
#: Builds everything from fixed seeds, calls `run` for what is a unit, gives the loss and the leaves to differentiate.
Scene = Callable[[Run, torch.device], tuple[Tensor, Sequence[Tensor]]]
CPU = torch.device("cpu")


@dataclass
class Units:
    """Calls of units that share one context. `run` is what a host's checkpoint function is."""

    action: Action | Treatment = R
    context: RecoveryContext = field(default_factory=RecoveryContext)
    calls: list[UnitCall] = field(default_factory=list)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside_unit():
            return function(*args, **kwargs)
        call = UnitCall(
            self.context,
            UnitId(f"unit.{len(self.calls)}"),
            "Unit",
            Treatment(self.action) if isinstance(self.action, Action) else self.action,
            UnitInputs.capture(function, args, kwargs),
        )
        self.calls.append(call)
        return call.run(function, args, kwargs)

    def drop(self) -> None:
        for call in self.calls:
            call.drop()


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients(scene: Scene, units: Units | None, drop: bool = False, device: torch.device = CPU) -> list[Tensor | None]:
    """Gradients of the scene's leaves after one backward; `units=None` is the plain function."""
    torch.manual_seed(5)
    loss, leaves = scene(plainly if units is None else units.run, device)
    if units is not None:
        if drop:
            units.drop()
        units.calls.clear()  # as in a run: only the graph holds them
    loss.backward()
    return [leaf.grad for leaf in leaves]


def same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    """Bit for bit, missing gradients included."""
    return len(left) == len(right) and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(left, right, strict=True)
    )


def assert_exact(scene: Scene, device: torch.device = CPU) -> None:
    """Every way gives the plain gradients, with a fresh context and with one that has proven everything before."""
    plain = gradients(scene, None, device=device)
    assert any(gradient is not None for gradient in plain)
    assert same(plain, gradients(scene, None, device=device)), "the scene itself is not deterministic"
    for name, action, drop in WAYS:
        context = RecoveryContext()
        for again in (False, True):
            found = gradients(scene, Units(action, context), drop, device)
            assert same(plain, found), (name, "again" if again else "first")
