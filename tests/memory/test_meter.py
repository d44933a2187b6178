"""The meter against what a test allocates itself, and its refusals where there is nothing to read."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.memory import glibc
from ds_hilore.memory.glibc import tight_malloc
from ds_hilore.memory.meter import CpuMeter, PeakMeter, peak_meter

MIB = 1 << 20
SIZE = 50 * MIB
#: Small allocations of the interpreter, and the kernel's own rounding of its counters.
SLACK = 4 * MIB


def filled(size: int, count: int = 1) -> list[torch.Tensor]:
    return [torch.ones(size // 4) for _ in range(count)]


def in_thread(function: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def leave_holes() -> list[torch.Tensor]:
    """What training does to the heap before a peak is taken: freed tensors between kept ones."""
    return filled(3 * MIB, 40)[1::2]


def check_freed_tensors_leave(meter: PeakMeter, size: int) -> None:
    meter.reset()
    before = meter.level_bytes()
    tensors = filled(size, SIZE // size)
    held = meter.level_bytes()
    del tensors
    assert held - before == pytest.approx(SIZE, abs=SLACK)
    assert meter.level_bytes() - before == pytest.approx(0, abs=SLACK)
    assert meter.peak_bytes() - before == pytest.approx(SIZE, abs=SLACK)


@pytest.mark.parametrize("size", [128 * 1024, 2 * MIB, SIZE])
@pytest.mark.parametrize("start", [lambda run: run(), in_thread], ids=["main arena", "thread arena"])
def test_inside_tight_malloc_freed_tensors_leave_the_process(
    size: int, start: Callable[[Callable[[], None]], None]
) -> None:
    kept = leave_holes()
    gc.collect()
    meter = peak_meter("cpu")
    with tight_malloc():
        start(lambda: check_freed_tensors_leave(meter, size))
    assert len(kept) == 20


def test_peaks_can_be_taken_again_after_ordinary_work() -> None:
    meter = peak_meter("cpu")
    for _ in range(2):
        with tight_malloc():
            check_freed_tensors_leave(meter, 2 * MIB)
        leave_holes()


def test_outside_tight_malloc_freed_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for all this. Without the holes' plugs and tight thresholds the same figure is wrong."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    with tight_malloc():
        pass
    meter = peak_meter("cpu")
    meter.reset()
    before = meter.level_bytes()
    filled(2 * MIB, 25)
    assert meter.level_bytes() - before > SIZE // 2


def test_holes_of_the_heap_are_blocked_while_peaks_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugs a tensor lands in a hole that an earlier one left, and stays resident when it is freed."""
    kept = leave_holes()
    monkeypatch.setattr(glibc, "_plug_holes", lambda libc: [])
    monkeypatch.setattr(glibc, "_check_freed_memory_leaves", lambda libc: None)
    meter = peak_meter("cpu")
    with pytest.raises(AssertionError), tight_malloc():
        check_freed_tensors_leave(meter, 2 * MIB)
    del kept


def test_a_reset_forgets_earlier_peaks() -> None:
    meter = peak_meter("cpu")
    with tight_malloc():
        del filled(SIZE)[:]
        high = meter.peak_bytes()
        meter.reset()
        assert meter.peak_bytes() < high - SIZE // 2
        assert meter.reserved_bytes() == pytest.approx(meter.level_bytes(), abs=SLACK)


def test_the_device_is_larger_than_what_is_held() -> None:
    meter = peak_meter("cpu")
    assert type(meter.device_bytes()) is int
    assert meter.peak_bytes() < meter.device_bytes()


def test_the_quick_level_is_the_level() -> None:
    meter = peak_meter("cpu")
    assert meter.quick_level_bytes() == pytest.approx(meter.level_bytes(), abs=meter.wander_bytes)
    kept = filled(SIZE)
    assert meter.quick_level_bytes() == pytest.approx(meter.level_bytes(), abs=meter.wander_bytes)
    del kept


def test_what_is_free_is_shared_among_ranks() -> None:
    alone, shared = peak_meter("cpu"), peak_meter("cpu", sharers=4)
    free = alone.free_bytes()
    assert free is not None and shared.free_bytes() == pytest.approx(free / 4, rel=0.5)
    assert shared.level_bytes() < shared.ceiling_bytes(0) < alone.device_bytes()


def test_no_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="needs Linux with /proc mounted"):
        CpuMeter(proc=tmp_path)


def test_a_proc_without_the_figure_is_refused(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name: x\n")
    with pytest.raises(UnsupportedError, match="has no VmHWM"):
        CpuMeter(proc=tmp_path)


def test_a_peak_that_cannot_be_reset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "self/clear_refs").mkdir(parents=True)
    (tmp_path / "self/status").write_text("VmHWM:  10 kB\n")
    with pytest.raises(UnsupportedError, match="clear_refs"):
        CpuMeter(proc=tmp_path)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta device; supported: cpu, cuda"):
        peak_meter("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="sees no CUDA device"):
            peak_meter("cuda:0")


def test_an_allocator_that_keeps_memory_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an allocator in glibc's place looks like: mallopt answers, and nothing leaves."""
    monkeypatch.setattr(glibc, "_resident_pages", lambda: 1000)
    with pytest.raises(UnsupportedError, match="another allocator"), tight_malloc():
        pass


def test_the_process_goes_back_to_the_settings_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    settings = glibc._settings_at_start()
    assert settings.mmap_threshold_bytes == 65536
    assert settings.top_pad_bytes == glibc.ORDINARY.top_pad_bytes


def test_run_time_settings_do_what_the_variables_do() -> None:
    """The same allocations in a process with the MALLOC_*_ variables and in one with `tight_malloc`: same peak."""
    code = """
import contextlib, sys, torch
from ds_hilore.memory.glibc import tight_malloc
from ds_hilore.memory.meter import peak_meter
meter = peak_meter("cpu")
with tight_malloc() if sys.argv[1] == "run time" else contextlib.nullcontext():
    meter.reset()
    before = meter.level_bytes()
    for size in (128 * 1024, 2 << 20, 24 << 20):
        tensors = [torch.ones(size // 4) for _ in range((48 << 20) // size)]
        del tensors
    print(meter.peak_bytes() - before, meter.level_bytes() - before)
"""
    variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    figures = {}
    for name, extra in (("variables", variables), ("run time", {})):
        done = subprocess.run(
            [sys.executable, "-c", code, name],
            env={**_environment(), **extra},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        figures[name] = [int(figure) for figure in done.stdout.split()]
    assert figures["run time"] == pytest.approx(figures["variables"], abs=SLACK)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
