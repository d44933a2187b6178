"""The account as data, and DeepSpeed's arithmetic on sizes worked out by hand. Live engines: tests/integration."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Place
from ds_hilore.memory.arithmetic import zero_account
from ds_hilore.memory.gathering import gathered_bytes
from ds_hilore.memory.ledger import ALWAYS, Account, Entry, Item, Moment, workload
from ds_hilore.memory.prize import Prize
from ds_hilore.memory.reduction import gradient_phases, growing_gradients, transient_gradients
from ds_hilore.memory.zero import FlatGroup, OptimizerFacts, Parameter, Scheme, ZeroFacts

BASE = Parameter(1000, trainable=False, module="layer")
ADAPTER = Parameter(10, module="layer")


def facts(stage: int, *parameters: Parameter, **settings: Any) -> ZeroFacts:
    return ZeroFacts(stage, parameters or (BASE, ADAPTER), **{"world_size": 2, "reduce_bucket": 8, **settings})


# -- the account ---------------------------------------------------------------------------------------------------


def test_sums_by_moment_and_place() -> None:
    account = Account(
        (
            Entry(Item.FROZEN, 100),
            Entry(Item.STATE, 40, Place.HOST),
            Entry(Item.GRADIENTS, 7, moments=frozenset({Moment.BACKWARD, Moment.STEP})),
        )
    )
    assert account.at(Moment.REST) == 100 and account.at(Moment.BACKWARD) == 107
    assert account.at(Moment.REST, Place.HOST) == 40
    assert account.rise(Moment.STEP) == 7 and account.rise(Moment.LOSS) == 0
    assert account.peak() == (Moment.BACKWARD, 107)
    assert replace(account, device_is_host=True).at(Moment.REST) == 140


def test_a_microbatch_and_the_planners_rows() -> None:
    account = Account((Entry(Item.FROZEN, 100),)).with_entries(workload(10, 20, 5))
    assert account.planning_bases() == (110, 130, 115)
    assert account.planning_bases(growing_bytes=5) == (110, 130, 110)


def test_gradients_that_grow_with_the_backward() -> None:
    for stage in (0, 1):
        assert growing_gradients(facts(stage)) == {"layer": 40}
        assert growing_gradients(facts(stage, accumulation=2)) == {}
    assert growing_gradients(facts(3)) == {}, "the bucket is there from the start"
    assert growing_gradients(facts(2)) == {"layer": 40}, "a gradient larger than the bucket waits for its end"
    assert growing_gradients(facts(2, reduce_bucket=100)) == {"layer": 40}, "and is there twice while it is copied"
    assert growing_gradients(facts(2, reduce_bucket=100, lazy_pages=True)) == {"layer": 80}


UNITS = tuple(Parameter(10, module=f"layer {i}", unit=True) for i in range(4))


def phases(stage: int, *parameters: Parameter, **settings: Any) -> dict[str | None, Counter[Item]]:
    return {p.module: p.fullest for p in gradient_phases(facts(stage, *parameters, lazy_pages=True, **settings))}


def test_one_bucket_is_sent_when_the_backward_is_over() -> None:
    """ZeRO-2 of two ranks, rank 0: the bucket fills, then a copy of all is sent, then this rank's half is copied."""
    found = phases(2, *UNITS, reduce_bucket=100)
    assert list(found) == ["layer 3", "layer 2", "layer 1", "layer 0", None]
    for filled, module in enumerate(["layer 3", "layer 2", "layer 1", "layer 0"], start=1):
        assert found[module] == {Item.BUCKETS: 40 * filled, Item.GRADIENTS: 40}
    assert +found[None] == {Item.BUCKETS: 160, Item.REDUCED: 160}
    kept = gradient_phases(facts(2, *UNITS, reduce_bucket=100, lazy_pages=True))[-1].highest
    assert kept[Item.PARTITION] == 80


def test_units_under_zero_3_hand_over_when_their_backward_is_over() -> None:
    assert transient_gradients(facts(3, *UNITS)) == {f"layer {i}": 40 for i in range(4)}
    assert transient_gradients(facts(2, *UNITS)) == {}, "they grow: see growing_gradients"
    (over,) = [phase for phase in gradient_phases(facts(3, *UNITS, reduce_bucket=100)) if phase.module is None]
    assert +over.fullest == {Item.GRADIENTS: 80, Item.REDUCED: 160}
    (on_gloo,) = [p for p in gradient_phases(facts(3, *UNITS, reduce_bucket=100, lazy_pages=True)) if p.module is None]
    assert on_gloo.fullest[Item.REDUCED] == 320, "gloo scatters from a copy of its own"


def test_the_second_microbatch_fetches_ahead() -> None:
    """The first only records the order of modules: nothing is fetched before it is used, and everything is let go."""
    settings = {"persistence_threshold": 0, "prefetch_bucket": 1000}
    first, second, later = (
        gathered_bytes(facts(3, *UNITS, stepped=stepped, accumulation=accumulation, **settings))
        for stepped, accumulation in ((False, 1), (False, 2), (True, 1))
    )
    assert first.forward < second.forward == later.forward == 160


def test_small_buckets_are_sent_beside_activations() -> None:
    """Buckets of two gradients. What is for one rank is sent without a copy; rank 1 has layers 2 and 3."""
    found = phases(2, *UNITS, reduce_bucket=20, rank=1)
    assert +found["layer 1"] == {Item.BUCKETS: 80, Item.PARTITION: 80, Item.GRADIENTS: 40}
    odd = gradient_phases(facts(2, *UNITS[:3], reduce_bucket=20, rank=1))
    assert [phase.highest[Item.REDUCED] for phase in odd] == [0, 0, 80, 0], "layer 1 is for both ranks"


def test_an_embedding_comes_when_activations_are_gone() -> None:
    embedding = Parameter(50, module="embedding")
    head = Parameter(50, module="head")
    for stage in (0, 1, 2):
        one = zero_account(facts(stage, embedding, *UNITS, head, reduce_bucket=1000, lazy_pages=True))
        none = zero_account(facts(stage, *UNITS, head, reduce_bucket=1000, lazy_pages=True))
        assert one.rise(Moment.BACKWARD) == none.rise(Moment.BACKWARD)
        assert one.rise(Moment.REDUCE) > none.rise(Moment.REDUCE)


@pytest.mark.parametrize("stage", [2, 3])
@given(
    numels=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    bucket=st.integers(1, 200),
    world=st.integers(1, 3),
    switches=st.fixed_dictionaries(
        {
            name: st.booleans()
            for name in ("contiguous_gradients", "overlap_comm", "reduce_scatter", "offload_optimizer", "stepped")
        }
    ),
)
def test_gradients_on_their_way(
    stage: int, numels: list[int], bucket: int, world: int, switches: dict[str, bool]
) -> None:
    """Whatever the bucket: no line is negative, growth adds up to the fullest instant, and pages that nothing was
    written to only ever take away."""
    parameters = [Parameter(numel, module=f"layer {i}", unit=True) for i, numel in enumerate(numels)]
    lazy, eager = (
        facts(stage, *parameters, world_size=world, reduce_bucket=bucket, lazy_pages=pages, **switches)
        for pages in (True, False)
    )
    found = gradient_phases(lazy)
    assert all(count >= 0 for phase in found for count in (phase.fullest | phase.highest).values())
    units = [phase.bytes for phase in found if phase.module is not None]
    assert sum(growing_gradients(lazy).values()) == max(units)
    for moment in Moment:
        assert zero_account(lazy).at(moment, Place.DEVICE) >= 0
    if switches["stepped"] and stage == 2:  # under ZeRO-3, gloo needs a copy that others do not
        sums = [[p.fullest.total() for p in gradient_phases(f)] for f in (lazy, eager)]
        assert all(written <= whole for written, whole in zip(*sums, strict=True))


def test_peak_of_an_update_is_that_of_its_fullest_moment() -> None:
    account = Account((Entry(Item.FROZEN, 100), Entry(Item.OPTIMIZER_STEP, 50, moments=frozenset({Moment.STEP}))))
    assert account.update_peak(120) == 150
    assert account.update_peak(200) == 200
    assert account.update_peak(200, level_bytes=1000) == 1050


def test_what_a_measured_level_holds_besides() -> None:
    account = Account((Entry(Item.FROZEN, 100),))
    assert account.at_level(130).of(Item.PROCESS) == 30 and account.at_level(130).at(Moment.STEP) == 130
    assert account.at_level(90).of(Item.PROCESS) == 0


def test_lines_are_in_order_and_json_adds_up() -> None:
    account = Account((Entry(Item.STATE, 3), Entry(Item.FROZEN, 5), Entry(Item.STATE, 4), Entry(Item.LOSS, 0)))
    assert [(line.item, line.bytes[Moment.REST]) for line in account.lines()] == [(Item.FROZEN, 5), (Item.STATE, 7)]
    data = account.as_json()
    for moment in Moment:
        assert data["total"]["device"][moment.value] == sum(line[moment.value] for line in data["lines"]) == 12
    assert data["unknown"] == []


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(UsageError, match="frozen parameters"):
        Entry(Item.FROZEN, -1)


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_stage_0_by_hand() -> None:
    account = zero_account(facts(0, optimizer=OptimizerFacts(copies_of_largest=2)))
    assert account.of(Item.FROZEN) == 4000 and account.of(Item.TRAINABLE) == 40 and account.of(Item.STATE) == 80
    assert account.of(Item.MASTER) == account.of(Item.GRADIENTS) == 0
    assert account.of(Item.GRADIENTS, Moment.BACKWARD) == account.of(Item.GRADIENTS, Moment.STEP) == 40
    assert account.of(Item.OPTIMIZER_STEP, Moment.STEP) == 80


def test_stage_2_by_hand() -> None:
    account = zero_account(facts(2))
    assert account.of(Item.TRAINABLE) == 12 * 4, "10 elements are padded to two for each of two ranks"
    assert account.of(Item.MASTER) == 6 * 4 and account.of(Item.STATE) == 2 * 6 * 4
    assert account.of(Item.BUCKETS) == 0 and account.of(Item.BUCKETS, Moment.BACKWARD) == 8 * 4
    assert account.of(Item.REDUCED, Moment.REDUCE) == 10 * 4, "sent in two pieces, one for each rank"
    (over,) = [phase for phase in gradient_phases(facts(2)) if phase.module is None]
    assert over.highest[Item.PARTITION] == 10 * 4, "whole gradients of what reaches into the partition"
    again = zero_account(facts(2, accumulation=3))
    assert again.of(Item.PARTITION, Moment.FORWARD) == again.of(Item.PARTITION, Moment.BACKWARD) == 40


def test_stage_3_by_hand() -> None:
    account = zero_account(facts(3, persistence_threshold=10, prefetch_bucket=0, max_reuse_distance=0))
    assert account.of(Item.FROZEN) == 500 * 4 and account.of(Item.TRAINABLE) == account.of(Item.MASTER) == 5 * 4
    assert account.of(Item.STATE) == 2 * 5 * 4 and account.of(Item.PARTITION) == 5 * 4
    assert account.of(Item.BUCKETS) == 8 * 4
    assert account.of(Item.PERSISTENT) == 10 * 4, "whole, beside its shard"
    assert account.of(Item.GATHERED, Moment.FORWARD) == account.of(Item.GATHERED, Moment.BACKWARD) == 1000 * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_is_on_the_host(stage: int) -> None:
    account = zero_account(facts(stage, offload_optimizer=True))
    for item in (Item.MASTER, Item.STATE, Item.MASTER_GRADIENTS):
        assert account.of(item, place=Place.DEVICE) == 0 < account.of(item, place=Place.HOST)
    assert account.of(Item.OPTIMIZER_STEP, Moment.STEP, Place.DEVICE) == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_update_has_no_state_until_it_steps(stage: int) -> None:
    first, later = zero_account(facts(stage, stepped=False)), zero_account(facts(stage))
    assert first.of(Item.STATE) == 0 < first.of(Item.STATE, Moment.STEP) == later.of(Item.STATE)


def test_untouched_pages_of_a_bucket_cost_nothing_on_the_host() -> None:
    whole, touched = (zero_account(facts(2, reduce_bucket=1000, lazy_pages=lazy)) for lazy in (False, True))
    assert whole.of(Item.BUCKETS, Moment.BACKWARD) == 4000
    assert touched.of(Item.BUCKETS, Moment.BACKWARD) == 40


def test_two_buckets_where_communication_overlaps() -> None:
    assert zero_account(facts(2, overlap_comm=True)).of(Item.BUCKETS, Moment.BACKWARD) == 2 * 8 * 4


@pytest.mark.parametrize(
    ("stage", "settings", "scheme"),
    [
        (0, {}, Scheme.TORCH),
        (0, {"half": True}, Scheme.HALF),
        (1, {}, Scheme.PARTITIONED),
        (1, {"half": True}, Scheme.BF16),
        (1, {"half": True, "accumulation_bytes": 2}, Scheme.PARTITIONED),
        (1, {"half": True, "offload_optimizer": True}, Scheme.PARTITIONED),
        (2, {"half": True}, Scheme.PARTITIONED),
        (3, {}, Scheme.SHARDED),
    ],
)
def test_who_holds_what(stage: int, settings: dict[str, Any], scheme: Scheme) -> None:
    assert facts(stage, **settings).scheme is scheme


def test_impossible_facts_are_refused() -> None:
    with pytest.raises(UsageError, match="stages 0 to 3"):
        facts(4)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        facts(1, rank=2)


def test_what_is_unknown_is_handed_on() -> None:
    assert zero_account(facts(1, unknown=("effect of x",))).unknown == ("effect of x",)


PARAMETERS = st.lists(
    st.builds(Parameter, st.integers(1, 500), st.booleans(), st.just(4), st.sampled_from("abcd"), st.just(True)),
    min_size=1,
    max_size=12,
).filter(lambda listed: any(p.trainable for p in listed))
SETTINGS = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 5),
        "reduce_bucket": st.integers(1, 2000),
        "accumulation": st.integers(1, 3),
        "overlap_comm": st.booleans(),
        "contiguous_gradients": st.booleans(),
        "offload_optimizer": st.booleans(),
        "persistence_threshold": st.integers(0, 100),
        "prefetch_bucket": st.integers(0, 1000),
        "max_reuse_distance": st.integers(0, 3000),
        "stepped": st.booleans(),
        "lazy_pages": st.booleans(),
    }
)


@given(st.integers(0, 3), PARAMETERS, SETTINGS)
def test_ranks_together_hold_every_element_of_masters_once(
    stage: int, parameters: list[Parameter], settings: dict[str, Any]
) -> None:
    ranks = [zero_account(facts(stage, *parameters, **settings, rank=r)) for r in range(settings["world_size"])]
    trainable = sum(p.numel for p in parameters if p.trainable)
    padding = 2 * settings["world_size"] * sum(1 for p in parameters if p.trainable)
    if stage > 0:
        held = sum(account.of(Item.MASTER) for account in ranks)
        assert 4 * trainable <= held <= 4 * (trainable + padding)
    for account in ranks:
        assert all(account.at(moment) >= account.at(Moment.REST) for moment in Moment)


@given(PARAMETERS, st.integers(1, 5))
def test_partitions_cover_a_flat_group(parameters: list[Parameter], world_size: int) -> None:
    groups = [FlatGroup(tuple(parameters), world_size, rank) for rank in range(world_size)]
    assert {id(p) for group in groups for p in group.members} == {id(p) for p in parameters}
    total = sum(p.numel for p in parameters)
    assert sum(group.partition for group in groups) - sum(group.padding for group in groups) == total


@given(PARAMETERS, SETTINGS)
def test_gathering_holds_a_unit_and_no_more_than_the_model(
    parameters: list[Parameter], settings: dict[str, Any]
) -> None:
    settings = settings | {"world_size": 2, "persistence_threshold": 0}
    given_facts = facts(3, *parameters, **settings)
    found = gathered_bytes(given_facts)
    largest = max(sum(p.bytes for p in module) for module in given_facts.modules().values())
    whole = sum(p.bytes for p in parameters)
    assert largest <= found.forward <= found.forward_with_copies <= 2 * whole
    assert found.forward <= whole and found.backward <= whole


def test_a_model_within_the_reuse_distance_stays_gathered() -> None:
    parameters = [Parameter(100, module=name, leaf=True) for name in "abcd"]
    near = gathered_bytes(facts(3, *parameters, persistence_threshold=0, prefetch_bucket=0, max_reuse_distance=10**9))
    far = gathered_bytes(facts(3, *parameters, persistence_threshold=0, prefetch_bucket=0, max_reuse_distance=0))
    first = gathered_bytes(facts(3, *parameters, persistence_threshold=0, stepped=False))
    assert near.forward == near.backward == 4 * 400
    assert far.forward == first.forward == 400


# -- what there is to win ------------------------------------------------------------------------------------------


def test_prize() -> None:
    prize = Prize(200_000_000, 150_000_000, 10.0, 2.5, 1.0, 190_000_000)
    assert prize.free_bytes == 50_000_000 and prize.replay_share == 0.25 and prize.planned_share == 0.4
    assert str(prize).splitlines() == [
        "free under the budget of 200 MB: 50 MB (replaying every unit peaks at 150 MB)",
        "recomputation is 25.0% of the update (2.5 of 10 s)",
        "the plan expects to take 40% of that, at a peak of 190 MB",
    ]
    assert prize.as_json()["free_bytes"] == 50_000_000


def test_prize_where_nothing_fits() -> None:
    prize = Prize(100_000_000, 150_000_000, 10.0, 2.5, 0.0, 150_000_000)
    assert prize.lines()[0].startswith("the budget of 100 MB is 50 MB less than replaying every unit needs")


def test_prize_without_times() -> None:
    prize = Prize(2, 1, 0.0, 0.0, 0.0, 1)
    assert prize.replay_share == prize.planned_share == 0.0


def test_entries_default_to_all_moments() -> None:
    assert Entry(Item.FROZEN, 1).moments == ALWAYS
