"""Short sketches of long tensors: what two of them say of the distance of their tensors, without holding either.

A sketch is a random projection S x to `WIDTH` numbers in float64, the same S for every tensor of that size. It is
linear, so |S x - S y| estimates |x - y|; equal tensors have equal sketches, to the last bit. Signs repeat after a prime
number of elements: no row length divides that, so sums over rows or columns that vanish by themselves (a softmax's)
hide nothing.

Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (count sketch, without the median).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

#: Numbers in a sketch. Estimates of a norm are right to 1/sqrt(2 * WIDTH), about 4 %.
WIDTH = 256
#: Elements after which signs repeat; a prime number.
_PERIOD = 65537
#: Elements that are widened at a time.
_CHUNK = _PERIOD * 8


class Sketcher:
    """Makes sketches. Draws nothing from torch's random streams."""

    def __init__(self) -> None:
        self._signs: Tensor | None = None

    def _signs_on(self, device: torch.device) -> Tensor:
        if self._signs is None or self._signs.device != device:
            coins = torch.randint(0, 2, (_PERIOD,), generator=torch.Generator().manual_seed(1))
            self._signs = (2 * coins - 1).to(device=device, dtype=torch.float64)
        return self._signs

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """[WIDTH] float64, on the tensor's device. Nothing is waited for.

        Args:
            tensor: of any shape, layout and floating-point dtype.
        """
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        flat = dense.detach().reshape(-1)
        folded = torch.zeros(min(flat.numel(), _PERIOD), dtype=torch.float64, device=flat.device)
        for chunk in flat.split(_CHUNK):
            whole = chunk.numel() // _PERIOD * _PERIOD
            if whole:
                folded += chunk[:whole].view(-1, _PERIOD).sum(0, dtype=torch.float64)
            folded[: chunk.numel() - whole] += chunk[whole:]
        folded *= self._signs_on(flat.device)[: folded.numel()]
        return nn.functional.pad(folded, (0, -folded.numel() % WIDTH)).view(-1, WIDTH).sum(0)


class Sketches:
    """Sketches of tensors by name. What comes in under the same name adds up."""

    def __init__(self, sketcher: Sketcher) -> None:
        self._sketcher = sketcher
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        sketch = self._sketcher.of(tensor)
        square = sketch.square().sum()
        if name in self._sums:
            sketch, square = self._sums[name] + sketch, self._squares[name] + square
        self._sums[name], self._squares[name] = sketch, square

    def norms(self) -> dict[str, float]:
        """Root of the sum of squared norms of what came in under each name: of the sum, if nothing in it cancels."""
        return _roots(self._squares)

    def distances(self, other: Sketches) -> dict[str, float]:
        """By every name of either, how far the sums are apart; infinite where a sketch is not finite. What never came
        in is zero."""
        nothing = torch.zeros(())
        squares = {}
        for name in self._sums.keys() | other._sums.keys():
            mine, others = self._sums.get(name), other._sums.get(name)
            one = nothing if mine is None else mine
            squares[name] = (one - (nothing if others is None else others)).square().sum()
        return _roots(squares)


def _roots(squares: Mapping[str, Tensor]) -> dict[str, float]:
    """Brought to the host in one copy."""
    if not squares:
        return {}
    found = torch.stack([square.double() for square in squares.values()]).tolist()
    return {
        name: math.sqrt(square) if math.isfinite(square) else math.inf
        for name, square in zip(squares, found, strict=True)
    }


class GradientTap:
    """Shows the gradients that reach parameters, one after another, in the backward passes between `open` and `close`.

    Args:
        parameters: by name.
        note: is shown each gradient, whole, and keeps no reference to it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], note: Callable[[str, Tensor], None]) -> None:
        self._parameters = parameters
        self._note = note
        self._handles: list[RemovableHandle] = []
        self._nodes: list[object] = []  # nobody else may hold them before the first backward

    def open_for_engine(self) -> None:
        """Of passes that accumulate into `.grad`: before the host's own hooks, and left as they are.

        The hook sits on the accumulating node: one on the tensor would be called by the inner passes of a pruned unit,
        too.
        """
        for name, parameter in self._parameters.items():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._shown(name)))

    def open_for_grad(self) -> None:
        """Of `torch.autograd.grad`, which gets zeros without storage in their place: a whole gradient is never held."""
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_hook(self._taken(name)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _shown(self, name: str) -> Callable[[tuple[Tensor | None, ...]], None]:
        def show(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                self._note(name, gradients[0].detach())

        return show

    def _taken(self, name: str) -> Callable[[Tensor], Tensor]:
        def take(gradient: Tensor) -> Tensor:
            self._note(name, gradient.detach())
            dense = gradient.layout is torch.strided
            return gradient.new_zeros(()).expand(gradient.shape) if dense else gradient

        return take
