"""Links to host memory: copies are apart from their sources, and streams are ordered by events (a fake device's)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_hilore.recovery.link import PlainLink, StreamLink, link_for

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class FakeStream:
    """Notes what it is told to wait for, and what is done on it."""

    def __init__(self, device: object = None) -> None:
        self.log: list[Any] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(("waits for all of", other))

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("waits for", event))

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.log.append(("passes", event))
        return event


class FakeDevice:
    """Stands in for torch.cuda."""

    Stream = FakeStream

    def __init__(self) -> None:
        self.now = self.compute = FakeStream()

    def current_stream(self, device: object) -> FakeStream:
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(StreamLink, "_pinned", lambda self, like: torch.empty_like(like))
    return device


def _bytes(size: int = 64) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_plain_copies_are_apart_and_over_at_once() -> None:
    link, source = PlainLink(), _bytes()
    sent = link.to_host(source)
    back = link.to_device(sent)
    assert sent.arrived() and back.arrived()
    assert torch.equal(sent.target, source) and torch.equal(back.target, source)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (source, sent.target, back.target)}) == 3
    assert link.host_bytes(1000) == 1000 and not link.overlaps


def test_a_copy_begins_after_what_the_device_was_given_and_uses_wait_for_its_event(fake: FakeDevice) -> None:
    link = StreamLink(CPU)
    stream = link._stream
    sent = link.to_host(_bytes())
    assert [what for what, _ in stream.log] == ["waits for all of", "passes"]
    assert stream.log[0][1] is fake.compute
    assert fake.compute.log == [] and not sent.arrived()
    sent.wait()
    assert fake.compute.log == [("waits for", stream.log[1][1])]
    back = link.to_device(sent)
    back.wait()
    assert fake.compute.log[1:] == [("waits for", stream.log[3][1])]
    assert torch.equal(back.target, _bytes())


def test_both_ends_of_a_copy_live_until_it_is_awaited(fake: FakeDevice) -> None:
    """The allocator does not know the link's stream: what is freed sooner is given to others while it is copied."""
    link, source = StreamLink(CPU), _bytes()
    ends = [StorageWeakRef(source.untyped_storage())]
    sent = link.to_host(source)
    ends.append(StorageWeakRef(sent.target.untyped_storage()))
    del source
    assert not any(end.expired() for end in ends)
    sent.wait()
    assert ends[0].expired() and not ends[1].expired()
    back = link.to_device(sent)
    del sent
    ends.append(StorageWeakRef(back.target.untyped_storage()))
    del back  # a graph that was dropped: nobody will wait
    assert not ends[1].expired() and not ends[2].expired()


def test_what_nobody_waits_for_goes_once_it_has_arrived(fake: FakeDevice) -> None:
    link, source = StreamLink(CPU), _bytes()
    end = StorageWeakRef(source.untyped_storage())
    event = link.to_host(source) and link._stream.log[-1][1]
    del source
    assert not end.expired()
    event.passed = True
    link.to_host(_bytes(8))
    assert end.expired()


def test_pinned_memory_comes_in_powers_of_two(fake: FakeDevice) -> None:
    link = StreamLink(CPU)
    assert [link.host_bytes(size) for size in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]
    assert link.overlaps


def test_each_device_has_its_link(fake: FakeDevice) -> None:
    assert isinstance(link_for(CPU), PlainLink)
    assert isinstance(link_for(torch.device("cuda")), StreamLink)
