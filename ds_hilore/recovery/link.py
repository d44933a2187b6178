"""Links: copies between the device that computes and host memory, and how a use waits for one.

    PlainLink     the device is the CPU: copies into buffers of their own, by the thread that asks. Both ends are the
                  same memory, so it gains nothing: for tests
    StreamLink    a device with streams: pinned host memory, copies on a stream of their own, events

A copy's target may be allocated, used and freed like any tensor of the current stream; only its content needs `wait`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """One copy that was asked for. `target`: where it goes."""

    target: Tensor

    def arrived(self) -> bool:
        """Whether its content is there by now. Waits for nothing."""
        ...

    def wait(self) -> None:
        """What the current stream does from now on finds the content there, and may overwrite the source. The host
        does not wait."""
        ...


class Link(Protocol):
    """A way to host memory and back.

    Attributes:
        apart: the host's memory is not the device's, so that there is something to gain.
        overlaps: copies run beside what the device computes; else they hold it up for as long as they take.
    """

    apart: bool
    overlaps: bool

    def to_host(self, source: Tensor) -> Transfer:
        """Copies `source` (contiguous) into host memory. It has to live, unchanged, until `wait` or `arrived`."""
        ...

    def to_device(self, sent: Transfer) -> Transfer:
        """Copies what was sent back, after it has arrived. The host buffer may be let go at once."""
        ...

    def host_bytes(self, size: int) -> int:
        """Host memory that a copy of `size` bytes takes."""
        ...


def link_for(device: torch.device) -> Link:
    """The link of a device."""
    return PlainLink() if device.type == "cpu" else StreamLink(device)


class _Done:
    """A copy that was over when it was asked for."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def arrived(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class PlainLink:
    """Copies by the thread that asks."""

    apart = False
    overlaps = False

    def to_host(self, source: Tensor) -> Transfer:
        return _Done(source.clone())

    def to_device(self, sent: Transfer) -> Transfer:
        return _Done(sent.target.clone())

    def host_bytes(self, size: int) -> int:
        return size


class StreamLink:
    """Copies on one stream of their own, in the order in which they were asked for.

    A copy begins once what the current stream has been given so far is done: its source is complete then, and its
    target, which may be memory that was just freed, is used by nobody any more.
    """

    apart = True
    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        #: both ends of copies that nobody has waited for: the allocator knows nothing of this stream
        self._under_way: dict[_Streamed, tuple[Tensor, Tensor]] = {}

    def to_host(self, source: Tensor) -> Transfer:
        return self._copy(source, self._pinned(source))

    def to_device(self, sent: Transfer) -> Transfer:
        return self._copy(sent.target, torch.empty_like(sent.target, device=self._device))

    def host_bytes(self, size: int) -> int:
        """torch's allocator of pinned memory hands out powers of two."""
        return 1 << max(0, size - 1).bit_length()

    def _pinned(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def _copy(self, source: Tensor, target: Tensor) -> _Streamed:
        for over in [transfer for transfer in self._under_way if transfer.arrived()]:
            del self._under_way[over]
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        transfer = _Streamed(self, target, self._stream.record_event())
        self._under_way[transfer] = (source, target)
        return transfer

    def awaited(self, transfer: _Streamed) -> None:
        """The current stream goes on after this copy, so both its ends may go back to the allocator of that stream."""
        self._module.current_stream(self._device).wait_event(transfer.event)
        self._under_way.pop(transfer, None)


class _Streamed:
    """A copy on a link's stream."""

    def __init__(self, link: StreamLink, target: Tensor, event: Any) -> None:
        self.target = target
        self.event = event
        self._link = link

    def arrived(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self._link.awaited(self)
