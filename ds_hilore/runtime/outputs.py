"""Which autograd nodes gave the outputs of an engine's forward.

A host may change gradients at its engine's outputs: in a direct `loss.backward()` DeepSpeed divides by the accumulation
steps there. What a hook elsewhere sees then depends on which side of the outputs it sits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_KEY = "ds_hilore.outputs"


class OutputMarks:
    """Marks live in the nodes' own metadata: they keep no graph alive and go with it. One object per engine."""

    def __init__(self) -> None:
        self._owner = object()

    def mark(self, outputs: Any) -> None:
        """Notes the tensors with a graph in `outputs`, through tuples, lists and dicts as DeepSpeed walks them.

        Source: `OutputBackwardHookManager._traverse_and_register_hooks` in deepspeed/runtime/utils.py.
        """
        for tensor in _tensors(outputs):
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata.setdefault(_KEY, set()).add((self._owner, tensor.output_nr))

    def follow(self, tensor: Tensor) -> bool:
        """Whether `tensor` was computed from an output: the gradient reaches it before the outputs.

        False for an output itself. Looks back from `tensor`, breadth first, so the log-probabilities of logits are
        told apart in a few steps.
        """
        if tensor.grad_fn is None or self._marked(tensor.grad_fn, tensor.output_nr):
            return False
        seen = {tensor.grad_fn}
        queue = deque(seen)
        while queue:
            for parent, number in queue.popleft().next_functions:
                if parent is None:
                    continue
                if self._marked(parent, number):
                    return True
                if parent not in seen:
                    seen.add(parent)
                    queue.append(parent)
        return False

    def _marked(self, node: Any, number: int) -> bool:
        return (self._owner, number) in node.metadata.get(_KEY, ())


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, tuple | list):
        for item in outputs:
            yield from _tensors(item)
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _tensors(value)
