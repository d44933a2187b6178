"""What a unit was called with, kept so that it can be called again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ds_hilore.core.types import Shape
from ds_hilore.recovery.bundle import HeldTensor, Kept, parameter_of


@dataclass
class UnitInputs:
    """Function and arguments of one call, partial objects undone: transformers hands tensors over inside `partial`.

    `leaves` are the flattened arguments; tensors stand as `_Held` (parameters, and anything that is no tensor, as
    themselves). `tensors` are the originals in the same order; they are dropped when the forward has ended.
    `lent` are parameters of which a view was handed in (a class token, latent queries): that view is an input like any
    other, in forward and in replay, and no parameter of the unit.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    tensors: list[Tensor]
    lent: tuple[Parameter, ...] = ()

    @classmethod
    def capture(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitInputs:
        while isinstance(function, functools.partial):
            args = function.args + args
            kwargs = {**function.keywords, **kwargs}
            function = function.func
        leaves, spec = tree_flatten((args, kwargs))
        tensors: list[Tensor] = []
        lent: tuple[Parameter, ...] = ()
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Parameter):
                tensors.append(leaf)
                leaves[position] = _Held(leaf)
                parameter = parameter_of(leaf)
                if parameter is not None:
                    lent = (*lent, parameter)
        return cls(function, leaves, spec, tensors, lent)

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """The parameter that a saved tensor is, or is a view of; None for views that came in as inputs."""
        parameter = parameter_of(tensor)
        if self.lent and parameter is not tensor and any(parameter is other for other in self.lent):
            return None
        return parameter

    @property
    def device(self) -> torch.device:
        """Where the unit computes: of its inputs, the first that is not on the CPU (masks and positions may be)."""
        for tensor in self.tensors:
            if tensor.device.type != "cpu":
                return tensor.device
        module = self.module
        weight = None if module is None else next(module.parameters(), None)
        return torch.device("cpu") if weight is None else weight.device

    @property
    def module(self) -> Module | None:
        """The module whose forward is called, where that can be told."""
        if isinstance(self.function, Module):
            return self.function
        owner = getattr(self.function, "__self__", None)
        if isinstance(owner, Module):
            return owner
        first = self.leaves[0] if self.leaves else None
        return first if isinstance(first, Module) else None

    @property
    def shape(self) -> Shape:
        """Rows x length of the unit's first floating-point input, whose last dimension is its width; 0 x 0 where it
        has none. Rows of a two-dimensional input are the positions of one segment; a function that says `length_first`
        takes [length, rows, width]."""
        hidden = self._hidden
        if hidden is None:
            return Shape(0, 0)
        size = hidden.kept.tensor.shape
        if getattr(self.function, "length_first", False) and len(size) == 3:
            return Shape(size[1], size[0])
        return Shape(size[:-2].numel(), size[-2])

    @functools.cached_property
    def _hidden(self) -> _Held | None:
        for leaf in self.leaves:
            if isinstance(leaf, _Held) and leaf.kept.tensor.is_floating_point() and leaf.kept.tensor.dim() >= 2:
                return leaf
        return None

    def hidden(self) -> Kept | None:
        """What is kept of the unit's first floating-point input, where it has one and that is still as it came."""
        hidden = self._hidden
        return hidden.kept if hidden is not None and isinstance(hidden.kept, Kept) else None

    def substitute(self, kept: Kept, other: HeldTensor) -> None:
        """Holds the input that `kept` is in another way from now on."""
        for leaf in self.leaves:
            if isinstance(leaf, _Held) and leaf.kept is kept:
                leaf.kept = other

    @property
    def tokens(self) -> int:
        """Positions that the unit works on."""
        return self.shape.tokens

    def held(self) -> list[Tensor]:
        """The tensors that are kept for a replay, as detached aliases; of what was sent to host memory, the buffers."""
        return [tensor for leaf in self.leaves if isinstance(leaf, _Held) for tensor in leaf.kept.held()]

    def tensor_at(self, leaf: int) -> Tensor | None:
        """The tensor that is kept for an argument leaf, as a detached alias; None for everything else."""
        held = self.leaves[leaf]
        return held.kept.tensor if isinstance(held, _Held) else None

    def requires_grad_at(self, leaf: int) -> bool:
        """Whether the argument leaf is a tensor that is kept and carried a gradient in forward."""
        held = self.leaves[leaf]
        return isinstance(held, _Held) and held.requires_grad

    def fresh(
        self, cut: Callable[[int, Tensor], Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Arguments for a replay, as new leaves of the graph, and the tensors among them.

        Args:
            cut: gives the part of an argument leaf's tensor that the replay is to work on. Default: all of it.

        Raises:
            StateChanged: an input was changed in place since the forward pass.
        """
        tensors: list[Tensor] = []
        leaves: list[Any] = []
        for position, leaf in enumerate(self.leaves):
            if isinstance(leaf, _Held):
                tensor = leaf.kept.get()
                if cut is not None:
                    tensor = cut(position, tensor)
                tensor = tensor.detach().requires_grad_(leaf.requires_grad)
                tensors.append(tensor)
                leaves.append(tensor)
            else:
                leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs, tensors


class _Held:
    __slots__ = ("kept", "requires_grad")

    def __init__(self, tensor: Tensor) -> None:
        self.kept: HeldTensor = Kept(tensor, 0)
        self.requires_grad = tensor.requires_grad
