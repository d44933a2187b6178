"""Random models of random layers: whatever its units share, view, edit or nest, gradients are the plain ones.

A layer is a random function (programs.py) of two tensors that exist so far, with one of two weights that layers share.
It runs as a unit, as a unit that holds another one, or plainly; its host may edit what it gave in place. Units of a
model are recovered in different ways at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hilore.core.errors import StateChanged
from ds_hilore.core.types import Action
from ds_hilore.recovery.unit import RecoveryContext
from tests.recovery.programs import SHAPE, Step, program, steps_of_programs
from tests.recovery.scenes import tensor
from tests.recovery.units import H, R, Run, Scene, Units, gradients, same

PLAIN, UNIT, NESTED = "plain", "unit", "unit with a unit inside"


@dataclass(frozen=True)
class Layer:
    """One layer. Places count tensors that exist so far, the model's two inputs first.

    Args:
        inner: steps of the unit inside, where it is nested.
        weight: which of the shared ones.
        edited: its last output is changed in place by the host.
    """

    kind: str
    steps: list[Step]
    inner: list[Step]
    outputs: list[int]
    first: int
    second: int
    weight: int
    edited: bool


LAYERS = st.builds(
    Layer,
    kind=st.sampled_from([UNIT, UNIT, NESTED, PLAIN]),
    steps=steps_of_programs(most=5),
    inner=steps_of_programs(most=3),
    outputs=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    first=st.integers(0, 6),
    second=st.integers(0, 6),
    weight=st.integers(0, 1),
    edited=st.sampled_from([False, False, False, True]),
)


class Mixed(Units):
    """Units that are recovered in different ways, in turn; every second stored one is dropped after forward."""

    ways: tuple[Action, ...] = ()

    def run(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        self.action = self.ways[len(self.calls) % len(self.ways)]
        return super().run(*args, **kwargs)  # type: ignore[arg-type]

    def drop(self) -> None:
        for call in self.calls[::2]:
            call.drop()


def model(layers: list[Layer], frozen: bool) -> Scene:
    """The scene of all layers; its loss reads the outputs of the last two."""

    def scene(run: Run, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        inputs = [tensor(device, seed, SHAPE) for seed in range(2)]
        weights = [
            nn.Parameter(0.2 * tensor(device, 2 + k, (64, 64)).detach(), requires_grad=not (frozen and k == 0))
            for k in range(2)
        ]
        pool = [value * 1 for value in inputs]
        for layer in layers:
            pool += _outputs(layer, run, pool, weights[layer.weight])
            if layer.edited:
                pool[-1].mul_(0.9)
        loss = sum((value.square().mean() for value in pool[-4:]), torch.zeros((), device=device))
        return loss, [*inputs, *weights]

    return scene


def _outputs(layer: Layer, run: Run, pool: list[Tensor], weight: Tensor) -> list[Tensor]:
    function = program(layer.steps, layer.outputs)

    def nested(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        (inside,) = run(program(layer.inner, [len(layer.inner) + 1]), x, y, w)
        return function(inside, y, w)

    given = pool[layer.first % len(pool)], pool[layer.second % len(pool)], weight
    if layer.kind == PLAIN:
        return list(function(*given))
    return list(run(nested if layer.kind == NESTED else function, *given))


@settings(max_examples=40, deadline=None)
@given(
    layers=st.lists(LAYERS, min_size=2, max_size=5),
    ways=st.lists(st.sampled_from([H, R]), min_size=1, max_size=3),
    frozen=st.booleans(),
)
def test_random_models_have_the_plain_gradients(layers: list[Layer], ways: list[Action], frozen: bool) -> None:
    assume(any(layer.kind != PLAIN for layer in layers))
    scene = model(layers, frozen)
    try:
        plain = gradients(scene, None)
    except RuntimeError:
        assume(False)  # plain autograd refuses an in-place edit of what it saved, or nothing has a gradient
    edited = any(layer.edited for layer in layers)
    context = RecoveryContext()
    for drop in (False, True, False):  # the last time with everything proven
        units = Mixed(context=context)
        units.ways = tuple(ways)
        try:
            found = gradients(scene, units, drop)
        except StateChanged:
            assert edited, "nothing was changed"  # an input that a replay needs, and autograd would not have needed
            continue
        assert same(plain, found)
