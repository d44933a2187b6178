"""The tensors that autograd saves in a decoder layer, one by one, and which of them can be derived from the others.

Derivable is what recovery/rules.py has a rule for: norm outputs, casts, activations, products, rotations. With LoRA on
a Llama layer (h = 576, i = 1536, float32) torch saves 10,107 values per token, 5,883 of which are base; under full
fine-tuning 11,147 and 5,771 (design fact 11).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_hilore.profiling.fit import Rate
from ds_hilore.profiling.geometry import Attention, Experts, LayerGeometry, Norm

FLOAT = 4
INDEX = 8


@dataclass(frozen=True)
class SavedTensor:
    """One saved tensor: its values per token (per token and position of its segment where `by_length`, in all where
    `constant`), bytes of each, and whether it can be derived. `unit_input`: held for a replay too."""

    name: str
    values: int
    value_bytes: int
    derivable: bool = False
    by_length: bool = False
    constant: bool = False
    unit_input: bool = False

    @property
    def rate(self) -> Rate:
        size = float(self.values * self.value_bytes)
        if self.constant:
            return Rate(constant=size)
        return Rate(per_token_length=size) if self.by_length else Rate(per_token=size)


def total(tensors: Iterable[SavedTensor]) -> Rate:
    """Bytes of several tensors."""
    found = Rate()
    for tensor in tensors:
        found = found + tensor.rate
    return found


def saved_tensors(layer: LayerGeometry) -> list[SavedTensor]:
    """Everything that one call of a layer holds when it is stored as torch does it, its input included.

    Left out: rotary tables and masks that all layers share, biases, and what is smaller than one value per token.
    """
    found = [SavedTensor("input", layer.hidden, layer.value_bytes, unit_input=True)]
    found += _norm(layer, "input norm", layer.hidden, 1, source_held=True)
    found += _attention(layer)
    if layer.post_norms:
        found += _norm(layer, "norm behind attention", layer.hidden, 1)
    # Behind a norm of the attention's output, the residual sum can be derived; else it is the sum of what is not held.
    found += _norm(layer, "MLP norm", layer.hidden, 1, derivable=layer.post_norms)
    found += _mlp(layer) if layer.experts is None else _experts(layer, layer.experts)
    if layer.post_norms:
        found += _norm(layer, "norm behind MLP", layer.hidden, 1)
    return [tensor for tensor in found if tensor.values > 0]


def _norm(
    layer: LayerGeometry, name: str, width: int, rows: int, source_held: bool = False, derivable: bool = False
) -> list[SavedTensor]:
    """`rows`: statistics per token. What is normalised is held anyway in the model's dtype, or can be derived."""
    size = layer.value_bytes
    if layer.norm is Norm.LAYER:
        found = [SavedTensor(f"{name}: mean and deviation", 2 * rows, FLOAT)]
        return found if source_held else [SavedTensor(f"{name}: source", width, size, derivable), *found]
    found = [SavedTensor(f"{name}: statistics", rows, FLOAT)]
    if size != FLOAT:
        found.append(SavedTensor(f"{name}: source in float32", width, FLOAT, source_held or derivable))
    elif not source_held:
        found.append(SavedTensor(f"{name}: source", width, FLOAT, derivable))
    in_float = layer.norm is Norm.RMS_FLOAT
    if layer.trained:
        found.append(SavedTensor(f"{name}: before its weight", width, FLOAT if in_float else size, derivable=True))
    if in_float:
        found.append(SavedTensor(f"{name}: weight + 1", width // rows, FLOAT, constant=True))
    return found


def _projected(
    layer: LayerGeometry, name: str, width: int, ranks: tuple[int, ...], derivable: bool, held: bool = False
) -> list[SavedTensor]:
    """What projections of one tensor save of it.

    Args:
        ranks: LoRA rank of each of the projections.
        derivable: the tensor can be derived where it is not held.
        held: something else saves the tensor itself.
    """
    adapters = layer.adapters
    if adapters is None:
        return [] if held else [SavedTensor(name, width, layer.value_bytes, derivable)]
    adapted = [rank for rank in ranks if rank > 0]
    if not adapted:
        return []
    size, count = adapters.value_bytes, len(adapted)
    found = [SavedTensor(f"{name}: LoRA middles", sum(adapted), size)]
    if adapters.dropout:  # each adapter drops for itself
        found += [
            SavedTensor(f"{name}: dropout masks", count * width, size),
            SavedTensor(f"{name}: dropped", count * width, size, derivable or held),
        ]
    elif size != layer.value_bytes:  # each adapter casts for itself
        found.append(SavedTensor(f"{name}: cast for adapters", count * width, size, derivable or held))
    elif not held:
        found.append(SavedTensor(name, width, size, derivable))
    return found


def _attention(layer: LayerGeometry) -> list[SavedTensor]:
    size, wide, narrow = layer.value_bytes, layer.query_width, layer.kv_width
    lora = layer.adapters
    inner = (0, 0, 0) if lora is None else (lora.q, lora.k, lora.v)
    found = _projected(layer, "attention input", layer.hidden, inner[:1] if layer.fused_qkv else inner, derivable=True)
    if layer.qk_norm:
        found += _norm(layer, "query norm", wide, layer.query_heads)
        found += _norm(layer, "key norm", narrow, layer.kv_heads)
    rotated = layer.qk_norm  # then queries and keys are derived from what their norms save
    repeated = layer.attention in (Attention.EAGER, Attention.SDPA_MASK) and wide > narrow
    values = wide if repeated else wide + 2 * narrow if layer.fused_qkv else narrow
    found += [
        SavedTensor("queries", wide, size, derivable=rotated),
        SavedTensor("keys", wide if repeated else narrow, size, derivable=rotated and not repeated),
        SavedTensor("values", values, size),
    ]
    fused = layer.attention is not Attention.EAGER
    if fused:
        found += [
            SavedTensor("log-sum-exp", layer.query_heads, FLOAT),
            SavedTensor("attention output", wide, size),
        ]
        if layer.attention is Attention.SDPA_MASK:
            found.append(SavedTensor("mask in floats", 1, size, by_length=True))
    else:
        found.append(SavedTensor("probabilities", layer.query_heads, FLOAT, by_length=True))
        if size != FLOAT:
            found.append(SavedTensor("probabilities: cast", layer.query_heads, size, derivable=True, by_length=True))
    held = fused and not layer.output_copied
    outer = (0,) if lora is None else (lora.o,)
    return found + _projected(layer, "attention output for its projection", wide, outer, derivable=fused, held=held)


def _mlp(layer: LayerGeometry, width: int | None = None) -> list[SavedTensor]:
    """A dense MLP, gated or not; also the expert that sees every token."""
    size, wide = layer.value_bytes, layer.intermediate if width is None else width
    lora = layer.adapters
    inner = (0, 0) if lora is None else (lora.gate, lora.up)
    one = layer.fused_gate_up or not layer.gated
    found = _projected(layer, "MLP input", layer.hidden, inner[:1] if one else inner, derivable=True)
    found.append(SavedTensor("gate" if layer.gated else "before activation", wide, size))
    if layer.gated:
        found.append(SavedTensor("up", wide, size))
        if not layer.gated_function:
            found.append(SavedTensor("activated gate", wide, size, derivable=True))
    last = (0,) if lora is None else (lora.down,)
    return found + _projected(layer, "MLP product", wide, last, derivable=True)


def _experts(layer: LayerGeometry, experts: Experts) -> list[SavedTensor]:
    """Experts as grouped products: each token is copied once for each expert it is sent to."""
    size, chosen, width, lora = layer.value_bytes, experts.per_token, experts.width, layer.adapters
    weights_need = lora is None or lora.experts > 0
    router_needs = lora is None or lora.router > 0
    found = [
        SavedTensor("router input", layer.hidden if router_needs else 0, size, derivable=True),
        SavedTensor("router probabilities", experts.count, FLOAT),
        SavedTensor("routing: chosen experts", chosen, INDEX, unit_input=True),  # a replay takes them over
        SavedTensor("routing: order by expert", 3 * chosen, INDEX),
        SavedTensor("routing: weights", 2 * chosen + 1 if experts.normalised else chosen, FLOAT),
        SavedTensor("tokens by expert", chosen * layer.hidden if weights_need else 0, size),
        SavedTensor("gates and ups by expert", 2 * chosen * width, size),
        SavedTensor("activated gates", 0 if layer.gated_function else chosen * width, size, derivable=True),
        SavedTensor("products by expert", chosen * width if weights_need else 0, size, derivable=True),
        SavedTensor("outputs by expert", chosen * layer.hidden, size),
    ]
    if lora is not None and lora.experts > 0:
        merged = 3 * experts.count * layer.hidden * width
        found.append(SavedTensor("merged expert weights", merged, size, constant=True))
    if lora is not None and lora.router > 0:
        found.append(SavedTensor("merged router weights", experts.count * layer.hidden, size, constant=True))
    if experts.shared_width:
        found += _mlp(layer, experts.shared_width)
        found.append(SavedTensor("shared expert and its gate", layer.hidden + 1, size))
    return found
