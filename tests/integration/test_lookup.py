"""On two ranks: the first unit holds token ids in place of rows of the embedding, and gradients are DeepSpeed's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from ds_hilore.core.types import Action
from ds_hilore.runtime.microbatch import footprints
from tests.engines import config
from tests.integration import updates
from tests.models import batch, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_lookup"


class Wrapped(nn.Module):
    """A model inside of another module, as own loops have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def looked_up(stage: int, adapters: bool, wrapped: bool, action: Action) -> dict[str, Any]:
    """Bytes that each unit's inputs hold, and gradients that are not the reference's."""

    def build() -> nn.Module:
        model = updates.build(adapters=adapters)
        return Wrapped(model) if wrapped else model

    reference, ours = updates.pair(build, config(stage))
    ours.hilore.force(action)
    wrong = [
        name
        for number in range(2)
        for name in updates.unequal_bits(updates.run_update(reference, number), updates.run_update(ours, number))
    ]
    loss = plain_loss(ours, *batch(seed=7))
    held = [each.input_bytes for each in footprints(ours.hilore.microbatch.alive())]
    ours.backward(loss)
    ours.step()
    return {"held": held, "wrong": wrong}


@pytest.mark.parametrize("action", [Action.RECOMPUTE, Action.STORE])
@pytest.mark.parametrize(
    ("stage", "adapters", "wrapped"), [(0, False, False), (2, True, True), (1, True, False), (3, True, True)]
)
def test_the_first_unit_holds_ids(ranks: RankPool, stage: int, adapters: bool, wrapped: bool, action: Action) -> None:
    run = partial(ranks.run, f"{HERE}:looked_up", stage=stage, adapters=adapters, wrapped=wrapped)
    for seen in run(action=action):
        assert not seen["wrong"]
        first, *others = seen["held"]
        if stage == 3:  # the table is in shards
            assert first >= max(others)
        else:
            assert 0 < first < min(others) / 8
