"""What the cost model needs to know of a decoder layer and of the head: sizes and switches, no tensors, no modules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ds_hilore.core.errors import UsageError


class Attention(Enum):
    """How attention is computed, which decides what it saves."""

    EAGER = "eager"  # scores of [heads, length, length] in float32
    SDPA = "sdpa"  # causal without a mask: a fused kernel, log-sum-exp instead of scores
    SDPA_MASK = "sdpa_mask"  # with a boolean mask: a float copy of it per layer, keys and values repeated (fact 9)
    FLASH = "flash"  # flash-attention: as SDPA, packed batches and windows included


class Norm(Enum):
    """How norms are computed, which decides what they save."""

    RMS = "rms"  # statistics in float32, weight in the model's dtype (Llama and most others)
    RMS_FLOAT = "rms_float"  # all in float32, weight + 1 (Gemma)
    LAYER = "layer"  # torch's LayerNorm


@dataclass(frozen=True)
class Adapters:
    """LoRA ranks by projection; 0: frozen, without adapter. Fused projections take `q` and `gate`.

    Args:
        experts, router: of parameters that peft adapts by merging: it saves the merged weights.
        value_bytes: of the adapters' dtype, 4 by peft's default.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    o: int = 0
    gate: int = 0
    up: int = 0
    down: int = 0
    experts: int = 0
    router: int = 0
    value_bytes: int = 4
    dropout: bool = False

    @classmethod
    def everywhere(cls, rank: int, value_bytes: int = 4, dropout: bool = False) -> Adapters:
        """On all projections of a dense layer."""
        return cls(rank, rank, rank, rank, rank, rank, rank, value_bytes=value_bytes, dropout=dropout)


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts MLP.

    Args:
        count, per_token: how many there are, and how many each token is sent to.
        width: intermediate size of each.
        shared_width: that of an expert that sees every token, or 0.
        normalised: the weights of the chosen experts are divided by their sum.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    normalised: bool = True


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer.

    Args:
        intermediate: width of the dense MLP; not used where there are `experts`.
        gated: activation(gate) * up; else one projection and an activation.
        adapters: LoRA on a frozen layer; None: every parameter is trained.
        value_bytes: of the model's dtype.
        norm: kind of all norms of the layer.
        qk_norm: queries and keys are normalised per head.
        post_norms: norms also behind attention and MLP (Gemma).
        window: of sliding attention, in tokens.
        fused_qkv: queries, keys and values are slices of one product, so values pin all of it.
        fused_gate_up: gate and up are slices of one product.
        output_copied: the attention's result is copied for the next projection (Phi-3's layout on CPU).
        gated_function: the gated product is one autograd function that saves gate and up only (recovery/gated.py).

    Raises:
        UsageError: sizes that make no layer.
    """

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    gated: bool = True
    experts: Experts | None = None
    adapters: Adapters | None = None
    value_bytes: int = 2
    norm: Norm = Norm.RMS
    qk_norm: bool = False
    post_norms: bool = False
    attention: Attention = Attention.SDPA
    window: int | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    output_copied: bool = False
    gated_function: bool = False

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.query_heads, self.kv_heads, self.head_dim)
        if min(sizes) < 1 or self.query_heads % self.kv_heads or self.value_bytes not in (1, 2, 4, 8):
            raise UsageError(
                f"no decoder layer: hidden {self.hidden}, {self.query_heads} query heads over {self.kv_heads} of keys, "
                f"head_dim {self.head_dim}, {self.value_bytes} bytes a value"
            )

    @property
    def query_width(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def trained(self) -> bool:
        """Full fine-tuning."""
        return self.adapters is None


@dataclass(frozen=True)
class HeadGeometry:
    """Head and loss. `chunk_tokens`: of chunked log-probabilities (objective/chunked.py), or None for whole logits."""

    hidden: int
    vocabulary: int
    value_bytes: int = 2
    trained: bool = False
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class ModelGeometry:
    """A decoder model: one geometry per layer, in order, and the head.

    `kind` says where it was read from; `generic`: by common names of fields, not by what is known of the family.
    """

    layers: tuple[LayerGeometry, ...]
    head: HeadGeometry
    kind: str
    generic: bool = False
