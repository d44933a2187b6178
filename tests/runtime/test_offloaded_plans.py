"""Plans that send state to host memory, followed by a controller."""

from __future__ import annotations

import pytest
import torch

from ds_hilore.core.types import Variant
from ds_hilore.profiling.host_link import LinkSpeed
from ds_hilore.recovery import offload
from ds_hilore.recovery.offload import Offload
from tests.recovery.links import LateLink
from tests.runtime.rig import Net, Rig, planner, same

#: What a block of the rig holds and sends: its inputs, and the output of tanh.
BLOCKS = 8


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """All blocks replayed peak at 5,000 bytes."""
    monkeypatch.setattr(offload, "MIN_MOVED_BYTES", 1)
    made = Rig(Net(BLOCKS), planner=planner(1.1))
    made.meter.script = [5000]
    made.controller.context.offload = Offload(lambda device: LateLink(seed=1))
    return made


def _offer(rig: Rig, host_bytes: int) -> None:
    rig.controller.parts.planner.host_bytes = host_bytes
    rig.controller.measurements.link = LinkSpeed(1e12, overlaps=True)


def _variants(rig: Rig) -> list[str]:
    return [treatment.name for treatment in rig.controller.microbatch.treated.values()]


def _checked_update(rig: Rig, seed: int) -> None:
    rig.net.zero_grad()
    rig.backward(rig.forward(seed))
    found = rig.gradients()
    assert same(found, rig.expected(rig.plain(seed)))
    rig.controller.end_update()


def test_units_go_to_host_memory_where_they_do_not_fit(rig: Rig) -> None:
    for seed in range(3):
        rig.update(seed)
        rig.gradients()
    _checked_update(rig, 3)
    without = rig.controller.plan
    assert 0 < _variants(rig).count("H") < BLOCKS and without.saved_seconds < BLOCKS
    _offer(rig, 10**6)
    rig.controller.parts.planner.replan()
    rig.controller.measurements.outdate()
    _checked_update(rig, 4)
    assert "O" in _variants(rig) and set(_variants(rig)) <= {"O", "H"}
    assert rig.controller.plan.saved_seconds == pytest.approx(BLOCKS)
    assert rig.controller.metrics()["offloaded_units"] == _variants(rig).count("O")
    assert rig.controller.context.offload.sent_bytes > 0


def test_nothing_is_sent_where_everything_fits(rig: Rig) -> None:
    rig.controller.parts.planner.budget = planner(100.0).budget
    _offer(rig, 10**6)
    for seed in range(4):
        _checked_update(rig, seed)
    assert _variants(rig) == ["H"] * BLOCKS and rig.controller.context.offload.sent_bytes == 0


def test_host_memory_is_a_limit(rig: Rig) -> None:
    for seed in range(3):
        rig.update(seed)
    rig.gradients()
    _offer(rig, 0)
    rig.controller.measurements.outdate()
    _checked_update(rig, 3)
    assert rig.controller.context.offload.sent_bytes == 0
    (size,) = {variant.held_bytes for variant in _profile(rig) if variant.name == "O"}
    _offer(rig, 3 * size)
    rig.controller.parts.planner.replan()
    _checked_update(rig, 4)
    assert 0 < rig.controller.context.offload.sent_bytes <= 3 * size


def _profile(rig: Rig) -> list[Variant]:
    shape = rig.controller.microbatch.shape
    assert shape is not None
    return [v for unit in rig.controller.measurements.profiles(shape) for v in unit.variants]


def test_a_unit_that_was_sent_can_still_be_replayed(rig: Rig) -> None:
    """Before its backward a plan lets go of prepared state where memory has become short."""
    for seed in range(3):
        rig.update(seed)
    rig.gradients()
    _offer(rig, 10**6)
    rig.controller.measurements.outdate()
    rig.controller.parts.planner.replan()
    loss = rig.forward(5)
    assert "O" in _variants(rig)
    for call in rig.controller.microbatch.alive():
        call.drop()
    rig.backward(loss)
    assert same(rig.gradients(), rig.expected(rig.plain(5)))
    assert torch.isfinite(loss)
