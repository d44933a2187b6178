"""Offload (O): state of a unit that lies in host memory between its forward and its backward.

A unit's whole bundle goes (base tensors; what recipes derive is derived again), or, of a replayed unit, the hidden
states that it was called with. Back come the same bytes in the same layout, so it is as exact as to store them.

NOTE [Offload rules]
O1  A storage goes once, as the bytes between the first and the last that is looked at, however many saved tensors are
    views of it.
O2  Of what a unit was called with only the hidden states go: masks, positions and rotary tables are shared by all
    units, so sending them would free nothing. Parameters are never saved state (R5).
O3  The original is let go once its copy has arrived: at once where a link is synchronous, else when the next state is
    sent, or the forward ends. So the device holds the state of one unit more than stays, at most, and a copy has the
    forward of all units up to the next that sends to hide behind.
O4  Whoever uses state waits for its copy, on the device and not on the host: nothing else orders the two streams.
O5  When backward comes to a unit, its state is called back, and that of the nearest unit before it that sent any: a
    copy has the backward of all units in between to hide behind.
O6  What was changed in place between saving and arrival is `StateChanged`, as if it had stayed (R6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_hilore.core.errors import OffloadError, StateChanged
from ds_hilore.memory.refused import refused_bytes
from ds_hilore.recovery.bundle import Handle, Kept, Value, sources, substitute
from ds_hilore.recovery.link import Link, Transfer, link_for

if TYPE_CHECKING:
    from ds_hilore.recovery.inputs import UnitInputs

#: A tensor smaller than this many bytes stays: a copy costs more than its memory.
MIN_MOVED_BYTES = 4096
#: Allocators align to this, and kernels choose by the alignment that they find.
ALIGNMENT = 512


class Parcel:
    """The bytes of one storage, on their way to host memory and back.

    Args:
        sources: the saved tensors that look at the storage, unchanged since they were saved.
    """

    def __init__(self, link: Link, sources: Sequence[Kept]) -> None:
        spans = [_span(kept.tensor) for kept in sources]
        self.start = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
        self.size = max(end for _, end in spans) - self.start
        self._link = link
        self._sources: Sequence[Kept] = sources
        self._changed: StateChanged | None = None
        source = _bytes_of(sources[0].tensor, self.start, self.size)
        self._sent: Transfer | None = _copying(self.size, "to host memory", lambda: link.to_host(source))
        self._back: Transfer | None = None
        if self._sent is not None and self._sent.arrived():
            self.let_go()

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes now."""
        return 0 if self._sent is None else self._link.host_bytes(self.size)

    @property
    def leaving(self) -> bool:
        """Whether it still holds the original."""
        return bool(self._sources)

    @property
    def tensor(self) -> Tensor:
        """The buffer that it lies in."""
        transfer = self._back or self._sent
        assert transfer is not None
        return transfer.target

    def let_go(self) -> None:
        """The original may go (O3); the current stream waits for the copy, the host does not."""
        if not self._sources:
            return
        if self._sent is not None:
            self._sent.wait()
        sources, self._sources = self._sources, ()
        try:
            for kept in sources:
                kept.get()
        except StateChanged as changed:  # O6: whose business it is will ask
            self._changed = changed.with_traceback(None)

    def call_back(self) -> None:
        """Starts its copy to the device, once."""
        if self._back is not None:
            return
        self.let_go()
        sent = self._sent
        assert sent is not None
        self._back = _copying(self.size, "from host memory", lambda: self._link.to_device(sent))
        self._sent = None

    def get(self) -> Tensor:
        """Its bytes on the device (O4).

        Raises:
            OffloadError: the copy failed.
            StateChanged: the original was changed before it was copied.
        """
        self.call_back()
        if self._changed is not None:
            raise StateChanged(str(self._changed))
        assert self._back is not None
        self._back.wait()
        return self._back.target


class Offloaded:
    """A view of a parcel in place of a saved tensor."""

    __slots__ = ("dtype", "offset", "parcel", "signature", "size", "stride")

    def __init__(self, parcel: Parcel, kept: Kept) -> None:
        tensor = kept.tensor
        self.parcel = parcel
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset()) - parcel.start // tensor.element_size()
        self.signature = kept.signature

    def get(self) -> Tensor:
        storage = self.parcel.get().untyped_storage()
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.size, self.stride)

    @property
    def tensor(self) -> Tensor:
        """As `Kept.tensor`: on the device."""
        return self.get()

    def held(self) -> Iterable[Tensor]:
        return (self.parcel.tensor,)


class Offload:
    """What is on its way, over all units of one controller.

    Args:
        link_to: makes the link of a device, once.

    Attributes:
        sent_bytes: host memory that was taken so far.
    """

    def __init__(self, link_to: Callable[[torch.device], Link] = link_for) -> None:
        self._link_to = link_to
        self._links: dict[torch.device, Link] = {}
        self.sent_bytes = 0
        self._leaving: list[Parcel] = []  # whose originals are not let go yet

    def link(self, device: torch.device) -> Link:
        """The link between `device` and host memory."""
        if device not in self._links:
            self._links[device] = self._link_to(device)
        return self._links[device]

    def send(self, device: torch.device, handles: Sequence[Handle], inputs: UnitInputs) -> list[Parcel]:
        """Sends what one call of a unit holds: all that its handles are made from, and its hidden states (O2).

        Returns:
            What was sent. It is held by what takes the place of the originals, in handles, recipes and inputs.

        Raises:
            OffloadError: a copy failed; nothing was put in place of anything.
        """
        hidden = inputs.hidden()
        stay = [tensor for tensor in inputs.held() if hidden is None or tensor is not hidden.tensor]
        staying = {tensor.untyped_storage().data_ptr() for tensor in (*stay, *inputs.lent)}
        instead: dict[int, Offloaded] = {}
        for address, found in _by_storage([hidden, *sources(handle.value for handle in handles)]).items():
            movable = address not in staying and all(_movable(kept, device) for kept in found)
            if movable and max(kept.tensor.nbytes for kept in found) >= MIN_MOVED_BYTES:
                parcel = Parcel(self.link(device), found)
                instead.update({id(kept): Offloaded(parcel, kept) for kept in found})
        substitute(handles, lambda value: instead.get(id(value)))
        if hidden is not None and id(hidden) in instead:
            inputs.substitute(hidden, instead[id(hidden)])
        sent = list({id(gone.parcel): gone.parcel for gone in instead.values()}.values())
        if sent:
            self.let_go()
            self._leaving = [parcel for parcel in sent if parcel.leaving]
            self.sent_bytes += sum(parcel.host_bytes for parcel in sent)
        return sent

    def let_go(self) -> None:
        """What was sent so far has arrived by now: the next is sent, or the forward is over (O3)."""
        leaving, self._leaving = self._leaving, []
        for parcel in leaving:
            parcel.let_go()


def call_back(parcels: Iterable[Parcel]) -> None:
    """Starts their copies to the device ahead of use. Where memory is short, some start when they are used (R10).

    Raises:
        OffloadError: a copy failed for another reason.
    """
    try:
        for parcel in parcels:
            parcel.call_back()
    except Exception as error:
        if refused_bytes(error) is None:
            raise


def _copying(size: int, where: str, copy: Callable[[], Transfer]) -> Transfer:
    try:
        return copy()
    except Exception as error:
        if refused_bytes(error) is not None and where.startswith("from"):
            raise  # device memory, which other units can give up
        raise OffloadError(
            f"{size} bytes of a unit's state could not be copied {where}: {error}. Run the whole update again on all "
            "ranks; if it fails again, lower hilore.host_budget (0: nothing is offloaded)"
        ) from error


def _by_storage(values: Iterable[Value | None]) -> dict[int, list[Kept]]:
    """Tensors that are held as they are, each once, by the address of their storage."""
    found: dict[int, dict[int, Kept]] = defaultdict(dict)
    for value in values:
        if isinstance(value, Kept):
            found[value.tensor.untyped_storage().data_ptr()][id(value)] = value
    return {address: list(kept.values()) for address, kept in found.items()}


def _movable(kept: Kept, device: torch.device) -> bool:
    tensor = kept.tensor
    if type(kept) is not Kept or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    plain = not tensor.is_conj() and not tensor.is_neg() and tensor.numel() > 0
    return plain and tensor.device == device and tensor._version == kept.version


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of the storage that the tensor looks at, and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _bytes_of(tensor: Tensor, start: int, size: int) -> Tensor:
    """Bytes of a tensor's storage, [size] uint8, as an alias."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (size,), (1,))
