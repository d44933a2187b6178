"""Parts of a unit's call, run alone: what pruned replays compute, and the proof that parts stand for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.live import Borders, Cut, Extent, LiveSet, Segment
from ds_hilore.recovery.roles import Assignment
from ds_hilore.recovery.surroundings import Surroundings


@dataclass(frozen=True)
class UnitPart:
    """Runs a unit on parts of what it was called with."""

    inputs: UnitInputs
    surroundings: Surroundings
    assignment: Assignment

    def run(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """Output [k, L, H] of one group with a graph, and the hidden states [k, L, H] that it came from."""
        args, kwargs, tensors = self.inputs.fresh(lambda leaf, tensor: self.assignment.cut(leaf, tensor, cut))
        hidden = tensors[self.assignment.tensor_index(self.inputs)]
        with self.surroundings.restored(), torch.enable_grad():
            result = self.inputs.function(*args, **kwargs)
        output = only_output(result, hidden)
        assert output is not None, "the forward pass gave hidden states only"
        return output, hidden

    def reproduces(self, output: Tensor, borders: Borders, real: Borders, extent: Extent = Extent.SEGMENTS) -> bool:
        """Whether parts of all rows, run alone, give what the whole gave there.

        Args:
            output: of the whole, [B, T, H].
            borders: where segments are cut.
            real: where segments really begin; what lies before a row's last one is not compared.
        """
        hidden = self.inputs.tensor_at(self.assignment.hidden)
        assert hidden is not None
        wanted, compared = _trial(real.flags)
        compared = compared.to(output.device)
        for cut in LiveSet(wanted, output.device).cutting(borders, extent).cuts:
            with torch.no_grad():
                part, _ = self.run(cut)
            at = cut.pick(compared)
            before, after = cut.pick(hidden)[at].float(), cut.pick(output)[at].float()
            if not _agree(part[at].float(), before, after, self._eps(output)):
                return False
        return True

    def _eps(self, output: Tensor) -> float:
        """Rounding of the coarsest precision that the unit computes in."""
        module = self.inputs.module
        dtypes = {output.dtype, *(state.dtype for state in self.surroundings.autocast if state.enabled)}
        if module is not None:
            dtypes.update(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    def delivery_order(self, named: dict[str, Parameter]) -> tuple[str, ...]:
        """Names in the order in which a backward of the plain unit gives gradients; what got none comes last."""
        arrived: dict[str, None] = {}
        rows, length = self.assignment.rows, self.assignment.length
        hidden = self.inputs.tensor_at(self.assignment.hidden)
        assert hidden is not None
        handles = [parameter.register_hook(partial(_note_arrival, arrived, name)) for name, parameter in named.items()]
        try:
            output, _ = self.run(Cut([Segment(0, 0, min(2, length))], rows, length, hidden.device, True))
            if named and output.requires_grad:
                torch.autograd.grad(output, list(named.values()), torch.ones_like(output), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return (*arrived, *(name for name in named if name not in arrived))


def _note_arrival(arrived: dict[str, None], name: str, _gradient: Tensor) -> None:
    arrived[name] = None


def _trial(borders: Tensor) -> tuple[Tensor, Tensor]:
    """Live positions for a proof, and the positions to compare, [B, T] bool on the host.

    In each row one position of its last segment is live, further back from row to row; the last of three rows or more
    is dead.
    """
    rows, length = borders.shape
    live, compared = torch.zeros_like(borders), torch.zeros_like(borders)
    for row in range(rows if rows < 3 else rows - 1):
        start = int(borders[row].nonzero()[-1])
        last = start + max(0, (length - start) * (row + 1) // (rows + 1) - 1)
        live[row, last] = True
        compared[row, start : last + 1] = True
    return live, compared


def _agree(part: Tensor, before: Tensor, after: Tensor, eps: float) -> bool:
    """Whether `part` is `after` but for rounding: against the size of both the values and the change from `before`."""
    allowed = eps * after.norm() + min(0.05, max(8 * eps, 1e-4)) * (after - before).norm()
    return bool((part - after).norm() <= allowed)


def only_output(result: Any, hidden: Tensor) -> Tensor | None:
    """The one tensor of a unit's result, where that is shaped like the hidden states."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if len(tensors) != 1 or tensors[0].shape != hidden.shape or not tensors[0].is_floating_point():
        return None
    return tensors[0]


class GradientSums:
    """Parameter gradients summed over the groups."""

    def __init__(self, count: int) -> None:
        self._sums: list[Tensor | None] = [None] * count
        self._owned = [False] * count

    def add(self, gradients: list[Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            total = self._sums[i]
            if gradient is None:
                continue
            if total is None:
                self._sums[i] = gradient
            elif self._owned[i]:
                total.add_(gradient)
            else:  # the first one may share its memory with another gradient
                self._sums[i], self._owned[i] = total + gradient, True

    def complete(self, parameters: list[Parameter]) -> list[Tensor]:
        """All of them, zeros for parameters without any."""
        return [
            torch.zeros_like(parameter, memory_format=torch.contiguous_format) if total is None else total
            for parameter, total in zip(parameters, self._sums, strict=True)
        ]
