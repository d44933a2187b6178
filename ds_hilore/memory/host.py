"""Main memory of the machine as this process may use it: the kernel's figures, within its control groups' limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_hilore.core.errors import UnsupportedError

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Limited:
    """A control group with a limit. `idle`: the line of memory.stat that names file pages the kernel can take back."""

    limit: Path
    usage: Path
    stat: Path
    idle: str

    def limit_bytes(self) -> int | None:
        """None where there is no such group or no limit ("max")."""
        return _number(self.limit)

    def available_bytes(self) -> int | None:
        limit, usage = self.limit_bytes(), _number(self.usage)
        if limit is None or usage is None:
            return None
        return max(0, limit - usage + (_field(self.stat, self.idle) or 0))


class HostMemory:
    """Reads what there is and what is left.

    Args:
        proc, groups: where the proc and the control group file systems are mounted.

    Raises:
        UnsupportedError: by its methods, where the kernel does not tell.
    """

    def __init__(self, proc: Path = PROC, groups: Path = GROUPS) -> None:
        self._meminfo = proc / "meminfo"
        everything = _field(self._meminfo, "MemTotal:")
        found = list(_groups(proc / "self/cgroup", groups))
        # version 1 writes a number beyond every machine for "no limit"
        limits = [(group, group.limit_bytes()) for group in found]
        self._limited = [group for group, limit in limits if limit is not None and limit < 1024 * (everything or 0)]

    def total_bytes(self) -> int:
        """Memory of the machine, or of the control group that allows least."""
        limits = (group.limit_bytes() for group in self._limited)
        return min([1024 * self._read("MemTotal:"), *(limit for limit in limits if limit is not None)])

    def available_bytes(self) -> int:
        """What can still be taken without swapping, by whoever comes first: free, or held by caches only."""
        left = (group.available_bytes() for group in self._limited)
        return min([1024 * self._read("MemAvailable:"), *(count for count in left if count is not None)])

    def _read(self, name: str) -> int:
        found = _field(self._meminfo, name)
        if found is None:
            raise UnsupportedError(
                f"{self._meminfo} has no {name[:-1]}, so memory on CPU cannot be measured; use a Linux kernel's /proc"
            )
        return found


def _groups(own: Path, mounted: Path) -> Iterator[_Limited]:
    """The process's control groups, from its own to the outermost one that can be seen here.

    In a container the path that the kernel names may lie outside of what is mounted; its outermost group is the
    mount itself then.
    """
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.strip("/")
        if controllers == "":
            for root in (mounted, mounted / "unified"):
                for folder in _upwards(root, inner):
                    yield _Limited(
                        folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file"
                    )
        elif "memory" in controllers.split(","):
            for folder in _upwards(mounted / "memory", inner):
                usage = folder / "memory.usage_in_bytes"
                yield _Limited(folder / "memory.limit_in_bytes", usage, folder / "memory.stat", "total_inactive_file")


def _upwards(root: Path, inner: str) -> Iterator[Path]:
    parts = inner.split("/") if inner else []
    for length in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:length])


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """The number after `name` at the begin of a line."""
    try:
        with path.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                words = line.split(None, 2)
                if len(words) > 1 and words[0] == name:
                    return int(words[1])
    except OSError:
        return None
    return None
