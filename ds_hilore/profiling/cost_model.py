"""Analytic costs of a decoder layer and of the head: FLOPs, bytes, and seconds on a device of known speed.

It serves planning without a run, and gives the proportions of the fits (fit.py): what grows with the tokens and what
with tokens * length. A product of [n, a] and [a, b] counts 2 n a b FLOPs.

    forward    every projection, LoRA's own two products, attention scores (half of them where the kernel is causal)
    backward   gradients of inputs as many again; of weights as many again, but only of weights that are trained
    replay     forward up to the last tensor that is saved: the last projection of the layer is not needed, unless a
               norm or a routing weight follows; under LoRA it runs where dead work is not skipped (design fact 14)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action, Shape, UnitId, UnitProfile, Variant
from ds_hilore.profiling.fit import Rate, whole
from ds_hilore.profiling.geometry import Attention, HeadGeometry, LayerGeometry
from ds_hilore.profiling.measure import RECOMPUTE, STORE, UnitRates
from ds_hilore.profiling.saved import saved_tensors, total


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes that are moved between the device's memory and its cores."""

    flops: Rate = field(default_factory=Rate)
    traffic_bytes: Rate = field(default_factory=Rate)

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic_bytes + other.traffic_bytes)


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device reaches in practice: FLOP/s of matrix products in the model's dtype, bytes/s of its memory."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, work: Work) -> Rate:
        """Products and traffic one after the other: elementwise kernels do not overlap with products."""
        return work.flops.times(1.0 / self.flops_per_s) + work.traffic_bytes.times(1.0 / self.bytes_per_s)


@dataclass(frozen=True)
class Projection:
    """One product with a weight, `calls` times per token (experts). `trained`: its weight needs a gradient."""

    inputs: int
    outputs: int
    rank: int = 0
    trained: bool = False
    calls: int = 1

    @property
    def base_flops(self) -> float:
        return 2.0 * self.inputs * self.outputs * self.calls

    @property
    def adapter_flops(self) -> float:
        return 2.0 * self.rank * (self.inputs + self.outputs) * self.calls

    @property
    def backward_flops(self) -> float:
        return self.base_flops * (2 if self.trained else 1) + 2 * self.adapter_flops


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one call of a layer.

    Args:
        input_bytes: what a replay needs to have kept.
        torch_bytes: saved state beyond the inputs, as torch saves it.
        base_bytes: the same without what can be derived; what storing adds.
        replayed_bytes: what a replay brings back: the state, held by cheap recipes only (design fact 13).
        forward_bytes: the most that running the layer needs at once, where nothing is saved; its input aside.
        gradient_bytes: the widest gradients of the unit's backward, stored or replayed.
        kept_bytes: what the attention kernel gave and a replay can be handed; 0 where there is no such kernel.
        replay: with early stop and without dead work. `replay_with_dead`: with early stop only.
        attention: of the kernel in forward: what a replay leaves out where its outputs were kept.
        derive: deriving what a stored unit leaves out and a replayed one holds.
    """

    input_bytes: Rate
    torch_bytes: Rate
    base_bytes: Rate
    replayed_bytes: Rate
    forward_bytes: Rate
    gradient_bytes: Rate
    kept_bytes: Rate
    forward: Work
    backward: Work
    replay: Work
    replay_with_dead: Work
    attention: Work
    derive: Work


def layer_costs(layer: LayerGeometry) -> LayerCosts:
    """All costs of a decoder layer as functions of the shape."""
    tensors = saved_tensors(layer)
    inputs = total(t for t in tensors if t.unit_input)
    state = total(t for t in tensors if not t.unit_input)
    base = total(t for t in tensors if not (t.unit_input or t.derivable))
    lean = total(t for t in tensors if not (t.unit_input or (t.derivable and t.values <= layer.hidden)))
    inner, last = projections(layer)
    scores = score_flops(layer)
    every = [*inner, *last]
    forward = Rate(sum(p.base_flops + p.adapter_flops for p in every)) + scores
    # The second product of the last adapter comes after everything that is saved.
    alive = [*inner, *last] if _last_is_needed(layer) else inner
    replay = Rate(sum(p.base_flops + p.adapter_flops for p in alive)) + scores
    dead = Rate()
    if alive is inner and any(p.rank for p in last):
        replay = replay + Rate(sum(2.0 * p.rank * p.inputs * p.calls for p in last))
        dead = Rate(sum(p.base_flops for p in last))
    recomputed = 2.0 if layer.attention is Attention.EAGER else 2.5  # fused kernels make the scores again
    backward = Rate(sum(p.backward_flops for p in every)) + scores.times(recomputed)
    weights = Rate(constant=float(layer.value_bytes * sum(p.inputs * p.outputs for p in every)))
    twice, thrice = (state + inputs).times(2) + weights, (state + inputs).times(3) + weights
    return LayerCosts(
        input_bytes=inputs,
        torch_bytes=state,
        base_bytes=base,
        replayed_bytes=lean,
        forward_bytes=_running(layer),
        gradient_bytes=_gradients(layer),
        kept_bytes=total(t for t in tensors if t.name in _KERNEL_OUTPUTS),
        forward=Work(forward, twice),
        backward=Work(backward, thrice),
        replay=Work(replay, twice),
        replay_with_dead=Work(replay + dead, twice),
        attention=Work(scores if layer.attention is not Attention.EAGER else Rate()),
        derive=Work(traffic_bytes=Rate(*(2.0 * (held - kept) for held, kept in zip(_parts(lean), _parts(base))))),
    )


#: Names of saved tensors that an attention kernel gives.
_KERNEL_OUTPUTS = ("log-sum-exp", "attention output")


def _parts(rate: Rate) -> tuple[float, float, float]:
    return rate.per_token, rate.per_token_length, rate.constant


def projections(layer: LayerGeometry) -> tuple[list[Projection], list[Projection]]:
    """All products with weights, and apart from them the last one of the MLP."""
    lora, trained = layer.adapters, layer.trained
    hidden, wide, narrow = layer.hidden, layer.query_width, layer.kv_width
    rank = {} if lora is None else {name: getattr(lora, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}

    def one(inputs: int, outputs: int, name: str) -> Projection:
        return Projection(inputs, outputs, rank.get(name, 0), trained)

    if layer.fused_qkv:
        inner = [one(hidden, wide + 2 * narrow, "q")]
    else:
        inner = [one(hidden, wide, "q"), one(hidden, narrow, "k"), one(hidden, narrow, "v")]
    inner.append(one(wide, hidden, "o"))
    experts = layer.experts
    dense = layer.intermediate if experts is None else experts.shared_width
    last: list[Projection] = []
    if dense:
        inner += [one(hidden, 2 * dense, "gate")] if layer.fused_gate_up else [one(hidden, dense, "gate")]
        if layer.gated and not layer.fused_gate_up:
            inner.append(one(hidden, dense, "up"))
        last.append(one(dense, hidden, "down"))
    if experts is not None:
        merged = trained or (lora is not None and lora.experts > 0)
        inner += [
            Projection(hidden, experts.count, trained=trained),
            Projection(hidden, 2 * experts.width, trained=merged, calls=experts.per_token),
            Projection(experts.width, hidden, trained=merged, calls=experts.per_token),
        ]
    return inner, last


def score_flops(layer: LayerGeometry) -> Rate:
    """Scores and their product with the values. Flash-attention leaves out what lies beyond a window."""
    whole_flops = 4.0 * layer.query_width
    if layer.attention in (Attention.EAGER, Attention.SDPA_MASK):
        return Rate(per_token_length=whole_flops)
    if layer.attention is Attention.FLASH and layer.window is not None:
        return Rate(per_token=whole_flops * layer.window)
    return Rate(per_token_length=whole_flops / 2)


def _last_is_needed(layer: LayerGeometry) -> bool:
    """Whether something saved descends from the output of the last projection."""
    return layer.post_norms or layer.experts is not None


def _running(layer: LayerGeometry) -> Rate:
    """What lives at the MLP's product: what goes into it, it, adapters' middle values, and four of the hidden size (the
    MLP's input, the residual, and what the attention block still holds)."""
    experts, lora = layer.experts, layer.adapters
    width, copies = layer.intermediate, 3 if layer.gated else 2
    hidden = 4
    if experts is not None:
        width, hidden = experts.per_token * experts.width + experts.shared_width, hidden + experts.per_token
    middles = 0 if lora is None else lora.gate + lora.up + lora.down
    size = 0 if lora is None else lora.value_bytes
    return Rate(per_token=float((copies * width + hidden * layer.hidden) * layer.value_bytes + middles * size))


def _gradients(layer: LayerGeometry) -> Rate:
    """Gradients that live at once in the backward of the MLP's product, which has been used up by then; and the one
    that came in, which the residual path needs.

    An adapter on the last projection gives a second gradient beside the frozen weight's, and their sum is a third.
    """
    experts = layer.experts
    width = layer.intermediate if experts is None else experts.per_token * experts.width + experts.shared_width
    adapted = layer.adapters is not None and bool(layer.adapters.down if experts is None else layer.adapters.experts)
    count = 3 if adapted or (layer.gated and not layer.gated_function) else 2
    return Rate(per_token=float(((count - 1) * width + layer.hidden) * layer.value_bytes))


# -- head ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadCosts:
    """Costs of head and loss. `workspace_bytes`: the most that lives at once."""

    workspace_bytes: Rate
    forward: Work
    backward: Work


def head_costs(head: HeadGeometry) -> HeadCosts:
    """Whole logits: they, their log-softmax, and two gradients of that live at once. Chunks: one chunk's logits, and
    the gradients of the hidden states, which a frozen head makes in forward; a trained one sums its own in float32.
    Hidden states: as the last layer gives them, normalised, and shifted by the caller."""
    product = Rate(2.0 * head.hidden * head.vocabulary)
    size, row = head.value_bytes, float(head.vocabulary)
    states = 3.0 * head.hidden * size
    if head.chunk_tokens is None:
        workspace = Rate(row * (size + 12) + states)
        forward, backward = product, product.times(2 if head.trained else 1)
    else:
        copies = 4 if size == 4 else 4 + size
        sums = row * head.hidden * 4 if head.trained else 0.0
        workspace = Rate(states + head.hidden * size, constant=row * head.chunk_tokens * copies + sums)
        # frozen: both products in forward; trained: logits are made again in backward
        forward, backward = (product, product.times(3)) if head.trained else (product.times(2), Rate())
    weights = Rate(constant=row * head.hidden * size)
    return HeadCosts(workspace, Work(forward, Rate(row * 8) + weights), Work(backward, Rate(row * 8) + weights))


# -- for fits and plans --------------------------------------------------------------------------------------------


def unit_rates(layer: LayerGeometry, speed: DeviceSpeed) -> UnitRates:
    """What `Measurements` takes as the proportions of a class of units."""
    costs = layer_costs(layer)
    return UnitRates(
        input_bytes=costs.input_bytes,
        state_bytes=costs.base_bytes,
        forward_s=speed.seconds(costs.forward),
        backward_s=speed.seconds(costs.backward),
        replay_s=speed.seconds(costs.replay),
    )


def analytic_profile(
    unit: UnitId, unit_class: str, costs: LayerCosts, shape: Shape, speed: DeviceSpeed, grad_bytes: int = 0
) -> UnitProfile:
    """A unit as the planner sees it, from the cost model alone: for plans without a run."""
    inputs, state = whole(costs.input_bytes.of(shape)), whole(costs.base_bytes.of(shape))
    gradients, replayed = whole(costs.gradient_bytes.of(shape)), whole(costs.replayed_bytes.of(shape))
    kept, running = whole(costs.kept_bytes.of(shape)), whole(costs.forward_bytes.of(shape))
    saved = speed.seconds(costs.replay).of(shape) - speed.seconds(costs.derive).of(shape)
    variants = [
        Variant(RECOMPUTE, Action.RECOMPUTE, inputs, replayed + gradients, running),
        Variant(STORE, Action.STORE, inputs + state, gradients, max(0, running - state), saved_seconds=saved),
    ]
    if kept:
        rest, kernel_s = max(0, replayed - kept) + gradients, speed.seconds(costs.attention).of(shape)
        variants.append(Variant(_KEEPING.name, Action.RECOMPUTE, inputs + kept, rest, running, saved_seconds=kernel_s))
    return UnitProfile(unit, unit_class, tuple(variants), grad_bytes)


#: A replay that takes over what the attention kernel gave in forward.
_KEEPING = Treatment(Action.RECOMPUTE, keeps=("attention",))
