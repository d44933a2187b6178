"""From transformers models and configs to the geometry that the cost model counts with.

`FAMILIES` are those whose layers a test compares with the cost model. Of any other decoder the common names of fields
are read, and the result says so (`ModelGeometry.generic`); what is no stack of decoder layers is refused. Nothing here
needs weights: a config is enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.objective.reach import CAUSAL, Reach
from ds_hilore.profiling.cost_model import DeviceSpeed, unit_rates
from ds_hilore.profiling.geometry import Adapters, Attention, Experts, HeadGeometry, LayerGeometry, ModelGeometry, Norm
from ds_hilore.profiling.measure import UnitRates


@dataclass(frozen=True)
class Family:
    """What a config does not say about the layers of a family."""

    norm: Norm = Norm.RMS
    gated: bool = True
    qk_norm: bool = False
    post_norms: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    output_copied: bool = False


#: By `model_type` of the (text) config. SmolLM and SmolLM2 are of type "llama".
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "mistral": Family(),
        "qwen2": Family(),
        "smollm3": Family(),
        "qwen3": Family(qk_norm=True),
        "phi3": Family(fused_qkv=True, fused_gate_up=True, output_copied=True),
        "gemma3_text": Family(norm=Norm.RMS_FLOAT, qk_norm=True, post_norms=True),
        "mixtral": Family(),
        "qwen3_moe": Family(qk_norm=True),
    }
)

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ATTENTION = MappingProxyType(
    {
        "eager": Attention.EAGER,
        "sdpa": Attention.SDPA,
        "flash_attention_2": Attention.FLASH,
        "flash_attention_3": Attention.FLASH,
    }
)
_BYTES = MappingProxyType({"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2})
#: Name of a projection in transformers -> its field of `Adapters`.
_PROJECTIONS = MappingProxyType(
    {
        "q_proj": "q",
        "k_proj": "k",
        "v_proj": "v",
        "o_proj": "o",
        "qkv_proj": "q",
        "gate_proj": "gate",
        "up_proj": "up",
        "gate_up_proj": "gate",
        "down_proj": "down",
    }
)


@dataclass(frozen=True)
class Setting:
    """How a model is trained, as far as its config does not say.

    Args:
        adapters: LoRA; None: full fine-tuning.
        value_bytes: of the model's dtype; None: as the config says, else 2.
        attention: None: as the config says, else SDPA.
        padded: batches come with a mask, so SDPA computes with one.
        longest: longest segment; sliding windows that hold it are none.
        chunk_tokens: of chunked log-probabilities; None: whole logits.
        gated_function: gated MLPs run as one autograd function (integration/gated_mlp.py).
    """

    adapters: Adapters | None = None
    value_bytes: int | None = None
    attention: Attention | None = None
    padded: bool = False
    longest: int | None = None
    chunk_tokens: int | None = None
    gated_function: bool = False


def read_config(config: Any, setting: Setting | None = None) -> ModelGeometry:
    """The geometry of every layer of a decoder model.

    Args:
        config: a transformers config, or any object with its fields; of a multimodal one, the text part is read.

    Raises:
        UnsupportedError: the model is no stack of decoder layers, or fields are missing; names them.
    """
    setting = setting or Setting()
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = str(getattr(text, "model_type", type(text).__name__))
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedError(f"{kind}: encoder-decoder models are not covered; name a decoder model")
    missing = [name for name in _NEEDED if not isinstance(getattr(text, name, None), int)]
    if missing:
        raise UnsupportedError(f"{kind}: the config lacks {', '.join(missing)}, which the cost model counts with")
    family = FAMILIES.get(kind)
    base = _layer(text, family or _guessed(text), setting)
    layers = tuple(_at(text, base, index, setting) for index in range(text.num_hidden_layers))
    head = HeadGeometry(
        text.hidden_size, text.vocab_size, base.value_bytes, setting.adapters is None, setting.chunk_tokens
    )
    return ModelGeometry(layers, head, kind if family else f"{kind}, by common names of fields", family is None)


def read_model(model: nn.Module, setting: Setting | None = None) -> ModelGeometry:
    """As `read_config`, with adapters and dtype taken from the model itself.

    Raises:
        UnsupportedError: as `read_config`; or the model has no transformers config.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedError(f"{type(model).__name__} has no transformers config to read its layers from")
    setting = setting or Setting()
    adapters = setting.adapters if setting.adapters is not None else adapters_of(model)
    width = setting.value_bytes
    if width is None:
        weights = [p for p in model.parameters() if p.is_floating_point() and p.dim() > 1]
        width = max(weights, key=_numel).element_size() if weights else None
    return read_config(config, replace(setting, adapters=adapters, value_bytes=width))


def adapters_of(model: nn.Module) -> Adapters | None:
    """LoRA ranks by projection, as peft has put them on; None where the model's own parameters are trained.

    Where layers differ, each projection has its greatest rank.
    """
    ranks: dict[str, int] = {}
    size, dropout = 4, False
    for path, module in model.named_modules():
        lora = getattr(module, "lora_A", None)
        if not isinstance(lora, nn.ModuleDict) or len(lora) == 0:
            continue
        field = _adapted_field(path, module)
        if field is not None:
            adapted: Any = module
            ranks[field] = max([ranks.get(field, 0), *adapted.r.values()])
            size = next(iter(adapted.lora_A.values())).weight.element_size()
            dropout = dropout or any(getattr(drop, "p", 0) > 0 for drop in adapted.lora_dropout.values())
    if not ranks and any(parameter.requires_grad for parameter in model.parameters()):
        return None
    return Adapters(**ranks, value_bytes=size, dropout=dropout)


def rates_by_class(
    model: nn.Module, names: Mapping[nn.Module, tuple[str, str]], speed: DeviceSpeed, setting: Setting | None = None
) -> dict[str, UnitRates]:
    """Analytic rates of each class of units: what `Measurements` takes as the proportions of its fits.

    Args:
        names: path and class label of every unit module (`Units.names`).

    Returns:
        By class label. Of units that are no numbered decoder layer (vision blocks), and of a model that cannot be
        read, there are none.
    """
    try:
        layers = read_model(model, setting).layers
    except UnsupportedError:
        return {}
    found: dict[str, UnitRates] = {}
    for module, (path, label) in names.items():
        number = layer_number(module, path)
        if label not in found and number is not None and number < len(layers):
            found[label] = unit_rates(layers[number], speed)
    return found


def reach_by_unit(model: nn.Module, names: Mapping[nn.Module, tuple[str, str]]) -> dict[str, Reach]:
    """How far state of decoder layers reaches, by path, where that is not to all positions that follow: through
    windows of their own attention and of all later layers'.

    Args:
        names: path and class label of every unit module (`Units.names`).
    """
    try:
        windows = [layer.window for layer in read_model(model).layers]
    except UnsupportedError:
        return {}
    found: dict[str, Reach] = {}
    for module, (path, _) in names.items():
        number = layer_number(module, path)
        reach = CAUSAL if number is None else Reach.through(windows[number:] or [None])
        if reach != CAUSAL:
            found[path] = reach
    return found


def layer_number(module: nn.Module, path: str) -> int | None:
    """Place of a decoder layer among the model's; None for modules that are none, vision blocks for instance."""
    number = re.search(r"(?:^|\.)(\d+)$", path)
    return int(number.group(1)) if number and "DecoderLayer" in type(module).__name__ else None


# -- reading -------------------------------------------------------------------------------------------------------


def _layer(text: Any, family: Family, setting: Setting) -> LayerGeometry:
    heads = text.num_attention_heads
    return LayerGeometry(
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        query_heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        gated=family.gated,
        adapters=setting.adapters,
        value_bytes=setting.value_bytes or _dtype_bytes(text),
        norm=family.norm,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        attention=_attention_of(text, setting),
        fused_qkv=family.fused_qkv,
        fused_gate_up=family.fused_gate_up,
        output_copied=family.output_copied,
        gated_function=setting.gated_function,
    )


def _at(text: Any, base: LayerGeometry, index: int, setting: Setting) -> LayerGeometry:
    """The layer at a place in the model: its own window, its own kind of MLP."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and "sliding" not in str(kinds[index]):
        window = None
    if window is not None and setting.longest is not None and window >= setting.longest:
        window = None
    attention = base.attention
    if window is not None and attention is Attention.SDPA:
        attention = Attention.SDPA_MASK  # the window is a mask
    return replace(base, window=window, attention=attention, experts=_experts_of(text, index))


def _experts_of(text: Any, index: int) -> Experts | None:
    count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    per_token = getattr(text, "num_experts_per_tok", None)
    if not count or not per_token:
        return None
    if index in (getattr(text, "mlp_only_layers", None) or ()):
        return None
    if (index + 1) % (getattr(text, "decoder_sparse_step", None) or 1):
        return None
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return Experts(count, per_token, width, shared, bool(getattr(text, "norm_topk_prob", True)))


def _attention_of(text: Any, setting: Setting) -> Attention:
    found = setting.attention
    if found is None:
        found = _ATTENTION.get(str(getattr(text, "_attn_implementation", None)), Attention.SDPA)
    return Attention.SDPA_MASK if found is Attention.SDPA and setting.padded else found


def _dtype_bytes(text: Any) -> int:
    name = str(getattr(text, "dtype", None) or getattr(text, "torch_dtype", None) or "bfloat16")
    return _BYTES.get(name.removeprefix("torch."), 2)


def _guessed(text: Any) -> Family:
    """Of an unknown family: an MLP is taken for gated where its activation is one that gated MLPs have."""
    activation = str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", "silu"))
    layer_norm = hasattr(text, "layer_norm_eps") or hasattr(text, "layer_norm_epsilon")
    return Family(
        norm=Norm.LAYER if layer_norm else Norm.RMS,
        gated=activation in ("silu", "swish", "swiglu", "geglu", "gelu_pytorch_tanh"),
    )


def _adapted_field(path: str, module: nn.Module) -> str | None:
    """The field of `Adapters` for an adapted module; None where it lies outside of what the cost model counts."""
    if getattr(module, "parameter_name", None) is not None:  # peft adapts 2-D and 3-D parameters by merging
        return "experts" if getattr(module, "num_experts", 1) > 1 else "router"
    return _PROJECTIONS.get(path.rpartition(".")[2])


def _numel(parameter: nn.Parameter) -> int:
    shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO-3 the parameter itself is empty
    return int(shape.numel())
