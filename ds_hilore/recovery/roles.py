"""What the arguments of a unit mean, so that rows and positions can be cut out of them.

Which argument has which role is declared by the host (integration/roles.py). An argument that nobody declared, or one
whose shape does not fit its role, turns pruning off for the call: a wrong cut would be a wrong gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.live import Cut


class Role(Enum):
    """How an argument's tensors (its leaves, where it is a tuple) are laid out. B rows, T positions."""

    HIDDEN = "hidden"  # [B, T, H]: what the unit works on; the only argument that may carry a gradient
    MASK = "mask"  # attention mask: [B or 1, heads or 1, T, T], or [B, T]
    POSITIONS = "positions"  # [B or 1, T, ...]: position ids, rotary tables
    INDEX = "index"  # [T]: positions without rows
    STARTS = "starts"  # [n + 1]: where segments begin in all rows laid end to end (cu_seqlens), and where the last ends
    LIMIT = "limit"  # a number, or a tensor [] of one: no segment is longer
    SETTING = "setting"  # no tensor: flags, absent caches


class Reason(Enum):
    """Why a unit is not pruned."""

    UNDECLARED = "the host declares no roles for its arguments"
    ARGUMENT = "an argument has no declared role"
    LAYOUT = "an argument does not have the layout of its role"
    INPUT_GRADIENT = "an argument besides the hidden states carries a gradient"
    OUTPUTS = "it gives more than hidden states"
    ROUTER = "it routes tokens to experts, whose router may be part of the loss"
    RANDOM = "it draws random numbers (dropout)"
    ESCAPES = "something outside keeps a tensor from within it"
    MIXES = "its rows do not stand for themselves"


@dataclass(frozen=True)
class PruneRefusal:
    """A reason, and what exactly was found."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class UnitRoles:
    """Roles of a unit's arguments by name."""

    arguments: Mapping[str, Role]


@dataclass(frozen=True)
class Assignment:
    """The role of every tensor among the leaves of one call's arguments (by leaf), and its rows and positions."""

    roles: Mapping[int, Role]
    hidden: int
    rows: int
    length: int
    mask: int | None = None  # leaf of the attention mask [.., .., T, T]
    starts: int | None = None  # leaf of the starts of segments

    @property
    def layout(self) -> tuple[bool, bool, bool]:
        """What proofs are made for: whether there is a mask of queries and keys, whether any other mask, and whether
        starts of segments."""
        others = self.mask is None and Role.MASK in self.roles.values()
        return self.mask is not None, others, self.starts is not None

    @property
    def aligned(self) -> bool:
        """Whether all rows must begin at the same position: an index without rows tells only one."""
        return Role.INDEX in self.roles.values()

    def tensor_index(self, inputs: UnitInputs) -> int:
        """Place of the hidden states among the argument tensors."""
        return sum(1 for leaf in range(self.hidden) if inputs.tensor_at(leaf) is not None)

    def cut(self, leaf: int, tensor: Tensor, cut: Cut) -> Tensor:
        """The part of one argument tensor that belongs to a group."""
        role = self.roles[leaf]
        if role is Role.LIMIT:
            return tensor
        if role is Role.STARTS:
            return cut.pick_starts(tensor)
        if role is Role.INDEX:
            return cut.pick_index(tensor)
        if role is Role.MASK and tensor.dim() == 4:
            return cut.pick_mask(tensor)
        return cut.pick(tensor)


def assign(inputs: UnitInputs, roles: UnitRoles) -> Assignment | PruneRefusal:
    """Finds the role of every argument tensor of one call, and checks that it is laid out accordingly."""
    found: dict[int, Role] = {}
    for leaf, name in enumerate(leaf_names(inputs)):
        role = roles.arguments.get(name)
        value = inputs.leaves[leaf]
        tensor = inputs.tensor_at(leaf)
        if tensor is None:
            if isinstance(value, Tensor) or (role is None and not _is_setting(value)):
                return PruneRefusal(Reason.ARGUMENT, f"{name}: {type(value).__name__}")
        elif role is None or role is Role.SETTING:
            return PruneRefusal(Reason.ARGUMENT, f"{name}: a tensor of shape {tuple(tensor.shape)}")
        else:
            found[leaf] = role
    hidden = [leaf for leaf, role in found.items() if role is Role.HIDDEN]
    if len(hidden) != 1:
        return PruneRefusal(Reason.LAYOUT, f"{len(hidden)} tensors of hidden states")
    return _checked(inputs, found, hidden[0])


def leaf_names(inputs: UnitInputs) -> list[str]:
    """For each leaf, the name of the argument that it belongs to."""
    args, kwargs = tree_unflatten(list(range(len(inputs.leaves))), inputs.spec)
    names = [""] * len(inputs.leaves)
    for name, value in [*zip(_positional(inputs.function), args), *kwargs.items()]:
        for leaf in tree_leaves(value):
            names[leaf] = name
    return names


def _checked(inputs: UnitInputs, roles: Mapping[int, Role], hidden: int) -> Assignment | PruneRefusal:
    states = inputs.tensor_at(hidden)
    assert states is not None
    if states.dim() != 3 or not states.is_floating_point():
        return PruneRefusal(Reason.LAYOUT, f"hidden states of shape {tuple(states.shape)}")
    rows, length = states.shape[:2]
    mask = starts = None
    for leaf, role in roles.items():
        tensor = inputs.tensor_at(leaf)
        assert tensor is not None
        if not _fits(tensor.shape, role, rows, length):
            return PruneRefusal(Reason.LAYOUT, f"{role.value} of shape {tuple(tensor.shape)}")
        if leaf != hidden and inputs.requires_grad_at(leaf):
            return PruneRefusal(Reason.INPUT_GRADIENT, f"{role.value} of shape {tuple(tensor.shape)}")
        if role is Role.MASK and tensor.dim() == 4:
            if mask is not None:
                return PruneRefusal(Reason.LAYOUT, "two attention masks")
            mask = leaf
        if role is Role.STARTS:
            if starts is not None and _shape_at(inputs, starts) != tensor.shape:
                return PruneRefusal(Reason.LAYOUT, "two divisions into segments")  # queries and keys have the same
            starts = leaf
    return Assignment(roles, hidden, rows, length, mask, starts)


def _shape_at(inputs: UnitInputs, leaf: int) -> torch.Size | None:
    tensor = inputs.tensor_at(leaf)
    return None if tensor is None else tensor.shape


def _fits(shape: torch.Size, role: Role, rows: int, length: int) -> bool:
    if role is Role.INDEX:
        return tuple(shape) == (length,)
    if role is Role.STARTS:
        return len(shape) == 1 and shape[0] > 1
    if role is Role.LIMIT:
        return not shape
    if role is Role.MASK and len(shape) == 4:
        return shape[0] in (1, rows) and tuple(shape[2:]) == (length, length)
    if role is Role.MASK:
        return tuple(shape) == (rows, length)
    return len(shape) >= 2 and shape[0] in (1, rows) and shape[1] == length


def _positional(function: Callable[..., Any]) -> Iterator[str]:
    """Names for positional arguments, without end: what `*args` takes is named after it."""
    last = ""
    for name, parameter in inspect.signature(function).parameters.items():
        last = name
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        yield name
    while True:
        yield f"*{last}"


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.nn.Module)
