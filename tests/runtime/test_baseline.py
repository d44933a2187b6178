"""The all-R update's peaks, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Shape
from ds_hilore.memory.meter import CpuMeter
from ds_hilore.runtime import baseline as module
from ds_hilore.runtime.baseline import BaselineMeter
from ds_hilore.runtime.budget import PhasePeaks
from tests.runtime.rig import StubMeter

SIX, NINE = Shape(2, 3), Shape(3, 3)


def microbatch(meter: BaselineMeter, shape: Shape) -> None:
    meter.begin(shape)
    meter.backward_begins()
    meter.end()


def test_peaks_of_two_microbatches_and_the_step() -> None:
    stub = StubMeter([50, 70, 10, 60, 80, 65])  # forward, backward, between, forward, backward, step
    meter = BaselineMeter(stub)
    microbatch(meter, SIX)
    microbatch(meter, NINE)
    meter.step_done()
    assert meter.complete
    result = meter.result()
    assert result.phases == (PhasePeaks(SIX, 50, 50, 70), PhasePeaks(NINE, 60, 60, 80))
    assert result.peak_bytes == 80 and result.device_bytes == 10**6


def test_what_comes_after_the_last_unit_is_the_loss_s() -> None:
    meter = BaselineMeter(StubMeter([20, 30, 50, 70, 10]))  # two units, loss, backward, step
    meter.begin(SIX)
    meter.unit_ran()
    meter.unit_ran()
    meter.backward_begins()
    meter.end()
    meter.step_done()
    assert meter.result().phases == (PhasePeaks(SIX, 30, 50, 70),)


@pytest.mark.parametrize(("script", "peak"), [([5, 6, 90], 90), ([5, 90, 6], 90), ([90, 5, 6], 90)])
def test_the_peak_may_be_anywhere(script: list[int], peak: int) -> None:
    meter = BaselineMeter(StubMeter(script))
    microbatch(meter, SIX)
    meter.step_done()
    assert meter.result().peak_bytes == peak


def test_what_lies_between_two_microbatches_counts() -> None:
    meter = BaselineMeter(StubMeter([5, 6, 77, 5, 6, 7]))
    microbatch(meter, SIX)
    microbatch(meter, SIX)
    meter.step_done()
    assert meter.result().peak_bytes == 77


def test_not_known_before_the_step() -> None:
    meter = BaselineMeter(StubMeter([5]))
    meter.step_done()  # nothing ran
    for _ in range(2):
        assert not meter.complete
        with pytest.raises(UsageError, match="second update"):
            meter.result()
        microbatch(meter, SIX)


def test_an_aborted_update_leaves_nothing() -> None:
    meter = BaselineMeter(StubMeter([900, 900, 5, 6, 7]))
    microbatch(meter, SIX)
    meter.begin(SIX)
    meter.abort()
    meter.backward_begins()
    meter.end()
    meter.step_done()
    assert not meter.complete
    meter._meter.script = [5, 6, 7]  # type: ignore[attr-defined]
    microbatch(meter, SIX)
    meter.step_done()
    assert meter.result().peak_bytes == 7 and len(meter.result().phases) == 1


def test_a_result_stays() -> None:
    stub = StubMeter([5, 6, 7, 1000])
    meter = BaselineMeter(stub)
    microbatch(meter, SIX)
    meter.step_done()
    before = meter.result(), stub.resets
    meter.abort()
    microbatch(meter, SIX)
    meter.step_done()
    assert (meter.result(), stub.resets) == before


def test_cpu_memory_is_given_back_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: list[int] = []

    @contextmanager
    def tight() -> Iterator[None]:
        open_now.append(1)
        yield
        open_now.pop()

    monkeypatch.setattr(module, "tight_malloc", tight)
    for end in ("step_done", "abort"):
        meter = BaselineMeter(CpuMeter())
        microbatch(meter, SIX)
        microbatch(meter, SIX)
        assert open_now == [1]
        getattr(meter, end)()
        assert not open_now
    microbatch(meter, SIX)  # measured anew after the abort
    assert open_now == [1]
    meter.abort()
    assert not open_now
