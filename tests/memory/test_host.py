"""What a process may still take of main memory: the machine's figures, within its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.memory.host import HostMemory

KIB, MIB = 1 << 10, 1 << 20
NO_LIMIT = 9223372036854771712


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def machine(tmp_path: Path, groups: str, total: int = 1000 * MIB, available: int = 600 * MIB) -> tuple[Path, Path]:
    """(proc, groups): where the two file systems are mounted."""
    write(
        tmp_path / "proc/meminfo", f"MemTotal: {total // KIB} kB\nMemAvailable:   {available // KIB} kB\nHugepages: 0"
    )
    write(tmp_path / "proc/self/cgroup", groups)
    return tmp_path / "proc", tmp_path / "groups"


def group_v2(folder: Path, limit: object, used: int, idle: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 1\ninactive_file {idle}\nactive_file 7")


def group_v1(folder: Path, limit: object, used: int, idle: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {idle}")


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    memory = HostMemory(*machine(tmp_path, "0::/"))
    assert (memory.total_bytes(), memory.available_bytes()) == (1000 * MIB, 600 * MIB)


def test_a_group_allows_less(tmp_path: Path) -> None:
    """What its caches hold can be taken back."""
    proc, groups = machine(tmp_path, "0::/job/rank0")
    group_v2(groups / "job/rank0", 300 * MIB, 200 * MIB, 50 * MIB)
    memory = HostMemory(proc, groups)
    assert (memory.total_bytes(), memory.available_bytes()) == (300 * MIB, 150 * MIB)


def test_outer_groups_count_too(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/job/rank0")
    group_v2(groups / "job/rank0", "max", 10 * MIB)
    group_v2(groups / "job", 400 * MIB, 390 * MIB)
    memory = HostMemory(proc, groups)
    assert (memory.total_bytes(), memory.available_bytes()) == (400 * MIB, 10 * MIB)


def test_version_1_and_its_way_to_say_no_limit(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/outside/of/the/mount\n0::/")
    group_v1(groups / "memory", NO_LIMIT, 10 * MIB)
    assert HostMemory(proc, groups).total_bytes() == 1000 * MIB
    group_v1(groups / "memory", 500 * MIB, 480 * MIB, 5 * MIB)
    memory = HostMemory(proc, groups)
    assert (memory.total_bytes(), memory.available_bytes()) == (500 * MIB, 25 * MIB)


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/job")
    group_v2(groups / "job", 100 * MIB, 101 * MIB)
    assert HostMemory(proc, groups).available_bytes() == 0


def test_a_machine_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", "Nothing: 1 kB")
    with pytest.raises(UnsupportedError, match="has no MemAvailable"):
        HostMemory(tmp_path, tmp_path).available_bytes()


def test_here() -> None:
    memory = HostMemory()
    assert 0 < memory.available_bytes() < memory.total_bytes()
