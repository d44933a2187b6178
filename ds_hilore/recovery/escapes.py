"""Tensors that leave a unit by other ways than its outputs."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class EscapeWatch:
    """Notices tensors that hooks on submodules keep beyond the unit's forward (captured attentions, for example)."""

    def __init__(self, module: nn.Module) -> None:
        self._watched = [
            (name, child) for name, child in module.named_modules() if child is not module and child._forward_hooks
        ]
        self._outputs: list[tuple[str, weakref.ref[Tensor]]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> EscapeWatch:
        for name, child in self._watched:
            self._handles.append(child.register_forward_hook(partial(self._note, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._outputs.append((name, weakref.ref(tensor)))

    def escaped(self, output: Tensor) -> str:
        """The first submodule with an output that is still alive, besides the unit's own; empty where there is none."""
        for name, reference in self._outputs:
            tensor = reference()
            if tensor is not None and tensor is not output:
                return name
        return ""
