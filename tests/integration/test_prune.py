"""Pruned replays on two ranks: other dead rows on each, the gradients of DeepSpeed without checkpointing, no hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.recovery.prune import PrunedCall
from tests.collectives import Record, recorded
from tests.engines import config, difference, gradients
from tests.integration import updates
from tests.models import VOCAB
from tests.ranks import RankPool

HERE = "tests.integration.test_prune"
TOKENS, PROMPT = 32, 4
#: Rows' ends by rank; 0 is a dead row.
LENGTHS = ([32, 0, 20, 0], [32, 32, 0, 9])


@dataclass(frozen=True)
class Sample:
    """A microbatch of this rank. `mask` covers the predicted tokens, [rows, tokens - 1]."""

    ids: Tensor
    advantages: Tensor
    mask: Tensor


def sample(number: int, lengths: list[int] | None = None) -> Sample:
    """Rows that end at `lengths`; a dead row has advantage 0, and tokens to optimise."""
    rank = dist.get_rank()
    lengths = LENGTHS[rank] if lengths is None else lengths
    generator = torch.Generator().manual_seed(100 * rank + number)
    ids = torch.randint(0, VOCAB, (len(lengths), TOKENS), generator=generator)
    advantages = torch.randn(len(lengths), 1, generator=generator)
    mask = torch.zeros(len(lengths), TOKENS - 1)
    for row, end in enumerate(lengths):
        mask[row, PROMPT : (end or TOKENS) - 1] = 1
        if end == 0:
            advantages[row] = 0
    return Sample(ids, advantages, mask)


def logps_of(made: Any, batch: Sample) -> tuple[Tensor, Any]:
    output = made(input_ids=batch.ids, use_cache=False)
    logits = output.logits[:, :-1].float().log_softmax(-1)
    return logits.gather(-1, batch.ids[:, 1:, None]).squeeze(-1), output


def policy_loss(made: Any, batch: Sample) -> Tensor:
    logps, _ = logps_of(made, batch)
    return -(logps * batch.advantages * batch.mask).sum() / 50


Loss = Callable[[Any, Sample], Tensor]


def update(
    made: Any, number: int, loss: Loss = policy_loss, announce: bool = True, lengths: list[int] | None = None
) -> dict[str, Tensor]:
    """One update; ours is told its rows before."""
    samples = [sample(10 * number + k, lengths) for k in range(made.gradient_accumulation_steps())]
    if announce and hasattr(made, "hilore"):
        ds_hilore.begin_update([b.advantages for b in samples], [b.mask for b in samples], 50, engine=made)
    found: dict[str, Tensor] = {}
    for batch in samples:
        torch.manual_seed(number)
        made.backward(loss(made, batch))
        if made.is_gradient_accumulation_boundary():
            found = gradients(made)
        made.step()
    return found


@dataclass
class Watch:
    """Counts pruned calls, and the share of all positions that each of them ran."""

    shares: list[float]

    @classmethod
    def on(cls, patch: pytest.MonkeyPatch) -> Watch:
        watch = cls([])
        differentiate = PrunedCall.differentiate

        def counted(call: PrunedCall, *args: Any) -> Any:
            given = differentiate(call, *args)
            watch.shares.append(call.pruning.live_share or 0.0)
            return given

        patch.setattr(PrunedCall, "differentiate", counted)
        return watch


def compared(stage: int, adapters: bool = True, accumulation: int = 1, mixed: bool = False, **zero: Any) -> Any:
    """Three updates. `mixed`: rank 0 replays every unit, rank 1 stores every unit."""
    reference, ours = updates.pair(
        lambda: updates.build("llama", adapters), config(stage, accumulation, lr=0.0, **zero)
    )
    ours.hilore.force(Action.STORE if mixed and dist.get_rank() == 1 else Action.RECOMPUTE)
    errors, rows = [], 0.0
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch.on(patch)
        for number in range(3):
            expected = update(reference, number)
            errors.append(difference(expected, update(ours, number)))
            rows += sum(float(value.abs().sum()) for value in expected.values())
    return {"errors": errors, "shares": watch.shares, "reads": ours.hilore.pruner.reads, "size": rows}


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_dead_rows_on_each_rank(ranks: RankPool, stage: int, adapters: bool) -> None:
    for rank, seen in enumerate(ranks.run(f"{HERE}:compared", stage=stage, adapters=adapters)):
        assert max(seen["errors"]) < 1e-6, seen
        assert seen["size"] > 0
        # three layers; the first call of the class, in the first update, shows that it can be pruned
        assert len(seen["shares"]) == 3 * 3 - 1
        assert max(seen["shares"]) <= (0.5, 0.8)[rank]
        assert seen["reads"] == 3


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_prunes_and_the_other_stores(ranks: RankPool, stage: int) -> None:
    """Small buckets: gradients reach them in one order on both ranks, or they would be mixed up (rule P4)."""
    first, second = ranks.run(
        f"{HERE}:compared", stage=stage, mixed=True, adapters=False, accumulation=2, reduce_bucket_size=20_000
    )
    assert max(*first["errors"], *second["errors"]) < 1e-6
    assert first["shares"] and not second["shares"]


def dead_rank(stage: int, adapters: bool) -> Any:
    """Rank 0 has nothing to learn in its second and third update."""
    reference, ours = updates.pair(lambda: updates.build("llama", adapters), config(stage, lr=0.0))
    ours.hilore.force(Action.RECOMPUTE)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch.on(patch)
        for number in range(3):
            lengths = [0, 0, 0, 0] if number > 0 and dist.get_rank() == 0 else None
            expected = update(reference, number, lengths=lengths)
            errors.append(difference(expected, update(ours, number, lengths=lengths)))
    return {"errors": errors, "shares": watch.shares}


@pytest.mark.parametrize(("stage", "adapters"), [(1, True), (2, False), (3, True), (3, False)])
def test_a_rank_without_anything_live(ranks: RankPool, stage: int, adapters: bool) -> None:
    """It replays nothing, and delivers zeros for every parameter: nobody hangs."""
    first, second = ranks.run(f"{HERE}:dead_rank", stage=stage, adapters=adapters)
    assert max(*first["errors"], *second["errors"]) < 1e-6
    assert first["shares"][2:] == [0.0] * 6 and min(second["shares"]) > 0


def schedule(stage: int, announce: bool) -> list[Record]:
    made = updates.hilore_engine(updates.build(), config(stage))
    made.hilore.force(Action.RECOMPUTE)
    update(made, 0, announce=announce)
    with recorded() as records:
        for number in (1, 2):
            update(made, number, announce=announce)
    return list(records)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_schedule_does_not_depend_on_what_is_pruned(ranks: RankPool, stage: int) -> None:
    pruned = ranks.run(f"{HERE}:schedule", stage=stage, announce=True)
    plain = ranks.run(f"{HERE}:schedule", stage=stage, announce=False)
    assert pruned[0] == pruned[1] == plain[0] == plain[1]
    assert pruned[0]


def planned() -> Any:
    """Updates without a forced plan, at a budget that stores nothing."""
    reference, ours = updates.pair(updates.build, config(2, lr=0.0), memory_budget="1.0x", planner={"solver": "greedy"})
    errors, pruned, settled, replayed = [], [0], [], []
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch.on(patch)
        for number in range(6):
            settled.append(ours.hilore.learning.settled)
            errors.append(difference(update(reference, number), update(ours, number)))
            replayed.append(updates.actions(ours).count(Action.RECOMPUTE))
            pruned.append(len(watch.shares))
    return {"errors": errors, "pruned": pruned, "settled": settled, "replayed": replayed}


def test_planned_updates_prune_once_replays_were_measured(ranks: RankPool) -> None:
    """While the costs of replays are measured, they run whole; the first pruned call of the class is its proof."""
    for seen in ranks.run(f"{HERE}:planned"):
        assert max(seen["errors"]) < 1e-6
        first = seen["settled"].index(True)
        assert first >= 3 and seen["pruned"][first] == 0
        per_update = [after - before for before, after in zip(seen["pruned"][first:], seen["pruned"][first + 1 :])]
        assert per_update == [replayed - (k == 0) for k, replayed in enumerate(seen["replayed"][first:])]
        assert sum(per_update) > 0
