"""Where the self-check cannot tell it says why, on all ranks alike, and the run goes on; never a false alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hilore.core.errors import MemoryExhausted, RankMismatch
from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action
from ds_hilore.integration import plain_gradient, selfcheck
from tests.engines import config
from tests.integration import test_prune as prune
from tests.integration import updates
from tests.models import batch, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_selfcheck_limits"
CHECKED = {"selfcheck": {"updates": 2}}


class Counting(nn.Module):
    """Counts its calls in a buffer, as running statistics do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


class Drifting(nn.Module):
    """Gives something else each time, by nothing that is seen from outside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


class Noise(torch.autograd.Function):
    """The identity, whose gradient is never twice the same: as atomic additions are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        fresh = torch.Generator().manual_seed(torch.seed() % 2**31)
        return gradients[0] * (1 + 1e-4 * torch.randn(gradients[0].shape, generator=fresh))


class Noisy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Noise.apply(self.inner(x))  # type: ignore[no-any-return]


def _summary(made: Any) -> dict[str, Any]:
    check = made._hilore_host.selfcheck
    return {name: getattr(check, name) for name in ("updates", "largest", "over", "passed_over")}


def with_norm(kind: str) -> dict[str, Any]:
    """A model whose last norm, outside of all units, is wrapped."""
    model = llama(layers=2)
    wrapped: dict[str, Callable[[nn.Module], nn.Module]] = {"counting": Counting, "drifting": Drifting, "noisy": Noisy}
    model.model.norm = wrapped[kind](model.model.norm)
    made = updates.hilore_engine(lora(model), config(2), **CHECKED)
    made.hilore.force(Action.STORE)
    for number in range(2):
        updates.run_update(made, number)
    return _summary(made)


@pytest.mark.parametrize(
    ("kind", "reason"), [("counting", "changes its buffers"), ("drifting", "ran again on the same inputs")]
)
def test_a_model_that_is_no_function_of_its_inputs_is_not_checked(ranks: RankPool, kind: str, reason: str) -> None:
    for found in ranks.run(f"{HERE}:with_norm", kind=kind):
        assert found["updates"] == 0 and reason in found["passed_over"], found


def test_kernels_that_do_not_give_the_same_twice_are_no_fault(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:with_norm", kind="noisy"):
        assert found["updates"] == 2 and found["largest"] > selfcheck.EXACT_BOUND, found


def pruned() -> dict[str, Any]:
    """Units are stored and pruned in turn, in microbatches with dead rows."""
    made = updates.hilore_engine(lora(llama(layers=3)), config(2, 2), **CHECKED)
    made.hilore.force(updates.alternating(made, Action.RECOMPUTE))
    for number in range(3):
        prune.update(made, number)
    return {**_summary(made), "prunes": made.hilore.microbatch.prunes}


def test_pruned_units_may_add_up_in_another_order(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:pruned"):
        assert found["prunes"] and found["updates"] == 2 and found["largest"] < 1e-6, found


def compressed() -> dict[str, Any]:
    """A forced plan, of whose error nobody has an idea."""
    made = updates.hilore_engine(lora(llama(layers=2)), config(2), **CHECKED)
    made.hilore.force(Treatment.parse("L:mlp=int8"))
    updates.run_update(made, 0)
    return _summary(made)


def test_compression_without_a_prediction_is_not_judged(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:compressed"):
        assert found["updates"] == 0 and "predicted" in found["passed_over"], found


def two_forwards() -> dict[str, Any]:
    """One backward for two forwards, and one for two backwards of one graph."""
    made = updates.hilore_engine(lora(llama(layers=2)), config(2), **CHECKED)
    made.hilore.force(updates.alternating(made, Action.STORE))
    rank = dist.get_rank()
    made.backward(plain_loss(made, *batch(seed=rank)) + plain_loss(made, *batch(seed=2 + rank)))
    made.step()
    one = plain_loss(made, *batch(seed=4 + rank))
    made.backward(one, retain_graph=True)
    made.backward(one)
    made.step()
    return _summary(made)


def test_several_forwards_and_several_backwards_add_up(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:two_forwards"):
        assert found["updates"] == 2 and found["largest"] < 1e-6, found


def starved(stage: int) -> dict[str, Any]:
    """The second rank has no memory for a pass beside the engine."""
    made = updates.hilore_engine(lora(llama(layers=2)), config(stage), **CHECKED)
    made.hilore.force(Action.STORE)
    original, failures, number = plain_gradient.differentiated, [], 0

    def differentiated(*given: Any) -> Any:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*given) if stage < 3 else []

    with patch.object(plain_gradient, "differentiated", differentiated):
        while number < 3 and len(failures) < 3:
            try:
                updates.run_update(made, number)
                number += 1
            except (MemoryExhausted, RankMismatch) as error:
                failures.append(type(error).__name__)
    return {**_summary(made), "failures": failures, "number": number}


@pytest.mark.parametrize("stage", [2, 3])
def test_without_memory_on_one_rank_there_are_no_more_checks_on_any(ranks: RankPool, stage: int) -> None:
    """Under ZeRO-3, where a pass gathers parameters, the update runs once more; elsewhere it goes on."""
    for found in ranks.run(f"{HERE}:starved", stage=stage):
        assert found["number"] == 3 and found["over"] and found["updates"] == 0, found
        assert "memory" in found["passed_over"] and len(found["failures"]) == (stage == 3), found


def patient() -> list[bool]:
    """Whether checks are over, update by update, where every unit is replayed."""
    made = updates.hilore_engine(lora(llama(layers=1)), config(0), selfcheck={"updates": 1})
    made.hilore.force(Action.RECOMPUTE)
    over = []
    for number in range(selfcheck.PATIENCE):
        updates.run_update(made, number)
        over.append(made._hilore_host.selfcheck.over)
    return [*over, made._hilore_host.selfcheck.updates == 1]


def test_what_replays_everything_is_checked_in_the_end(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:patient"):
        assert found == [False] * (selfcheck.PATIENCE - 1) + [True, True]
