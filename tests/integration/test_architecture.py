"""The cost model against what real layers save, as torch and as units hold it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.core.treatment import REPLAYED, STORED
from ds_hilore.core.types import Shape, UnitId
from ds_hilore.integration.architecture import (
    FAMILIES,
    Setting,
    adapters_of,
    rates_by_class,
    reach_by_unit,
    read_config,
    read_model,
)
from ds_hilore.integration.units import find_units
from ds_hilore.objective.reach import Reach
from ds_hilore.profiling.cost_model import DeviceSpeed, LayerCosts, layer_costs, projections
from ds_hilore.profiling.geometry import Adapters, Attention, Experts, LayerGeometry, Norm
from ds_hilore.recovery.bundle import parameter_of
from ds_hilore.recovery.deadwork import DeadWork
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.unit import RecoveryContext, UnitCall
from tests import models

SHAPE = Shape(2, 96)
SPEED = DeviceSpeed(1e12, 1e11)


def qwen3(layers: int = 3, **config: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = Qwen3Config(**models._dense(layers, models.HIDDEN), **{"head_dim": 24, **config})
    return models._build(Qwen3ForCausalLM, settings, 0)


def qwen3_moe(layers: int = 3, **config: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    special = {"head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, **config}
    return models._build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**models._dense(layers, models.HIDDEN), **special), 0)


def mistral(layers: int = 3, **config: Any) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return models._build(MistralForCausalLM, MistralConfig(**models._dense(layers, models.HIDDEN), **config), 0)


def smollm3(layers: int = 3, **config: Any) -> nn.Module:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    settings = SmolLM3Config(**models._dense(layers, models.HIDDEN), pad_token_id=0, **config)
    return models._build(SmolLM3ForCausalLM, settings, 0)


BUILD: dict[str, Callable[..., nn.Module]] = {
    **models.FAMILIES,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mistral": mistral,
    "smollm3": smollm3,
}


class Watched:
    """Runs a model with one of its layers watched: bytes that torch saves there, and that a stored unit holds.

    What all layers share (rotary tables, masks) is left out, as in the ledger.
    """

    def __init__(self, model: nn.Module, index: int = 1, padded: bool = False) -> None:
        self.layer = models.decoder_layers(model)[index]
        self.run, self.padded = self.layer.forward, padded
        self.inputs = self.torch = self.base = 0
        self.layer.forward = self._forward  # type: ignore[method-assign]
        ids, _ = models.batch(0, SHAPE.segments, SHAPE.length)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
        self.output = model(input_ids=ids, use_cache=False, **({"attention_mask": mask} if padded else {}))

    def _forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        shared = self._addresses([kwargs])
        with torch.autograd.graph.saved_tensors_hooks(pack := Pack(), lambda tensor: tensor):
            self.run(hidden, **kwargs)
        own = hidden.untyped_storage()
        self.torch = sum(size for address, size in pack.seen.items() if address not in {*shared, own.data_ptr()})
        inputs = UnitInputs.capture(self.run, (hidden,), kwargs)
        call = UnitCall(RecoveryContext(), UnitId("layer"), "Layer", STORED, inputs)
        output = call.run(self.run, (hidden,), kwargs)
        held, needed = call.held_storages(), call.input_storages()
        self.base = sum(size for address, size in held.items() if address not in needed)
        self.inputs = sum(size for address, size in needed.items() if address not in shared)
        return output

    @staticmethod
    def _addresses(values: Any) -> set[int]:
        leaves = torch.utils._pytree.tree_leaves(values)
        return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}


class Pack:
    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.kept: list[Tensor] = []  # else an address could be used again

    def __call__(self, tensor: Tensor) -> Tensor:
        if parameter_of(tensor) is None:
            storage = tensor.untyped_storage()
            self.seen[storage.data_ptr()] = storage.nbytes()
            self.kept.append(tensor)
        return tensor


def predicted(model: nn.Module, index: int = 1, **setting: Any) -> LayerCosts:
    return layer_costs(read_model(model, Setting(longest=SHAPE.length, **setting)).layers[index])


def variants(model: nn.Module, kind: str) -> nn.Module:
    if "bf16" in kind:
        model = model.to(torch.bfloat16)
    if "lora" in kind:
        model = models.lora(model, lora_dropout=0.1 if "dropout" in kind else 0.0)
    return model


CASES = [(family, kind) for family in ("llama", "qwen2", "gemma3", "phi3", "qwen3") for kind in ("full", "lora")]
CASES += [("mixtral", "full"), ("mixtral", "lora"), ("qwen3_moe", "full")]
CASES += [(family, kind) for family in ("llama", "gemma3") for kind in ("full bf16", "lora bf16")]
CASES += [("mistral", "full"), ("smollm3", "full"), ("llama", "lora dropout"), ("llama", "lora bf16 dropout")]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_bytes_of_real_layers(family: str, kind: str) -> None:
    """Within 0.5 % of what torch saves and of what a stored unit holds; the inputs to the byte."""
    model = variants(BUILD[family](), kind)
    costs, seen = predicted(model), Watched(model)
    assert costs.input_bytes.of(SHAPE) == seen.inputs
    assert costs.torch_bytes.of(SHAPE) == pytest.approx(seen.torch, rel=0.005)
    assert costs.base_bytes.of(SHAPE) == pytest.approx(seen.base, rel=0.005)


@pytest.mark.parametrize("kind", ["full", "full bf16", "lora"])
@pytest.mark.parametrize(("attention", "padded"), [("eager", False), ("eager", True), ("sdpa", True)])
def test_bytes_of_other_attention(attention: str, padded: bool, kind: str) -> None:
    model = variants(models.llama(attn_implementation=attention), kind)
    costs, seen = predicted(model, padded=padded), Watched(model, padded=padded)
    assert costs.torch_bytes.per_token_length > 0
    assert costs.torch_bytes.of(SHAPE) == pytest.approx(seen.torch, rel=0.005)
    assert costs.base_bytes.of(SHAPE) == pytest.approx(seen.base, rel=0.005)


class Counted:
    """FLOPs of one layer's forward and backward by torch's own count: products and attention.

    `context`: the layer runs as a replayed unit of it, so that `backward` holds the replay too.
    """

    def __init__(self, model: nn.Module, context: RecoveryContext | None = None) -> None:
        self.layer = models.decoder_layers(model)[1]
        self.run, self.context = self.layer.forward, context
        self.forward = self.backward = 0
        self.layer.forward = self._forward  # type: ignore[method-assign]
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
        try:
            model(input_ids=models.batch(0, SHAPE.segments, SHAPE.length)[0], use_cache=False)
        finally:
            self.layer.forward = self.run  # type: ignore[method-assign]

    def _forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            output = self._call(hidden, kwargs)
        self.forward = counter.get_total_flops()
        wanted = [hidden, *(p for p in self.layer.parameters() if p.requires_grad)]
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(output.sum(), wanted, retain_graph=True)
        self.backward = counter.get_total_flops()
        return output

    def _call(self, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        if self.context is None:
            return self.run(hidden, **kwargs)
        inputs = UnitInputs.capture(self.run, (hidden,), kwargs)
        call = UnitCall(self.context, UnitId("layer"), "Layer", REPLAYED, inputs)
        return call.run(self.run, (hidden,), kwargs)


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in ("llama", "qwen3", "gemma3", "phi3") for kind in ("full", "lora")]
    + [("mixtral", "full")],  # under LoRA peft merges the experts' weights anew: work that grows with no token
)
def test_flops_of_real_layers(family: str, kind: str) -> None:
    """Forward and backward within 1 %."""
    model = BUILD[family](attn_implementation="eager")  # torch does not count fused attention on CPU
    if family == "mixtral":
        model.config._experts_implementation = "eager"  # nor grouped products
    model = variants(model, kind)
    costs, counted = predicted(model), Counted(model)
    assert costs.forward.flops.of(SHAPE) == pytest.approx(counted.forward, rel=0.01)
    assert costs.backward.flops.of(SHAPE) == pytest.approx(counted.backward, rel=0.01)


@pytest.mark.parametrize(("family", "kind"), [("llama", "full"), ("llama", "lora"), ("gemma3", "lora")])
@pytest.mark.parametrize("skipping", [True, False])
def test_flops_of_real_replays(family: str, kind: str, skipping: bool) -> None:
    """Early stop, and dead work skipped or not: within 1 %."""
    model = variants(BUILD[family](attn_implementation="eager"), kind)
    context = RecoveryContext(dead_work=DeadWork(enabled=skipping))
    Counted(model, context)  # proves what is dead
    replayed, plain = Counted(model, context), Counted(model)
    costs = predicted(model)
    expected = costs.replay if skipping else costs.replay_with_dead
    assert expected.flops.of(SHAPE) == pytest.approx(replayed.backward - plain.backward, rel=0.01)
    if (family, kind) == ("llama", "lora"):
        assert costs.replay.flops.per_token < 0.85 * costs.replay_with_dead.flops.per_token


# -- reading -------------------------------------------------------------------------------------------------------


def test_ranks_are_read_from_peft() -> None:
    assert adapters_of(models.llama()) is None
    assert adapters_of(models.lora(models.llama())) == Adapters.everywhere(4)
    some = models.lora(models.llama(), targets=["q_proj", "v_proj"], r=8, lora_dropout=0.1)
    assert adapters_of(some) == Adapters(q=8, v=8, dropout=True)
    assert adapters_of(models.lora(models.phi3())) == Adapters(q=4, o=4, gate=4, down=4)
    merged = adapters_of(models.lora(models.mixtral()))
    assert merged is not None and merged.experts > 0 and merged.router > 0 and merged.gate == 0
    frozen = models.llama().requires_grad_(False)
    assert adapters_of(frozen) == Adapters()


def test_known_families_are_named_and_others_are_called_generic() -> None:
    for family in ("llama", "qwen2", "phi3", "gemma3", "mixtral", "qwen3", "qwen3_moe", "mistral", "smollm3"):
        found = read_config(BUILD[family]().config)
        assert not found.generic and found.kind in FAMILIES
    found = read_config(models.gpt_neox().config)
    assert found.generic and "gpt_neox" in found.kind and "common names" in found.kind
    assert found.layers[0].norm is Norm.LAYER and not found.layers[0].gated


def test_windows_belong_to_layers_and_to_lengths() -> None:
    config = models.gemma3(layers=3).config  # a window of 8 in all layers but every third
    kinds = [(layer.window, layer.attention) for layer in read_config(config, Setting(longest=96)).layers]
    assert kinds == [(8, Attention.SDPA_MASK), (8, Attention.SDPA_MASK), (None, Attention.SDPA)]
    assert {layer.window for layer in read_config(config, Setting(longest=8)).layers} == {None}


def test_experts_are_in_the_layers_that_have_them() -> None:
    config = qwen3_moe(layers=4, mlp_only_layers=[1], decoder_sparse_step=1).config
    assert [layer.experts is None for layer in read_config(config).layers] == [False, True, False, False]
    assert read_config(config).layers[0].experts == Experts(8, 2, 48, normalised=False)


def test_a_multimodal_config_is_read_by_its_text_part() -> None:
    from transformers import Gemma3Config

    text = models.gemma3().config
    found = read_config(Gemma3Config(text_config=text.to_dict()))
    assert found.kind == "gemma3_text" and len(found.layers) == text.num_hidden_layers


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SimpleNamespace(model_type="strange", hidden_size=8), "lacks intermediate_size, num_hidden_layers"),
        (SimpleNamespace(model_type="t5", is_encoder_decoder=True), "encoder-decoder"),
    ],
)
def test_what_is_no_decoder_is_refused(config: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        read_config(config)
    with pytest.raises(UnsupportedError, match="no transformers config"):
        read_model(nn.Linear(2, 2))


def test_rates_by_class_of_unit() -> None:
    model = models.lora(models.llama())
    names = find_units(model, "auto").names
    (rates,) = rates_by_class(model, names, SPEED).values()
    costs = layer_costs(read_model(model).layers[0])
    assert rates.state_bytes == costs.base_bytes and rates.replay_s == SPEED.seconds(costs.replay)
    assert set(rates_by_class(model, names, SPEED)) == {label for _, label in names.values()}
    assert rates_by_class(nn.Linear(2, 2), {}, SPEED) == {}


def test_published_shapes() -> None:
    """Parameters of the layers, from projections alone, are those of the published models (without embeddings)."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    layer: LayerGeometry = read_config(config).layers[0]
    inner, last = projections(layer)
    weights = 32 * sum(p.inputs * p.outputs for p in [*inner, *last])
    assert weights == pytest.approx(6.98e9, rel=0.001)  # of Llama-3.1-8B's 8.03e9, 2 x 0.525e9 are embedding and head


def test_how_far_state_of_layers_reaches() -> None:
    """Gemma-3 with a full attention in every third of five layers: behind it, windows of 8 add up."""
    model = models.gemma3(layers=5)
    units = find_units(model, "auto")
    found = reach_by_unit(model, units.names)
    assert found == {"model.layers.3": Reach(1 + 7 + 7), "model.layers.4": Reach(8)}
    assert reach_by_unit(models.llama(), find_units(models.llama(), "auto").names) == {}
    assert reach_by_unit(nn.Linear(2, 2), {}) == {}
