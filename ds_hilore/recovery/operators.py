"""Replays that do not run attention again: the outputs of chosen operators are kept from forward.

At long sequences the attention kernel is the dearest part of a replay per byte of its output. Its output and the
log-sum-exp of its rows are all that it gives, so a replay that is handed both recovers the same saved state without
running it: queries, keys and values are recomputed, the kernel is not. Operators are caught below autograd, as torch's
selective checkpointing does (torch.utils.checkpoint.create_selective_checkpoint_contexts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ds_hilore.recovery.bundle import Kept

#: Operator schemas by the name that plans give them.
OPERATORS: dict[str, frozenset[str]] = {
    "attention": frozenset(
        {
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
            "aten::_flash_attention_forward",
            "aten::_efficient_attention_forward",
            "flash_attn::_flash_attn_forward",
            "flash_attn::_flash_attn_varlen_forward",
        }
    )
}


def is_operator(func: Any, name: str) -> bool:
    """Whether an operator of torch's dispatcher is one of `OPERATORS[name]`."""
    return func._schema.name in OPERATORS[name]


class OutputTape:
    """Outputs of the operators `names` in one unit call, in the order of their calls.

    A call with dropout is not kept: its replay must draw the same random numbers as its forward.

    Args:
        names: keys of `OPERATORS`.
        around: entered around each of these calls in forward, to time them.
    """

    def __init__(
        self, names: tuple[str, ...], around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.around = around
        self._names = names
        self.outputs: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, outputs are kept."""
        taken: list[Any] = []
        with _Recorder(self, taken):
            yield
        # Only now as aliases: below autograd an alias has a version of its own, and edits would not be noticed.
        self.outputs = tree_map(lambda leaf: leaf.kept() if isinstance(leaf, _Taken) else leaf, taken)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, the same calls give what was kept."""
        with _Server(self):
            yield

    def keeps(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether outputs of this call are kept."""
        return any(is_operator(func, name) for name in self._names) and _dropout(func, args, kwargs) == 0.0

    def held(self) -> list[Tensor]:
        """Every tensor that is kept."""
        return [leaf.tensor for output in self.outputs for leaf in tree_leaves(output) if isinstance(leaf, Kept)]


@dataclass(frozen=True)
class _Taken:
    """A tensor as the operator gave it, and its version then."""

    tensor: Tensor
    version: int

    def kept(self) -> Kept:
        kept = Kept(self.tensor, 0)
        kept.version = self.version
        return kept


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: OutputTape, taken: list[Any]) -> None:
        super().__init__()
        self._tape = tape
        self._taken = taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._tape.keeps(func, args, kwargs):
            return func(*args, **kwargs)
        with self._tape.around():
            output = func(*args, **kwargs)
        self._taken.append(tree_map(_taken, output))
        return output


class _Server(TorchDispatchMode):
    def __init__(self, tape: OutputTape) -> None:
        super().__init__()
        self._tape = tape
        self._waiting = iter(tape.outputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._tape.keeps(func, args, kwargs):
            kept = next(self._waiting, None)
            if kept is not None:
                return tree_map(lambda leaf: leaf.get().detach() if isinstance(leaf, Kept) else leaf, kept)
        return func(*args, **kwargs)


def _taken(leaf: Any) -> Any:
    return _Taken(leaf, leaf._version) if isinstance(leaf, Tensor) else leaf


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p_dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return float(given or 0.0)
    return 0.0
