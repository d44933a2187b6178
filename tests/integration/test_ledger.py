"""The ledger's arithmetic against live engines on two ranks: ZeRO 0-3, offload, adapters, accumulation.

Three accounts of an engine are compared with what arithmetic says of its configuration: before its first update and
after it (to the byte), and while it runs, at every hook of forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from ds_hilore.core.types import Place
from ds_hilore.integration.ledger import account_of
from ds_hilore.integration.zero_facts import facts_of, facts_of_config
from ds_hilore.memory.arithmetic import zero_account
from ds_hilore.memory.ledger import Account, Item, Moment
from ds_hilore.memory.reduction import gradient_phases
from ds_hilore.memory.zero import ZeroFacts
from tests.engines import config, engine
from tests.integration import updates
from tests.models import batch, decoder_layers, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_ledger"

#: What stays between updates.
LASTING = (
    Item.FROZEN,
    Item.TRAINABLE,
    Item.PERSISTENT,
    Item.MASTER,
    Item.STATE,
    Item.MASTER_GRADIENTS,
    Item.STAGING,
    Item.BUCKETS,
    Item.GRADIENTS,
)
#: What comes and goes within a microbatch.
PASSING = (Item.GRADIENTS, Item.PARTITION, Item.BUCKETS, Item.GATHERED)

Sizes = dict[str, int]

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
EVERY = [(adapters, accumulation) for adapters in (True, False) for accumulation in (1, 3)]
CASES = [
    (stage, offload, adapters, accumulation)
    for stage, offload in [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "both")]
    for adapters, accumulation in EVERY
]
CASES += [(stage, "optimizer", *case) for stage in (1, 3) for case in ((True, 3), (False, 1))]


def sizes(account: Account, items: tuple[Item, ...], moment: Moment = Moment.REST) -> Sizes:
    """Bytes by "item @ place", zeros left out."""
    found = {f"{i.value} @ {place.value}": account.of(i, moment, place) for i in items for place in Place}
    return {name: count for name, count in found.items() if count}


@contextmanager
def watched(made: Any, seen: dict[str, Counter[str]]) -> Iterator[None]:
    """Notes the highest bytes of each passing item at every hook of forward and backward."""

    def note(when: str) -> None:
        if when in seen:
            seen[when] |= Counter(sizes(account_of(made), PASSING))

    handles = []
    for module in made.module.modules():
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_forward_pre_hook(lambda *_: note("forward")))
            handles.append(module.register_full_backward_pre_hook(lambda *_: note("backward")))
    for parameter in made.module.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(lambda _: note("backward")))
    yield
    for handle in handles:
        handle.remove()


def most_in_backward(account: Account, facts: ZeroFacts) -> Counter[str]:
    """The most of each passing item: lines of the account are those of one instant, the fullest."""
    most = Counter(sizes(account, PASSING, Moment.BACKWARD)) | Counter(sizes(account, PASSING, Moment.REDUCE))
    passing: Counter[Item] = Counter()
    for phase in gradient_phases(facts):
        passing |= phase.highest
    there = sizes(account, PASSING, Moment.FORWARD)
    for item in PASSING:
        name = f"{item.value} @ {Place.DEVICE.value}"
        if passing[item]:
            most[name] = max(most[name], passing[item] + there.get(name, 0))
    return +most


def accounts(
    stage: int, zero: dict[str, Any], adapters: bool = True, accumulation: int = 1, half: dict[str, Any] | None = None
) -> dict[str, Any]:
    """(arithmetic, live) by moment; for "forward" and "backward", of the last microbatch of the second update.

    Args:
        half: further blocks of the configuration; the model then runs in bfloat16.
    """
    settings = config(stage, accumulation, reduce_bucket_size=20_000) | (half or {})
    settings["zero_optimization"] |= zero
    model = llama(layers=2)
    model = lora(model) if adapters else model
    layers = decoder_layers(model) if stage == 3 else None
    world = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
    planned = facts_of_config(settings, model, layers or (), **world, device="cpu", stepped=False)
    made = engine(model, settings, layers)

    def expected(stepped: bool) -> Account:
        return zero_account(replace(facts_of(made, stepped=stepped), lazy_pages=False))

    first, later = expected(False), expected(True)
    found: dict[str, Any] = {"unknown": [*later.unknown, *account_of(made).unknown]}
    found["planned"] = zero_account(planned).as_json(), zero_account(facts_of(made)).as_json()
    found["start"] = sizes(first, LASTING), sizes(account_of(made), LASTING)
    updates.run_update(made, 0)
    found["rest"] = sizes(later, LASTING), sizes(account_of(made), LASTING)
    for k in range(accumulation - 1):
        updates.run_one_microbatch(made, k)
    if accumulation > 1:
        found["carried"] = sizes(later, PASSING[:2], Moment.FORWARD), sizes(account_of(made), PASSING[:2])
    seen: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    with watched(made, seen):
        made.backward(plain_loss(made, *batch(seed=accumulation - 1)))
    most = most_in_backward(later, replace(facts_of(made), lazy_pages=False))
    # Under ZeRO-2 the new gradients stand beside the accumulated ones only until they are added.
    kept = sizes(later, (Item.PARTITION,), Moment.FORWARD if stage == 2 and accumulation > 1 else Moment.REDUCE)
    if stage == 2 and accumulation == 1:
        kept = {name: count for name, count in most.items() if name.startswith(Item.PARTITION.value)}
    found["reduced"] = kept, sizes(account_of(made), (Item.PARTITION,))
    found["forward"] = sizes(later, PASSING, Moment.FORWARD), dict(seen["forward"])
    found["backward"] = dict(most), dict(seen["backward"])
    return found


def check(found: dict[str, Any]) -> None:
    """What lasts is equal to the byte; what passes is never more than arithmetic says, buckets and gathered equal."""
    assert found["unknown"] == []
    for moment in ("planned", "start", "rest", "carried", "reduced"):
        if moment in found:
            expected, held = found[moment]
            assert held == expected, moment
    for moment in ("forward", "backward"):
        expected, held = found[moment]
        over = {name: (held[name], expected.get(name, 0)) for name in held if held[name] > expected.get(name, 0)}
        assert not over, f"{moment}: held more than arithmetic says: {over}"
        for name in expected:
            if name.startswith((Item.BUCKETS.value, Item.GATHERED.value)):
                assert held.get(name, 0) == expected[name], (moment, name)


@pytest.mark.parametrize(("stage", "offload", "adapters", "accumulation"), CASES)
def test_arithmetic_is_what_engines_hold(
    ranks: RankPool, stage: int, offload: str, adapters: bool, accumulation: int
) -> None:
    zero = OFFLOADS[offload]
    for found in ranks.run(f"{HERE}:accounts", stage=stage, zero=zero, adapters=adapters, accumulation=accumulation):
        check(found)


BF16 = {"bf16": {"enabled": True}}
WIDE = BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("stage", "zero", "half"),
    [
        (0, {}, BF16),  # FP16_UnfusedOptimizer
        (1, {}, BF16),
        (1, {}, WIDE),  # BF16_Optimizer
        (2, {}, WIDE),  # fp32 partitions that are filled at once
        (2, OFFLOADS["optimizer"], WIDE),
        (3, {}, WIDE),
        (2, {"overlap_comm": True}, None),
        (2, {"contiguous_gradients": False}, None),
        (2, {"reduce_scatter": False}, None),
        (3, {"contiguous_gradients": False, "stage3_param_persistence_threshold": 1000}, None),
        (3, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, None),
        (3, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 5000}, None),
        (3, {"stage3_max_reuse_distance": 60_000, "stage3_prefetch_bucket_size": 0, "sub_group_size": 3000}, None),
    ],
)
def test_settings_that_change_what_is_held(
    ranks: RankPool, stage: int, zero: dict[str, Any], half: dict[str, Any] | None
) -> None:
    for found in ranks.run(f"{HERE}:accounts", stage=stage, zero=zero, half=half, accumulation=2):
        check(found)


def unknown(optimizer: str) -> tuple[str, ...]:
    settings = config(1) | {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    made = engine(llama(layers=1), settings | {"zero_allow_untested_optimizer": True})
    return zero_account(facts_of(made)).unknown


def test_an_optimizer_that_is_not_known_is_named(ranks: RankPool) -> None:
    assert ranks.run(f"{HERE}:unknown", optimizer="Adagrad")[0] == ("state and temporaries of optimizer Adagrad",)
