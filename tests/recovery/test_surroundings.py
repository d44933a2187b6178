"""R8: a replay takes random and autocast state of its forward and leaves the streams as it found them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hilore.core.types import Action
from ds_hilore.recovery.surroundings import AutocastState, Surroundings
from ds_hilore.recovery.unit import RecoveryContext
from tests.recovery.scenes import tensor
from tests.recovery.units import CPU, H, R, Units


class Tracker:
    """What a model-parallel random state tracker looks like. As the real ones, it goes on in what it is given."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {"model-parallel": 1}

    def get_states(self) -> Any:
        return dict(self.states)

    def set_states(self, states: Any) -> None:
        self.states = states


def test_r8_random_numbers_are_those_of_the_forward_and_the_stream_goes_on() -> None:
    surroundings = Surroundings(CPU)
    first = torch.rand(3)
    torch.rand(100)
    before = torch.get_rng_state()
    with surroundings.restored():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("action", [H, R])
def test_r8_dropout_takes_its_mask_again_and_later_numbers_do_not_notice(action: Action) -> None:
    masks: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.4)
        masks.append(y.detach() == 0)
        return y.exp()

    torch.manual_seed(3)
    out = Units(action).run(function, tensor(CPU))
    between = torch.rand(4)
    out.sum().backward()
    after = torch.rand(4)
    torch.manual_seed(3)
    function(tensor(CPU))
    assert torch.equal(torch.rand(4), between) and torch.equal(torch.rand(4), after)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert len(masks) == (2 if action is H else 3)


def test_r8_streams_are_put_back_when_the_replay_raises() -> None:
    tracker = Tracker()
    surroundings = Surroundings(CPU, tracker)
    tracker.states = {"model-parallel": 5}
    torch.rand(5)
    before = torch.get_rng_state()
    with pytest.raises(LookupError), surroundings.restored():
        assert tracker.states == {"model-parallel": 1}
        torch.rand(7)
        raise LookupError
    assert torch.equal(torch.get_rng_state(), before) and tracker.states == {"model-parallel": 5}


def test_r8_states_of_the_tracker_serve_for_a_second_replay() -> None:
    """As with `retain_graph`, and for nodes that unpack a slot more than once."""
    tracker = Tracker()
    surroundings = Surroundings(CPU, tracker)
    for _ in range(2):
        with surroundings.restored():
            assert tracker.states == {"model-parallel": 1}
            tracker.states["model-parallel"] += 1


def test_r8_the_tracker_of_the_context_is_taken_along() -> None:
    tracker = Tracker()
    seen: list[int] = []
    units = Units(R, RecoveryContext(rng_tracker=tracker))

    def function(x: Tensor) -> Tensor:
        seen.append(tracker.states["model-parallel"])
        tracker.states["model-parallel"] += 1
        return x.sin().cos()

    out = units.run(function, tensor(CPU))
    tracker.states = {"model-parallel": 9}
    out.sum().backward()
    assert set(seen) == {1} and len(seen) == 2 and tracker.states == {"model-parallel": 9}


def test_r8_autocast_is_that_of_the_forward_both_ways() -> None:
    dtypes: list[torch.dtype] = []

    def function(x: Tensor) -> Tensor:
        y = x @ x.transpose(1, 2)
        dtypes.append(y.dtype)
        return y.sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Units(R).run(function, tensor(CPU))
    inside.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    dtypes.clear()
    outside = Units(R).run(function, tensor(CPU))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside.sum().backward()
    assert dtypes == [torch.float32] * 2


def test_autocast_state_comes_back_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        state = AutocastState.current("cpu")
    assert (state.enabled, state.dtype, state.cache_enabled) == (True, torch.bfloat16, False)
    with state.restore():
        assert AutocastState.current("cpu") == state
    assert not AutocastState.current("cpu").enabled
