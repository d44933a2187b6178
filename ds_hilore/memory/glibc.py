"""glibc's allocator, set at run time so that the physical memory of a CPU process means something.

By default glibc keeps freed tensors for the next allocation, so a peak of resident memory counts what was freed long
ago (design fact 20). `tight_malloc` makes it give every freed tensor back to the system at once, within a process and
for a while: peaks are taken inside it, times outside, because giving memory back and faulting it in again is slow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ds_hilore.core.errors import UnsupportedError

# mallopt's parameter numbers (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

# A chunk's size word stands before its data; this bit says that the chunk is a mapping of its own.
_SIZE_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
_IS_MMAPPED = 2

_LARGEST_HOLE_BYTES = 1 << 30


@dataclass(frozen=True)
class MallocSettings:
    """Bytes from which an allocation is a mapping of its own, bytes of free heap top kept, and bytes added to it."""

    mmap_threshold_bytes: int
    trim_threshold_bytes: int
    top_pad_bytes: int


#: Everything that a tensor could be is a mapping of its own, and unmapped when it is freed.
TIGHT = MallocSettings(65536, 65536, 0)

#: The same for a process to be started with: by variables of the environment, which glibc reads once.
TIGHT_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_MMAP_THRESHOLD_": str(TIGHT.mmap_threshold_bytes),
        "MALLOC_TRIM_THRESHOLD_": str(TIGHT.trim_threshold_bytes),
        "MALLOC_TOP_PAD_": str(TIGHT.top_pad_bytes),
    }
)

#: Where glibc's own dynamic rule ends in a process that has freed large tensors. The rule itself cannot be switched on
#: again once a threshold was set.
ORDINARY = MallocSettings(32 << 20, 64 << 20, 128 << 10)


@contextlib.contextmanager
def tight_malloc() -> Iterator[None]:
    """Inside, freed tensors of 64 KiB and more leave the process at once; after it, ordinary settings hold again.

    The settings hold for all threads. Holes that earlier allocations left in the calling thread's heap are blocked
    meanwhile, since tensors placed in them would stay resident when freed. Not to be nested. A process that was
    started with MALLOC_*_ variables of its own goes back to those.

    Raises:
        UnsupportedError: the process does not use glibc's allocator, or freed memory stays resident all the same.
    """
    libc = _glibc()
    _apply(libc, TIGHT)
    plugs = _plug_holes(libc)
    try:
        _check_freed_memory_leaves(libc)
        yield
    finally:
        for address in plugs:
            libc.free(address)
        libc.malloc_trim(0)
        _apply(libc, _settings_at_start())


def started_tight() -> bool:
    """Whether the process was started with variables under which freed tensors always leave it (design fact 20)."""
    settings = _settings_at_start()
    return max(settings.mmap_threshold_bytes, settings.trim_threshold_bytes) <= TIGHT.mmap_threshold_bytes


def trim() -> None:
    """Gives free heap memory back to the system once.

    Raises:
        UnsupportedError: the process does not use glibc's allocator.
    """
    _glibc().malloc_trim(0)


def _glibc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    try:
        libc.gnu_get_libc_version  # noqa: B018  (the look-up is the test: musl and macOS have none)
    except AttributeError:
        raise UnsupportedError(
            "physical peaks on CPU need glibc's allocator, and this process uses another C library; "
            "measure on Linux with glibc, or on a CUDA device"
        ) from None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def _apply(libc: ctypes.CDLL, settings: MallocSettings) -> None:
    libc.mallopt(_M_MMAP_THRESHOLD, settings.mmap_threshold_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, settings.trim_threshold_bytes)
    libc.mallopt(_M_TOP_PAD, settings.top_pad_bytes)
    libc.malloc_trim(0)


def _settings_at_start() -> MallocSettings:
    """The settings the process was started with, as far as the variables say; else the ordinary ones."""

    def read(name: str, ordinary: int) -> int:
        value = os.environ.get(name, "")
        return int(value) if value.isdecimal() else ordinary

    return MallocSettings(
        read("MALLOC_MMAP_THRESHOLD_", ORDINARY.mmap_threshold_bytes),
        read("MALLOC_TRIM_THRESHOLD_", ORDINARY.trim_threshold_bytes),
        read("MALLOC_TOP_PAD_", ORDINARY.top_pad_bytes),
    )


def _plug_holes(libc: ctypes.CDLL) -> list[int]:
    """Takes every free chunk of the heap that a tensor would fit in, untouched: it costs addresses, no memory.

    Under TIGHT an allocation comes from the heap only where a free chunk fits, and is a mapping of its own otherwise.
    """
    plugs: list[int] = []
    size = _LARGEST_HOLE_BYTES
    while size >= TIGHT.mmap_threshold_bytes:
        address = libc.malloc(size)
        if address is None or ctypes.c_size_t.from_address(address - _SIZE_WORD_BYTES).value & _IS_MMAPPED:
            libc.free(address)
            size //= 2
        else:
            plugs.append(address)
    return plugs


def _check_freed_memory_leaves(libc: ctypes.CDLL) -> None:
    """Holds `malloc` to its word: an allocator put before glibc's (LD_PRELOAD) takes mallopt calls and ignores them."""
    size = 32 << 20
    address = libc.malloc(size)
    mapped = bool(ctypes.c_size_t.from_address(address - _SIZE_WORD_BYTES).value & _IS_MMAPPED)
    ctypes.memset(address, 1, size)
    held = _resident_pages()
    libc.free(address)
    left = held - _resident_pages()
    if not mapped or left * os.sysconf("SC_PAGE_SIZE") < size // 2:
        raise UnsupportedError(
            "freed memory stays resident in this process, so its physical peak means nothing; another allocator is "
            "in the place of glibc's: start without LD_PRELOAD of jemalloc or tcmalloc"
        )


def _resident_pages() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1])
