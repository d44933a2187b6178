"""The analytic cost model: worked examples of the design, and what must hold of any layer.

Real layers are compared with it in tests/integration/test_architecture.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.errors import UsageError
from ds_hilore.core.types import Action, Shape, UnitId
from ds_hilore.profiling.cost_model import (
    DeviceSpeed,
    Work,
    analytic_profile,
    head_costs,
    layer_costs,
    projections,
    score_flops,
    unit_rates,
)
from ds_hilore.profiling.fit import Rate
from ds_hilore.profiling.geometry import Adapters, Attention, Experts, HeadGeometry, LayerGeometry, Norm
from ds_hilore.profiling.saved import saved_tensors, total

#: The layer of design fact 11: SmolLM2-135M's, in float32.
SMALL = LayerGeometry(576, 1536, query_heads=9, kv_heads=3, head_dim=64, value_bytes=4)
LORA = replace(SMALL, adapters=Adapters.everywhere(16))


@st.composite
def layers(draw: st.DrawFn) -> LayerGeometry:
    kv, groups = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    rank = st.integers(0, 64)
    adapters = draw(
        st.none()
        | st.builds(
            Adapters,
            q=rank,
            k=rank,
            v=rank,
            o=rank,
            gate=rank,
            up=rank,
            down=rank,
            value_bytes=st.sampled_from([2, 4]),
            dropout=st.booleans(),
        )
    )
    experts = st.none() | st.builds(Experts, st.integers(2, 64), st.integers(1, 8), st.integers(1, 512))
    return LayerGeometry(
        hidden=draw(st.integers(1, 512)),
        intermediate=draw(st.integers(1, 2048)),
        query_heads=kv * groups,
        kv_heads=kv,
        head_dim=draw(st.integers(1, 128)),
        gated=draw(st.booleans()),
        experts=draw(experts),
        adapters=adapters,
        value_bytes=draw(st.sampled_from([2, 4])),
        norm=draw(st.sampled_from(Norm)),
        qk_norm=draw(st.booleans()),
        post_norms=draw(st.booleans()),
        attention=draw(st.sampled_from(Attention)),
        window=draw(st.none() | st.integers(1, 4096)),
        fused_qkv=draw(st.booleans()),
        gated_function=draw(st.booleans()),
    )


SHAPES = st.builds(Shape, st.integers(1, 16), st.integers(1, 8192))


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "saved", "base"), [(LORA, 10_107, 5_883), (SMALL, 11_147, 5_771)])
def test_worked_examples_of_design_fact_11(layer: LayerGeometry, saved: int, base: int) -> None:
    """Values per token that torch saves, and those left when what can be derived is left out; the input included."""
    tensors = saved_tensors(layer)
    assert sum(tensor.values for tensor in tensors) == saved
    assert sum(tensor.values for tensor in tensors if not tensor.derivable) == base
    costs = layer_costs(layer)
    assert costs.input_bytes.per_token == 4 * 576
    assert costs.torch_bytes.per_token == 4 * (saved - 576)
    assert costs.base_bytes.per_token == 4 * (base - 576)


def test_the_share_of_design_fact_13() -> None:
    """A replayed bundle with cheap recipes only: both norm outputs are derived, the MLP's wide tensors are held."""
    assert layer_costs(LORA).replayed_bytes.per_token == 4 * (10_107 - 576 - 2 * 576)


def test_what_running_a_layer_needs_at_once() -> None:
    """Design fact 11's layer at its MLP's product: gate, up and product, four of the hidden size, LoRA's middles."""
    assert layer_costs(LORA).forward_bytes.per_token == 4 * (3 * 1536 + 4 * 576 + 3 * 16)
    assert layer_costs(replace(SMALL, gated=False)).forward_bytes.per_token == 4 * (2 * 1536 + 4 * 576)
    sparse = layer_costs(replace(SMALL, experts=Experts(8, 2, 100, shared_width=50)))
    assert sparse.forward_bytes.per_token == 4 * (3 * 250 + (4 + 2) * 576)
    shape = Shape(2, 128)
    profile = analytic_profile(UnitId("u"), "Layer", layer_costs(LORA), shape, DeviceSpeed(1e14, 1e12))
    replay, store = profile.variant("R"), profile.variant("H")
    assert replay.forward_bytes == layer_costs(LORA).forward_bytes.of(shape)
    assert store.held_bytes + store.forward_bytes >= replay.held_bytes + replay.forward_bytes


def test_a_gated_function_saves_two_wide_tensors_and_their_product() -> None:
    plain, fused = layer_costs(LORA), layer_costs(replace(LORA, gated_function=True))
    assert plain.torch_bytes.per_token - fused.torch_bytes.per_token == 4 * 1536
    assert plain.base_bytes == fused.base_bytes
    assert plain.gradient_bytes == fused.gradient_bytes, "of the adapter, of the frozen weight, and their sum"
    plain, fused = layer_costs(SMALL), layer_costs(replace(SMALL, gated_function=True))
    assert plain.gradient_bytes.per_token - fused.gradient_bytes.per_token == 4 * 1536
    assert fused.gradient_bytes.per_token == 4 * (1536 + 576), "and the one that came in"


@pytest.mark.parametrize(
    ("attention", "per_token_length"),
    [(Attention.SDPA, 0), (Attention.FLASH, 0), (Attention.SDPA_MASK, 2), (Attention.EAGER, 9 * (4 + 2))],
)
def test_what_grows_with_the_length(attention: Attention, per_token_length: int) -> None:
    """A mask in the model's dtype; probabilities of every head in float32, and their cast, which can be derived."""
    costs = layer_costs(replace(LORA, attention=attention, value_bytes=2))
    assert costs.torch_bytes.per_token_length == per_token_length
    assert costs.base_bytes.per_token_length == (9 * 4 if attention is Attention.EAGER else per_token_length)


@given(layers(), SHAPES)
def test_base_is_part_of_what_torch_saves(layer: LayerGeometry, shape: Shape) -> None:
    costs = layer_costs(layer)
    assert 0 < costs.base_bytes.of(shape) <= costs.torch_bytes.of(shape)
    assert costs.base_bytes.of(shape) <= costs.replayed_bytes.of(shape) <= costs.torch_bytes.of(shape)
    both = costs.torch_bytes + costs.input_bytes
    assert total(saved_tensors(layer)) == both
    assert all(tensor.values > 0 for tensor in saved_tensors(layer))


@given(layers())
def test_names_of_saved_tensors_are_told_apart(layer: LayerGeometry) -> None:
    names = [tensor.name for tensor in saved_tensors(layer)]
    assert len(set(names)) == len(names)


# -- work ----------------------------------------------------------------------------------------------------------


def test_forward_flops_by_hand() -> None:
    weights = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    inputs = 576 + 576 + 576 + 576 + 576 + 576 + 1536
    outputs = 576 + 192 + 192 + 576 + 1536 + 1536 + 576
    full, lora = layer_costs(SMALL), layer_costs(LORA)
    assert full.forward.flops == Rate(2.0 * weights, 2.0 * 576)  # causal: half the scores
    assert lora.forward.flops == Rate(2.0 * weights + 2.0 * 16 * (inputs + outputs), 2.0 * 576)
    assert full.backward.flops == Rate(4.0 * weights, 5.0 * 576)
    assert lora.backward.flops == Rate(2.0 * weights + 4.0 * 16 * (inputs + outputs), 5.0 * 576)


def test_a_replay_leaves_the_last_projection_out() -> None:
    """Design fact 14: dead under LoRA, never begun under full fine-tuning, needed where a norm follows."""
    down = 2.0 * 1536 * 576
    full, lora = layer_costs(SMALL), layer_costs(LORA)
    assert full.replay == full.replay_with_dead
    assert full.forward.flops.per_token - full.replay.flops.per_token == down
    assert lora.replay_with_dead.flops.per_token - lora.replay.flops.per_token == down
    only_attention = layer_costs(replace(SMALL, adapters=Adapters(q=16, v=16)))
    assert only_attention.replay == only_attention.replay_with_dead
    gemma = layer_costs(replace(LORA, post_norms=True))
    assert gemma.replay == gemma.replay_with_dead == gemma.forward


def test_the_dead_share_of_design_fact_14() -> None:
    """27 to 29 % of a layer's products on shapes of 3 to 8 billion parameters: Qwen2.5-3B and Llama-3.1-8B."""
    for hidden, intermediate, heads, kv in ((2048, 11008, 16, 2), (4096, 14336, 32, 8)):
        layer = LayerGeometry(hidden, intermediate, heads, kv, 128, adapters=Adapters.everywhere(16))
        costs = layer_costs(layer)
        dead = costs.replay_with_dead.flops.per_token - costs.replay.flops.per_token
        assert 0.26 <= dead / costs.forward.flops.per_token <= 0.30


def test_experts_count_once_for_each_that_a_token_is_sent_to() -> None:
    dense = layer_costs(SMALL)
    two = layer_costs(replace(SMALL, experts=Experts(8, 2, 1536)))
    router, mlp = 2.0 * 576 * 8, 2.0 * 3 * 576 * 1536
    assert two.forward.flops.per_token - dense.forward.flops.per_token == mlp + router
    inner, last = projections(replace(SMALL, experts=Experts(8, 2, 1536, shared_width=100)))
    assert last[0].inputs == 100 and not projections(replace(SMALL, experts=Experts(8, 2, 1536)))[1]
    assert sum(p.calls for p in inner if p.calls > 1) == 4


def test_a_window_bounds_flash_attention_only() -> None:
    windowed = replace(SMALL, window=128)
    assert score_flops(replace(windowed, attention=Attention.FLASH)) == Rate(4.0 * 576 * 128)
    assert score_flops(replace(windowed, attention=Attention.SDPA_MASK)) == Rate(per_token_length=4.0 * 576)


@given(layers(), SHAPES)
def test_a_replay_costs_no_more_than_a_forward(layer: LayerGeometry, shape: Shape) -> None:
    costs = layer_costs(layer)
    replay, with_dead, forward = (w.flops.of(shape) for w in (costs.replay, costs.replay_with_dead, costs.forward))
    assert 0 < replay <= with_dead <= forward * (1 + 1e-9)
    assert costs.backward.flops.of(shape) >= costs.forward.flops.of(shape) * (1 - 1e-9)


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"hidden": 0}, {"value_bytes": 3}, {"kv_heads": 0}])
def test_sizes_that_make_no_layer_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="no decoder layer"):
        replace(SMALL, **change)


# -- head ----------------------------------------------------------------------------------------------------------


def test_whole_logits_and_chunks() -> None:
    whole = head_costs(HeadGeometry(576, 49152, value_bytes=2))
    chunked = head_costs(HeadGeometry(576, 49152, value_bytes=2, chunk_tokens=256))
    assert whole.workspace_bytes == Rate(49152.0 * 14 + 3 * 576 * 2)
    assert chunked.workspace_bytes == Rate(4 * 576.0 * 2, constant=49152.0 * 256 * 6)
    product = 2.0 * 576 * 49152
    assert (whole.forward.flops, whole.backward.flops) == (Rate(product), Rate(product))
    assert (chunked.forward.flops, chunked.backward.flops) == (Rate(2 * product), Rate())
    trained = head_costs(HeadGeometry(576, 49152, trained=True, chunk_tokens=256))
    assert trained.workspace_bytes.constant - chunked.workspace_bytes.constant == 4 * 576 * 49152
    assert trained.forward.flops + trained.backward.flops == Rate(4 * product)  # objective/chunked.py: four products


# -- seconds and plans ---------------------------------------------------------------------------------------------


def test_seconds_by_hand() -> None:
    work = Work(Rate(2e9, 1e6), Rate(1e6, constant=1e9))
    assert DeviceSpeed(1e12, 1e9).seconds(work) == Rate(2e-3 + 1e-3, 1e-6, 1.0)
    assert (work + work).flops == Rate(4e9, 2e6)


@given(layers(), SHAPES)
def test_a_profile_without_a_run(layer: LayerGeometry, shape: Shape) -> None:
    costs, speed = layer_costs(layer), DeviceSpeed(1e14, 1e12)
    profile = analytic_profile(UnitId("u"), "Layer", costs, shape, speed, grad_bytes=7)
    replay, store = profile.variant("R"), profile.variant("H")
    assert (replay.action, store.action, profile.grad_bytes) == (Action.RECOMPUTE, Action.STORE, 7)
    assert 0 < replay.held_bytes <= costs.input_bytes.of(shape) + 1
    assert store.held_bytes - replay.held_bytes == pytest.approx(costs.base_bytes.of(shape), abs=2)
    assert store.workspace_bytes <= replay.workspace_bytes
    assert store.saved_seconds > 0 == replay.saved_seconds
    rates = unit_rates(layer, speed)
    derived = speed.seconds(costs.derive).of(shape)
    assert derived >= 0 and rates.replay_s.of(shape) == pytest.approx(store.saved_seconds + derived)
    assert (rates.input_bytes, rates.state_bytes) == (costs.input_bytes, costs.base_bytes)


@given(layers(), SHAPES)
def test_a_replay_can_be_handed_what_the_kernel_gave(layer: LayerGeometry, shape: Shape) -> None:
    """Its outputs are held, its FLOPs are saved; the layer's backward needs no more than that of a plain replay."""
    costs, speed = layer_costs(layer), DeviceSpeed(1e14, 1e12)
    profile = analytic_profile(UnitId("u"), "Layer", costs, shape, speed)
    if layer.attention is Attention.EAGER:
        assert {variant.name for variant in profile.variants} == {"R", "H"}
        return
    replay, keeping, store = (profile.variant(name) for name in ("R", "R:attention", "H"))
    kept = keeping.held_bytes - replay.held_bytes
    assert kept == pytest.approx(shape.tokens * layer.query_heads * (layer.head_dim * layer.value_bytes + 4), abs=2)
    assert keeping.saved_seconds == pytest.approx(score_flops(layer).of(shape) / 1e14)
    assert keeping.workspace_bytes == replay.workspace_bytes - kept
    assert replay.held_bytes < keeping.held_bytes <= store.held_bytes
