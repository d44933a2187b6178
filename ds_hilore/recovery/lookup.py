"""Hidden states that are rows of an embedding table: what the first unit is called with, as a recipe.

Such a unit holds token ids instead, 8 bytes for each position, and looks the rows up once more when backward comes to
it: the same bits, since they are copies of rows. It is derived state (design fact 11) whose operation lies before the
unit, so autograd's graph does not tell of it (of a frozen table there is no node at all) and the embedding has to.

Not covered: subclasses of `nn.Embedding` and tables with `max_norm` (they change what they look up), tables that
ZeRO-3 has cut in shards, and outputs on which somebody has called `requires_grad_` (autograd holds a leaf anyway).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ds_hilore.recovery.bundle import Handle, Kept, ParameterRef, Value, substitute
from ds_hilore.recovery.inputs import UnitInputs


class LookedUp:
    """Rows of a table in place of a tensor that held them."""

    __slots__ = ("ids", "signature", "table")

    def __init__(self, ids: Kept, table: ParameterRef, signature: int) -> None:
        self.ids = ids
        self.table = table
        self.signature = signature

    def get(self) -> Tensor:
        """[*ids, width], on the table's device.

        Raises:
            StateChanged: ids or table were changed in place since the forward pass.
        """
        with torch.no_grad():
            return F.embedding(self.ids.get(), self.table.get())

    @property
    def tensor(self) -> Tensor:
        """As `Kept.tensor`."""
        return self.get()

    def held(self) -> Iterable[Tensor]:
        return (self.ids.tensor,)


class _Given(NamedTuple):
    """What an embedding gave out, at the version that it had then."""

    ids: Kept
    table: ParameterRef
    version: int


class Lookups:
    """Outputs of embeddings, each for as long as somebody else holds it."""

    def __init__(self) -> None:
        self._given: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def listen(self, embedding: nn.Module) -> RemovableHandle | None:
        """Notes what this module gives out from now on. None where its outputs are not plain rows of its table."""
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or hasattr(embedding.weight, "ds_id"):
            return None
        return embedding.register_forward_hook(self._note)

    def _note(self, embedding: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or len(args) != 1 or not isinstance(output, Tensor):
            return
        ids, table = args[0], embedding.weight
        if isinstance(ids, Tensor) and isinstance(table, nn.Parameter) and output.dtype == table.dtype:
            self._given[output] = _Given(Kept(ids, -1), ParameterRef(table, table), output._version)

    def replace(self, handles: Callable[[], Iterable[Handle]], inputs: UnitInputs) -> None:
        """Lets go of a unit's hidden states where they are rows of a table, in its inputs and in what it saved.

        Args:
            handles: gives what was saved; asked only where there is something to let go of.
        """
        hidden = inputs.hidden() if self._given else None
        given = None if hidden is None else self._given_as(hidden)
        if hidden is None or given is None:
            return
        rows = LookedUp(given.ids, given.table, hidden.signature)
        inputs.substitute(hidden, rows)

        def instead(value: Value) -> Value | None:
            same = type(value) is Kept and value.version == hidden.version and _is_same(value.tensor, hidden.tensor)
            return LookedUp(given.ids, given.table, value.signature) if same else None

        substitute(handles(), instead)

    def _given_as(self, hidden: Kept) -> _Given | None:
        for output, given in self._given.items():
            leaf = output.requires_grad and output.is_leaf
            unchanged = output._version == hidden.version == given.version
            if unchanged and not leaf and _is_same(output, hidden.tensor):
                found: _Given = given
                return found
        return None


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
