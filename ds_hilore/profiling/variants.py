"""The variants of a unit as measured parts make them: which there are, and their bytes and seconds for a shape.

    H              all saved tensors
    R              the inputs; a replay
    R:attention    the inputs and what the attention kernel gave; a replay without that kernel
    L:...          state groups in low precision, everything else of H
    O              what H holds, in host memory: of every so many units one, as many as the link can hide
    O:input        R, with its inputs in host memory

Nothing is measured per variant before plans are followed: bytes and seconds are put together from those of operators,
state groups and codecs, each seen once in a stored unit. What the trial then sees of whole variants takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, REPLAYED, STORED, Treatment
from ds_hilore.core.types import Action, Shape, Variant
from ds_hilore.profiling.fit import BytesFit, Rate, SecondsFit
from ds_hilore.profiling.host_link import LinkSpeed

#: The group that cheap codecs may not touch: attention's backward rebuilds its probabilities from them.
SENSITIVE = "attention_qk"
#: The group with most bytes and least sensitivity, which is compressed first.
FIRST = "mlp"
#: All other groups, in calibration.
REST = "rest"
#: The one codec that what is sensitive stands.
PRECISE = "bf16"


@dataclass
class OperatorFits:
    """Outputs of an operator that a replay may be handed: their bytes, and the seconds of running it."""

    held: BytesFit = field(default_factory=BytesFit)
    seconds: SecondsFit = field(default_factory=lambda: SecondsFit(Rate(per_token_length=1.0)))


@dataclass
class CodecFits:
    """One state group under one codec. `error`: root mean square of e over what was encoded (design section 3)."""

    held: BytesFit = field(default_factory=BytesFit)
    encode: SecondsFit = field(default_factory=SecondsFit)
    decode: SecondsFit = field(default_factory=SecondsFit)
    squares: float = 0.0
    count: int = 0

    @property
    def error(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def note_error(self, error: float) -> None:
        self.squares += error * error
        self.count += 1


@dataclass
class StateFits:
    """What a stored unit's state is made of, by class of units."""

    operators: dict[str, OperatorFits] = field(default_factory=dict)
    groups: dict[str, BytesFit] = field(default_factory=dict)
    codecs: dict[tuple[str, str], CodecFits] = field(default_factory=dict)

    def operator(self, name: str) -> OperatorFits:
        return self.operators.setdefault(name, OperatorFits())

    def group(self, name: str) -> BytesFit:
        return self.groups.setdefault(name, BytesFit())

    def codec(self, group: str, codec: str) -> CodecFits:
        return self.codecs.setdefault((group, codec), CodecFits())

    def solved(self) -> tuple[Rate, ...]:
        """All rates as they stand."""
        fits = [fit for found in self.operators.values() for fit in (found.held, found.seconds)]
        more = [fit for found in self.codecs.values() for fit in (found.held, found.encode, found.decode)]
        return tuple([fit.rate for fit in (*fits, *self.groups.values(), *more)])


@dataclass(frozen=True)
class Whole:
    """A unit as a whole, for one shape: bytes of inputs and of the state that storing adds, seconds of a replay.

    `link`: to host memory; None where state may not be sent there. `position`: of the unit in forward order.
    `gain`: measured seconds that a variant saves against R, encoding included, or None. `risk`: r at exposure 1, or
    None where the variant may not be used. `least_encoded_bytes`: smaller state groups are not compressed.
    """

    shape: Shape
    input_bytes: int
    state_bytes: int
    replay_s: float
    gain: Callable[[str], float | None]
    risk: Callable[[Treatment], float | None]
    least_encoded_bytes: int = 0
    link: LinkSpeed | None = None
    position: int = 0


def variants(whole: Whole, state: StateFits) -> Iterator[Variant]:
    """All variants of a unit whose state was measured, R first."""
    # a replay holds the same bundle, by the same recipes, while the unit's backward runs
    yield Variant(REPLAYED.name, Action.RECOMPUTE, whole.input_bytes, workspace_bytes=whole.state_bytes)
    saved = _or(whole.gain(STORED.name), whole.replay_s)
    yield Variant(STORED.name, Action.STORE, whole.input_bytes + whole.state_bytes, saved_seconds=saved)
    for operator, fits in state.operators.items():
        yield _keeping(whole, operator, fits)
    if whole.link is not None:
        yield from _away(whole, whole.link, saved)
    for codecs in compressions(state, whole.shape):
        if any(state.groups[group].of(whole.shape) < whole.least_encoded_bytes for group, _ in codecs):
            continue
        treatment = Treatment(Action.COMPRESS, codecs=codecs)
        risk = whole.risk(treatment)
        if risk is not None:
            yield _compressed(whole, state, treatment, risk)


def _away(whole: Whole, link: LinkSpeed, stored_s: float) -> Iterator[Variant]:
    """State in host memory. `forward_bytes` is what lies on the device when the unit has run, before it is sent, and
    comes back for its backward."""
    inputs, everything = whole.input_bytes, whole.input_bytes + whole.state_bytes
    # a replay takes about as long as a forward, and no backward takes less
    if whole.position % link.stride(everything, whole.replay_s) == 0:
        computed = stored_s - link.exposed_seconds(everything)
        yield _on_host(whole, OFFLOADED, link.host_bytes(everything), everything, everything, computed)
    computed = -link.exposed_seconds(inputs)
    yield _on_host(whole, INPUT_OFFLOADED, link.host_bytes(inputs), inputs, everything, computed)


def _on_host(
    whole: Whole, treatment: Treatment, host_bytes: int, forward_bytes: int, workspace_bytes: int, computed_s: float
) -> Variant:
    return Variant(
        treatment.name,
        treatment.action,
        host_bytes,
        workspace_bytes,
        forward_bytes,
        saved_seconds=_or(whole.gain(treatment.name), computed_s),
        place=treatment.place,
    )


def _keeping(whole: Whole, operator: str, fits: OperatorFits) -> Variant:
    treatment = Treatment(Action.RECOMPUTE, keeps=(operator,))
    held = fits.held.of(whole.shape)
    return Variant(
        treatment.name,
        Action.RECOMPUTE,
        whole.input_bytes + held,
        workspace_bytes=max(0, whole.state_bytes - held),
        saved_seconds=_or(whole.gain(treatment.name), fits.seconds.of(whole.shape)),
    )


def _compressed(whole: Whole, state: StateFits, treatment: Treatment, risk: float) -> Variant:
    used = [(state.groups[group], state.codecs[(group, codec)]) for group, codec in treatment.codecs]
    raw = sum(group.of(whole.shape) for group, _ in used)
    held = sum(codec.held.of(whole.shape) for _, codec in used)
    encode_s = sum(codec.encode.of(whole.shape) for _, codec in used)
    decode_s = sum(codec.decode.of(whole.shape) for _, codec in used)
    gain = whole.gain(treatment.name)
    return Variant(
        treatment.name,
        Action.COMPRESS,
        whole.input_bytes + max(0, whole.state_bytes - raw) + held,
        workspace_bytes=raw,
        forward_bytes=raw,
        saved_seconds=whole.replay_s - decode_s if gain is None else gain + encode_s,
        prepare_seconds=encode_s,
        risk=risk,
        codecs=treatment.codecs,
    )


def compressions(state: StateFits, shape: Shape) -> list[tuple[tuple[str, str], ...]]:
    """Which codecs by state group are worth offering, of those that were measured and make the group smaller.

    The MLP alone, at its smallest; everything at its most precise; the same with the MLP at its smallest. More of them
    would cost planning and calibration time for little: groups differ in sensitivity by orders of magnitude.
    """
    ways: dict[str, list[str]] = {}
    for (group, codec), fits in state.codecs.items():
        if group in state.groups and fits.held.of(shape) < state.groups[group].of(shape):
            ways.setdefault(group, []).append(codec)
    calm = {
        group: min(codecs, key=lambda codec: state.codecs[(group, codec)].error)
        for group, codecs in ways.items()
        if group != SENSITIVE or PRECISE in codecs
    }
    offered: list[Mapping[str, str]] = [calm]
    if FIRST in ways:
        smallest = min(ways[FIRST], key=lambda codec: state.codecs[(FIRST, codec)].held.of(shape))
        offered += [{FIRST: smallest}, {**calm, FIRST: smallest}]
    return list(dict.fromkeys(tuple(sorted(way.items())) for way in offered if way))


def components(codecs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[tuple[str, str], ...]]:
    """What of a compressed state is calibrated together, as (name, codec): the MLP, and under one codec all the rest,
    which no variant tells apart. Their parts are (state group, codec) pairs."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for group, codec in codecs:
        found.setdefault((FIRST if group == FIRST else REST, codec), []).append((group, codec))
    return {key: tuple(sorted(pairs)) for key, pairs in found.items()}


def error_of(state: StateFits, pairs: Iterable[tuple[str, str]]) -> float:
    """Root mean square of e over all tensors of the pairs."""
    fits = [state.codecs[pair] for pair in pairs]
    count = sum(each.count for each in fits)
    return math.sqrt(math.fsum(each.squares for each in fits) / count) if count else 0.0


def _or(measured: float | None, computed: float) -> float:
    return computed if measured is None else measured
