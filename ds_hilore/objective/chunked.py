"""Log-probabilities of given tokens straight from hidden states and the head, without [tokens, vocab].

The logits of a microbatch are its largest tensor, alive just when memory peaks (design section 4), so they are made and
dropped in chunks of tokens. There are two ways to the gradient, both exact; what needs a gradient decides:

    frozen head    d logp_t / d hidden_t = (onehot(id_t) - softmax_t) W does not depend on what comes after logp. It is
                   made in forward, [live tokens, H], and backward only scales its rows: two head products per token
                   in all, and backward never reads the head.
    otherwise      (trainable head, or entropies with gradient) backward makes each chunk's logits again: four
                   products, or three where the head or the hidden states are frozen.

Arithmetic: logits are one product in the dtype of `hidden` (autocast's, under autocast), as a plain head gives them,
so bfloat16 logits are rounded to bfloat16 once. All behind it - soft cap, temperature, softmax, entropy and their
derivatives - is float32 (float64 for float64), in place on the chunk. Logit gradients are rounded to the product's
dtype for the products of backward; the gradient of a trainable head is summed over chunks in float32. Results are
float32 (float64).

Left out: double backward, label smoothing, a vocabulary split over ranks, logits of -inf in entropies (NaN, as in the
plain formula).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.head import (
    PLAIN,
    HeadPlan,
    LogitOptions,
    WholeHead,
    call_through,
    head_requires_grad,
    head_tensors,
    product_dtype,
)

__all__ = ["LogitOptions", "log_probs"]


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
    options: LogitOptions = PLAIN,
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
    options: LogitOptions = PLAIN,
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
    options: LogitOptions = PLAIN,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits(hidden))[ids] at live positions and 0 elsewhere, differentiable, in chunks over tokens.

    Masked positions cost nothing: they are left out before the first product, whatever they hold. Their results and
    gradients are 0.

    Args:
        hidden: [..., H] hidden states that predict `ids`; the caller shifts. Any leading shape.
        head: [V, H] weight, or the `nn.Linear` or (tied) `nn.Embedding` that holds it. A trainable weight or bias
            gets its gradient; a frozen one gets none and costs none. A module is called, with its forward exchanged
            for the length of the call, so that its hooks run: that is how ZeRO-3 gathers a partitioned head, trainable
            or frozen, in forward and again in backward. For a frozen one, `options.gather` gathers once only.
        ids: [...] int64 token ids, each in [0, V) at live positions.
        bias: [V], where `head` is a tensor.
        mask: [...] bool or 0/1, true where live. Counting the live positions waits for the device once.
        rows: [n] int64 distinct flat positions that are live, in place of `mask`; does not wait for the device.
        with_entropy: also give the entropy of each distribution, in nats; differentiable too.
        options: temperature, soft cap, chunk size, gathering.

    Returns:
        [...] log-probabilities in float32 (float64 for float64), or (log-probabilities, entropies).

    Raises:
        UsageError: shapes or dtypes that do not fit, both `mask` and `rows`, or a head module that is neither Linear
            nor Embedding (an adapter around it would be skipped in silence).

    Source: design section 4 (loss workspace) and section 5 (losses).
    """
    weight, bias = head_tensors(head, bias, options)
    rows = _live_rows(hidden, ids, mask, rows)
    flat_ids = ids.reshape(-1)
    live_ids = flat_ids if rows is None else flat_ids.index_select(0, rows)
    plan = HeadPlan(options, product_dtype(hidden, weight))
    entropy_grad = with_entropy and options.entropy_grad
    replay = entropy_grad or head_requires_grad(weight, bias) or not torch.is_grad_enabled()
    function = _Replayed if replay else _FrozenHead

    def compute(flat_hidden: Tensor) -> tuple[Tensor, ...]:
        return function.apply(flat_hidden, weight, bias, live_ids, rows, plan, with_entropy)

    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(head, nn.Module) and options.gather is None:
        values = call_through(head, flat_hidden, compute)
    else:
        values = compute(flat_hidden)
    if rows is not None:
        values = tuple(v.new_zeros(flat_ids.shape).index_copy(0, rows, v) for v in values)
    logps, *entropies = (v.view(ids.shape) for v in values)
    if not with_entropy:
        return logps
    return logps, entropies[0] if entropy_grad else entropies[0].detach()


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


def _part(hidden: Tensor, rows: Tensor | None, span: slice, dtype: torch.dtype) -> Tensor:
    """The live hidden states of one chunk, [c, H]."""
    return (hidden[span] if rows is None else hidden.index_select(0, rows[span])).to(dtype)


@dataclass(frozen=True)
class _Softmax:
    """Softmax of a chunk's logits, and what is read off it; all but `weights` are [c, 1]."""

    weights: Tensor  # [c, V] exp(z - max)
    total: Tensor  # their sum over V
    logp: Tensor
    lse: Tensor
    entropy: Tensor | None

    @classmethod
    def of(cls, z: Tensor, column: Tensor, with_entropy: bool) -> _Softmax:
        """Args: z [c, V] is overwritten; column [c, 1] token ids."""
        top = z.amax(1, keepdim=True)
        picked = z.sub_(top).gather(1, column)
        weights = z.exp() if with_entropy else z.exp_()
        total = weights.sum(1, keepdim=True)
        log_total = total.log()
        entropy = log_total - z.mul_(weights).sum(1, keepdim=True) / total if with_entropy else None
        return cls(weights, total, picked - log_total, log_total + top, entropy)


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities [n] (and entropies [n], without gradient) under a frozen head; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        rows: Tensor | None,
        plan: HeadPlan,
        with_entropy: bool,
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[0]
        values = [hidden.new_empty(ids.shape, dtype=plan.accumulate) for _ in range(1 + with_entropy)]
        slopes = hidden.new_empty((ids.numel() if wanted else 0, hidden.shape[1]), dtype=plan.product)
        with plan.open(weight, bias) as head:
            for span in head.spans(ids.numel(), len(hidden)):
                z = head.logits(_part(hidden, rows, span, plan.product))
                slope = head.slope(z) if wanted else 1.0
                column = ids[span, None]
                softmax = _Softmax.of(z, column, with_entropy)
                values[0][span] = softmax.logp.squeeze(1)
                if softmax.entropy is not None:
                    values[1][span] = softmax.entropy.squeeze(1)
                if wanted:
                    minus_probs = softmax.weights.div_(softmax.total.neg_())
                    dlogits = minus_probs.scatter_add_(1, column, torch.ones_like(softmax.logp)).mul_(slope)
                    torch.mm(dlogits.to(plan.product), head.weight, out=slopes[span])
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        ctx.save_for_backward(slopes, rows)
        ctx.mark_non_differentiable(*values[1:])
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor | None = None) -> tuple[Tensor | None, ...]:
        slopes, rows = ctx.saved_tensors
        # out= multiplies in float32 and rounds once, without a float32 copy of all slopes
        scaled = torch.mul(slopes, grad[:, None], out=torch.empty_like(slopes, dtype=ctx.dtype))
        if rows is not None:
            scaled = scaled.new_zeros(ctx.shape).index_copy_(0, rows, scaled)
        return scaled, None, None, None, None, None, None


class _Replayed(torch.autograd.Function):
    """Log-probabilities [n] (and entropies [n]); backward makes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        rows: Tensor | None,
        plan: HeadPlan,
        with_entropy: bool,
    ) -> tuple[Tensor, ...]:
        values = [hidden.new_empty(ids.shape, dtype=plan.accumulate) for _ in range(1 + with_entropy)]
        lse = torch.empty_like(values[0])
        with plan.open(weight, bias) as head:
            for span in head.spans(ids.numel(), len(hidden)):
                z = head.logits(_part(hidden, rows, span, plan.product))
                softmax = _Softmax.of(z, ids[span, None], with_entropy)
                values[0][span] = softmax.logp.squeeze(1)
                lse[span] = softmax.lse.squeeze(1)
                if softmax.entropy is not None:
                    values[1][span] = softmax.entropy.squeeze(1)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, ids, rows, lse, *values[1:])
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, rows, lse, *entropies = ctx.saved_tensors
        plan: HeadPlan = ctx.plan
        if grad_logps is None:
            grad_logps = torch.zeros_like(lse)
        with plan.open(weight, bias) as head:
            sums = _GradientSums.of(ctx.needs_input_grad, hidden, head)
            for span in head.spans(ids.numel(), len(hidden)):
                part = _part(hidden, rows, span, plan.product)
                z = head.logits(part)
                slope, grad = head.slope(z), grad_logps[span, None]
                z.sub_(lse[span, None])
                if grad_entropies is None:
                    z.exp_().mul_(-grad)
                else:  # d entropy / dz = -p (log p + entropy)
                    probs = z.exp()
                    z.add_(entropies[0][span, None]).mul_(grad_entropies[span, None]).add_(grad).mul_(probs).neg_()
                z.scatter_add_(1, ids[span, None], grad).mul_(slope)
                sums.add(z.to(plan.product), part, rows, span)
        return (*sums.finish(weight, bias), None, None, None, None)


@dataclass
class _GradientSums:
    """Gradients of hidden states, weight and bias while chunks are added; None where not wanted."""

    head: WholeHead
    hidden: Tensor | None  # [N, H], dtype of hidden
    weight: Tensor | None  # [V, H], float32 or wider
    bias: Tensor | None  # [V], float32 or wider

    @classmethod
    def of(cls, wanted: Sequence[bool], hidden: Tensor, head: WholeHead) -> _GradientSums:
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

    def finish(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )
