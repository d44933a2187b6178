"""Log-probabilities of given tokens straight from hidden states and the head, without [tokens, vocab].

The logits of a microbatch are its largest tensor, alive just when memory peaks (design section 4), so they are made and
dropped in chunks of tokens. Two ways to the gradient, both exact; which one is taken depends on what needs it:

    head frozen, no entropy    d logp_t / d hidden_t = (onehot(id_t) - softmax_t) W does not depend on what comes after
                               logp, so it is made in forward, [live tokens, H], and backward only scales its rows:
                               two head products per token in all, and backward never reads the head (ZeRO-3 gathers
                               it once)
    otherwise                  backward makes each chunk's logits again: four products, three with one side frozen

Arithmetic: logits are one product in the dtype of `hidden` (autocast's, under autocast), as a plain head gives them,
so bfloat16 logits are rounded to bfloat16 once. All after it - soft-capping, temperature, softmax, log-sum-exp, entropy
and their derivatives - is float32 (float64 for float64), computed in place on the chunk. Logit gradients are rounded
back to the product's dtype for the two products of backward; a trainable head's gradient is summed over chunks in
float32. Results are float32 (float64).

Left out: double backward, label smoothing, a vocabulary split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_hilore.core.errors import UsageError

#: Size of one chunk of float32 logits where the caller does not choose the chunk.
CHUNK_BYTES = 64 * 2**20

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""Makes partitioned parameters whole for the length of a context, for example `deepspeed.zero.GatheredParameters`."""


@dataclass(frozen=True)
class LogitOptions:
    """How hidden states become the logits whose softmax is meant, and in what steps.

    Args:
        temperature: divides the logits.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature divides them
            (transformers' `final_logit_softcapping`). None: no cap.
        chunk_tokens: tokens per chunk. None: as many as `CHUNK_BYTES` of logits hold.
        gather: for a head whose parameters are partitioned (ZeRO-3); entered around every read of the head. It is a
            collective: every rank must call `log_probs`, and its backward, equally often.

    Raises:
        UsageError: a value that is not positive.
    """

    temperature: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    gather: Gather | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "softcap", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value} must be > 0; for greedy sampling, score at temperature 1")


@overload
def log_probs(
    hidden: Tensor,
    head: Tensor | nn.Module,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    with_entropy: Literal[False] = False,
    options: LogitOptions = LogitOptions(),
) -> Tensor: ...


@overload
def log_probs(
    hidden: Tensor,
    head: Tensor | nn.Module,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    with_entropy: Literal[True],
    options: LogitOptions = LogitOptions(),
) -> tuple[Tensor, Tensor]: ...


def log_probs(
    hidden: Tensor,
    head: Tensor | nn.Module,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    with_entropy: bool = False,
    options: LogitOptions = LogitOptions(),
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits(hidden))[ids] at live positions and 0 elsewhere, differentiable, in chunks over tokens.

    Masked positions cost nothing: they are left out before the first product, whatever they hold. Their results and
    gradients are 0.

    Args:
        hidden: [..., H] hidden states that predict `ids`; the caller shifts. Any leading shape.
        head: [V, H] weight, or the `nn.Linear` or (tied) `nn.Embedding` that holds it. A trainable weight or bias
            gets its gradient; a frozen one gets none and costs none.
        ids: [...] int64 token ids, each in [0, V) at live positions.
        bias: [V], where `head` is a tensor.
        mask: [...] bool or 0/1, true where live. Counting the live positions waits for the device once.
        rows: [n] int64 distinct flat positions that are live, in place of `mask`; does not wait for the device.
        with_entropy: also give the entropy of each distribution, in nats; differentiable too.
        options: temperature, soft cap, chunk, gathering.

    Returns:
        [...] log-probabilities in float32 (float64 for float64), or (log-probabilities, entropies).

    Raises:
        UsageError: shapes or dtypes that do not fit, both `mask` and `rows`, or a head module that is neither Linear
            nor Embedding (an adapter around it would be skipped in silence).

    Source: design section 4 (loss workspace) and section 5 (losses).
    """
    weight, bias = _head_tensors(head, bias)
    rows = _live_rows(hidden, ids, mask, rows)
    flat_ids = ids.reshape(-1)
    live_ids = flat_ids if rows is None else flat_ids.index_select(0, rows)
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    plan = _Plan(options, _product_dtype(hidden, weight))
    values: tuple[Tensor, ...]
    if with_entropy or not torch.is_grad_enabled() or _requires_grad(weight, bias):
        values = _Replayed.apply(flat_hidden, weight, bias, live_ids, rows, plan, with_entropy)
    else:
        values = (_FrozenHead.apply(flat_hidden, weight, bias, live_ids, rows, plan),)
    if rows is not None:
        values = tuple(v.new_zeros(flat_ids.shape).index_copy(0, rows, v) for v in values)
    logps, *entropies = (v.view(ids.shape) for v in values)
    return (logps, entropies[0]) if with_entropy else logps


def _head_tensors(head: Tensor | nn.Module, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, Tensor):
        return head, bias
    if not isinstance(head, (nn.Linear, nn.Embedding)):
        raise UsageError(
            f"head is a {type(head).__name__}; pass an nn.Linear, an nn.Embedding, or the [V, H] weight itself. What "
            "wraps it (a LoRA adapter, for example) would be skipped"
        )
    if bias is not None:
        raise UsageError("bias is read from the head module; pass it only where head is a tensor")
    return head.weight, getattr(head, "bias", None)


def _live_rows(hidden: Tensor, ids: Tensor, mask: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Flat live positions, or None where all are live; checks the shapes on the way."""
    if hidden.shape[:-1] != ids.shape or not hidden.dtype.is_floating_point:
        raise UsageError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} does not fit ids {tuple(ids.shape)}; it must be floating "
            "with one more dimension, [..., H]"
        )
    if rows is not None and mask is not None:
        raise UsageError("mask and rows both name the live positions; pass one of them")
    if rows is not None and (rows.dim() != 1 or rows.dtype != torch.int64):
        raise UsageError(f"rows {tuple(rows.shape)} {rows.dtype} must be 1-D int64 flat positions")
    if mask is None:
        return rows
    if mask.shape != ids.shape:
        raise UsageError(f"mask {tuple(mask.shape)} must have the shape of ids {tuple(ids.shape)}")
    return mask.reshape(-1).nonzero().squeeze(1)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that a plain head would multiply in, here and now."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # autocast leaves float64 alone
        return torch.get_autocast_dtype(device)
    if weight.dtype != hidden.dtype:
        raise UsageError(f"hidden is {hidden.dtype} and the head {weight.dtype}; cast one of them, or use autocast")
    return hidden.dtype


def _requires_grad(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.requires_grad or (bias is not None and bias.requires_grad)


@dataclass(frozen=True)
class _Plan:
    """What both functions below need to know besides tensors."""

    options: LogitOptions
    product: torch.dtype

    @property
    def accumulate(self) -> torch.dtype:
        return torch.promote_types(self.product, torch.float32)

    @contextmanager
    def head(self, weight: Tensor, bias: Tensor | None) -> Iterator[_Head]:
        """The head, whole and in the product's dtype, for the length of the context."""
        partitioned = [p for p in (weight, bias) if isinstance(p, nn.Parameter)]
        gather = self.options.gather
        with torch.autocast(weight.device.type, enabled=False), gather(partitioned) if gather else nullcontext():
            yield _Head(weight.to(self.product), None if bias is None else bias.to(self.product), self)

    def spans(self, tokens: int, vocab: int) -> list[slice]:
        """Even chunks: a remainder of a few tokens would read the whole head for little."""
        most = self.options.chunk_tokens or max(1, CHUNK_BYTES // (vocab * self.accumulate.itemsize))
        count = -(-tokens // most)
        return [slice(tokens * i // count, tokens * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True)
class _Head:
    """A whole head, and the steps from hidden states to the logits z whose softmax is meant, and back."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    plan: _Plan

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise UsageError(
                f"head weight has shape {tuple(self.weight.shape)}; it must be [V, H]. One that ZeRO-3 has "
                "partitioned needs LogitOptions(gather=...)"
            )

    def logits(self, part: Tensor) -> Tensor:
        """z of [c, H] hidden states: [c, V], capped and tempered, fresh: the caller may overwrite it."""
        options = self.plan.options
        z = F.linear(part, self.weight, self.bias).to(self.plan.accumulate)
        if options.softcap is not None:
            z.div_(options.softcap).tanh_().mul_(options.softcap)
        return z if options.temperature == 1.0 else z.div_(options.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """dz / d(raw logit), from z before it is overwritten."""
        options = self.plan.options
        if options.softcap is None:
            return 1.0 / options.temperature
        tanh = z * (options.temperature / options.softcap)
        return tanh.square_().neg_().add_(1.0).div_(options.temperature)


def _part(hidden: Tensor, rows: Tensor | None, span: slice, dtype: torch.dtype) -> Tensor:
    """The live hidden states of one chunk, [c, H]."""
    return (hidden[span] if rows is None else hidden.index_select(0, rows[span])).to(dtype)


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities [n] under a frozen head. d logp / d hidden [n, H] is made in forward; backward scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, rows: Tensor | None, plan: _Plan
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        logps = hidden.new_empty(ids.shape, dtype=plan.accumulate)
        slopes = hidden.new_empty((ids.numel() if wanted else 0, hidden.shape[1]), dtype=plan.product)
        with plan.head(weight, bias) as head:
            for span in plan.spans(ids.numel(), head.weight.shape[0]):
                z = head.logits(_part(hidden, rows, span, plan.product))
                slope = head.slope(z) if wanted else 1.0
                column = ids[span, None]
                z.sub_(z.amax(1, keepdim=True))
                picked = z.gather(1, column)
                total = z.exp_().sum(1, keepdim=True)
                logps[span] = (picked - total.log()).squeeze(1)
                if wanted:
                    z.div_(total.neg_()).scatter_add_(1, column, torch.ones_like(picked)).mul_(slope)
                    torch.mm(z.to(plan.product), head.weight, out=slopes[span])
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        ctx.save_for_backward(slopes, rows)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes, rows = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        # out= multiplies in float32 and rounds once, without a float32 copy of all slopes
        scaled = torch.mul(slopes, grad[:, None], out=torch.empty_like(slopes, dtype=ctx.dtype))
        if rows is not None:
            scaled = scaled.new_zeros(ctx.shape).index_copy_(0, rows, scaled)
        return scaled, None, None, None, None, None


class _Replayed(torch.autograd.Function):
    """Log-probabilities [n], and entropies [n] where asked for; backward makes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        rows: Tensor | None,
        plan: _Plan,
        with_entropy: bool,
    ) -> tuple[Tensor, ...]:
        logps, lse, entropies = hidden.new_zeros((3, ids.numel()), dtype=plan.accumulate).unbind()
        with plan.head(weight, bias) as head:
            for span in plan.spans(ids.numel(), head.weight.shape[0]):
                z = head.logits(_part(hidden, rows, span, plan.product))
                top = z.amax(1, keepdim=True)
                picked = z.sub_(top).gather(1, ids[span, None]).squeeze(1)
                weights = z.exp() if with_entropy else z.exp_()
                total = weights.sum(1)
                log_total = total.log()
                logps[span] = picked - log_total
                lse[span] = log_total + top.squeeze(1)
                if with_entropy:
                    entropies[span] = log_total - weights.mul_(z).sum(1) / total
        ctx.plan, ctx.with_entropy = plan, with_entropy
        ctx.save_for_backward(hidden, weight, bias, ids, rows, lse, entropies)
        return (logps.clone(), entropies.clone()) if with_entropy else (logps.clone(),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor, grad_entropies: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, rows, lse, entropies = ctx.saved_tensors
        plan: _Plan = ctx.plan
        with plan.head(weight, bias) as head:
            sums = _GradientSums.of(ctx.needs_input_grad, hidden, head)
            for span in plan.spans(ids.numel(), head.weight.shape[0]):
                part = _part(hidden, rows, span, plan.product)
                z = head.logits(part)
                slope, grad = head.slope(z), grad_logps[span, None]
                z.sub_(lse[span, None])
                if grad_entropies is None:
                    z.exp_().mul_(-grad)
                else:
                    probs = z.exp()
                    z.add_(entropies[span, None]).mul_(grad_entropies[span, None]).add_(grad).mul_(probs).neg_()
                z.scatter_add_(1, ids[span, None], grad).mul_(slope)
                sums.add(z.to(plan.product), part, rows, span)
        return (*sums.finish(hidden, weight, bias), None, None, None, None)


@dataclass
class _GradientSums:
    """Gradients of hidden states, weight and bias while chunks are added; None where not wanted."""

    head: _Head
    hidden: Tensor | None  # [N, H], dtype of hidden
    weight: Tensor | None  # [V, H], float32 or wider
    bias: Tensor | None  # [V], float32 or wider

    @classmethod
    def of(cls, wanted: Sequence[bool], hidden: Tensor, head: _Head) -> _GradientSums:
        wide = head.plan.accumulate
        return cls(
            head,
            torch.zeros_like(hidden) if wanted[0] else None,
            torch.zeros_like(head.weight, dtype=wide) if wanted[1] else None,
            head.weight.new_zeros(head.weight.shape[0], dtype=wide) if wanted[2] else None,
        )

    def add(self, dlogits: Tensor, part: Tensor, rows: Tensor | None, span: slice) -> None:
        if self.hidden is not None:
            product = (dlogits @ self.head.weight).to(self.hidden.dtype)
            if rows is None:
                self.hidden[span] = product
            else:
                self.hidden.index_copy_(0, rows[span], product)
        if self.weight is not None:
            if self.weight.dtype == dlogits.dtype:
                self.weight.addmm_(dlogits.T, part)
            else:
                self.weight.add_(dlogits.T @ part)  # widened as it is added
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))

    def finish(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )
