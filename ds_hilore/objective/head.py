"""How hidden states become logits: what a head is, how ZeRO-3 makes it whole, the size of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hilore.core.errors import UsageError

#: Largest size of one chunk of logits, in the dtype of the softmax, where the caller does not choose the chunk.
CHUNK_BYTES = 64 * 2**20
#: Small batches have chunks of so many tokens, or of this part of their positions: microbatches of one shape then need
#: the same workspace, which plans count on, as soon as that part of them is live.
CHUNK_TOKENS, CHUNK_PART = 128, 8

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""Makes partitioned parameters whole for the length of a context, for example `deepspeed.zero.GatheredParameters`."""


@dataclass(frozen=True)
class LogitOptions:
    """Which logits are meant, and how they are made.

    Args:
        temperature: divides the logits.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature divides them
            (transformers' `final_logit_softcapping`). None: no cap.
        chunk_tokens: tokens per chunk. None: `default_chunk_tokens`.
        entropy_grad: False makes entropies a mere metric: they carry no gradient, and a frozen head is not read again
            in backward for their sake.
        gather: for a frozen head module that ZeRO-3 has partitioned: entered once, in forward, in place of calling
            the module (see `log_probs`). A collective: every rank must call `log_probs` equally often.

    Raises:
        UsageError: a value that is not positive.
    """

    temperature: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    entropy_grad: bool = True
    gather: Gather | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "softcap", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value} must be > 0; sampling was greedy? Then score at temperature 1")


#: The softmax of the head's own logits, in chunks of the default size.
PLAIN = LogitOptions()


def default_chunk_tokens(vocabulary: int, positions: int, itemsize: int = 4) -> int:
    """Tokens of a chunk of logits [chunk, `vocabulary`] where the caller does not choose: as many as `CHUNK_BYTES`
    hold, but not more than an eighth of the `positions` [B * T] of the microbatch where that is above 128."""
    return max(1, min(CHUNK_BYTES // (vocabulary * itemsize), max(CHUNK_TOKENS, positions // CHUNK_PART)))


def head_tensors(head: Tensor | nn.Module, bias: Tensor | None, options: LogitOptions) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a head, possibly partitioned.

    Raises:
        UsageError: the module is no plain head, or what is passed beside it contradicts it.
    """
    if isinstance(head, nn.Module):
        if not isinstance(head, (nn.Linear, nn.Embedding)):
            raise UsageError(
                f"head is a {type(head).__name__}; pass an nn.Linear, an nn.Embedding, or the [V, H] weight itself. "
                "What wraps it (a LoRA adapter, for example) would be skipped"
            )
        if bias is not None:
            raise UsageError("bias is read from the head module; pass it only where head is a tensor")
        head, bias = head.weight, getattr(head, "bias", None)
    if options.gather is not None and head_requires_grad(head, bias):
        # Measured on ZeRO-3: autograd expects the gradient of a partitioned leaf in the partitioned shape, [0].
        raise UsageError("gather serves frozen heads; leave it out and pass the head module, whose own hooks gather it")
    return head, bias


def head_requires_grad(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that a plain head would multiply in, here and now.

    Raises:
        UsageError: outside autocast, the dtypes differ.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # autocast leaves float64 alone
        return torch.get_autocast_dtype(device)
    if weight.dtype != hidden.dtype:
        raise UsageError(f"hidden is {hidden.dtype} and the head {weight.dtype}; cast one of them, or use autocast")
    return hidden.dtype


def call_through(
    head: nn.Module, hidden: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """`compute(hidden)` as if it were the module's forward, so that the module's hooks run around it.

    ZeRO-3 gathers a module's parameters in such hooks, before its forward and before its backward, and expects
    gradients in between. This is what makes a trainable partitioned head work.
    """
    own = head.__dict__.get("forward")  # some hosts have put a wrapper there already
    head.forward = compute
    try:
        return head(hidden)
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


@dataclass(frozen=True)
class HeadPlan:
    """What reading a head needs to know beside its tensors.

    Args:
        product: dtype of the product of hidden states and weight.
    """

    options: LogitOptions
    product: torch.dtype

    @property
    def accumulate(self) -> torch.dtype:
        """dtype of everything behind the product."""
        return torch.promote_types(self.product, torch.float32)

    @contextmanager
    def open(self, weight: Tensor, bias: Tensor | None) -> Iterator[WholeHead]:
        """The head, whole and in the product's dtype, for the length of the context."""
        gather = self.options.gather
        partitioned = [p for p in (weight, bias) if isinstance(p, nn.Parameter)]
        with torch.autocast(weight.device.type, enabled=False), gather(partitioned) if gather else nullcontext():
            yield WholeHead(weight.to(self.product), None if bias is None else bias.to(self.product), self)


@dataclass(frozen=True)
class WholeHead:
    """The steps from hidden states to z, the capped and tempered logits whose softmax is meant, and back."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    plan: HeadPlan

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise UsageError(
                f"head weight has shape {tuple(self.weight.shape)}; it must be [V, H]. Where ZeRO-3 has "
                "partitioned it, pass the head module and not its weight"
            )

    def spans(self, live: int, positions: int) -> list[slice]:
        """Chunks of the `live` ones of so many `positions`. All but the last are full: even ones would make the
        workspace depend on how many tokens are live."""
        size = self.plan.options.chunk_tokens
        if size is None:
            size = default_chunk_tokens(self.weight.shape[0], positions, self.plan.accumulate.itemsize)
        return [slice(first, min(live, first + size)) for first in range(0, live, size)]

    def logits(self, part: Tensor) -> Tensor:
        """z [c, V] of hidden states [c, H]; fresh, so the caller may overwrite it."""
        options = self.plan.options
        z = F.linear(part, self.weight, self.bias).to(self.plan.accumulate)
        if options.softcap is not None:
            z.div_(options.softcap).tanh_().mul_(options.softcap)
        return z if options.temperature == 1.0 else z.div_(options.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """dz / d(raw logit), to be read before z is overwritten."""
        options = self.plan.options
        if options.softcap is None:
            return 1.0 / options.temperature
        tanh = z * (options.temperature / options.softcap)
        return tanh.square_().neg_().add_(1.0).div_(options.temperature)
