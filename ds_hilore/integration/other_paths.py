"""Parameters that a loss reaches by other paths than the outputs of a forward that was taken down.

A loss may use a weight of the head by itself (chunked log-probabilities), or tensors that a hook brought out of the
model; arguments of the forward may have been computed from its parameters. What such paths add to a gradient is not
known from the gradient at the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_KEY = "ds_hilore.leaves_a_recording"


def mark_leaving(outputs: Iterable[Tensor], owner: object) -> None:
    """Notes that what is behind these tensors was taken down. The mark lives in the nodes, and keeps none alive."""
    for output in outputs:
        node: Any = output.grad_fn
        if node is not None:
            node.metadata[_KEY] = owner


def reached_otherwise(tensors: Iterable[Tensor], parameters: Mapping[str, nn.Parameter], owner: object) -> set[str]:
    """Names of `parameters` that gradients of `tensors` get to without passing through a tensor marked by `owner`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: set[str] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.metadata.get(_KEY) is owner:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return found
