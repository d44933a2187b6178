"""The GRPO loss family and its token coefficients omega = dLoss/dlogp in closed form (design section 3).

Shapes: B rows (responses), T response tokens. Derivations are in this folder's README.

Conventions that both functions share:
- Constants are constants: only `logps` carries gradient; everything else is detached.
- Everything is computed in float32 or wider. bfloat16 and float16 are widened first, float64 stays.
- Masked positions may hold anything, NaN and infinities included, in every argument. They are replaced *before* any
  arithmetic, because 0 * NaN is NaN in the value and 0 * inf is NaN in the gradient of exp.
- NaN at a live position is not hidden: it reaches the loss and omega.
- Nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.update import Count, UpdateSize


class RatioLevel(Enum):
    """Over what the importance ratio is taken."""

    TOKEN = "token"  # ratio_t = exp(lp_t - old_t)
    SEQUENCE = "sequence"  # GSPO: one ratio per row, exp(mean over its live tokens of lp - old)


class Algorithm(Enum):
    """How the ratio enters the policy term."""

    CLIP = "clip"  # PPO, GRPO, DAPO, GSPO: -min(ratio * A, clip(ratio) * A)
    CISPO = "cispo"  # -stop_gradient(min(ratio, cispo_cap)) * A * lp


class Normalisation(Enum):
    """What the sum over tokens is divided by. Always counted over the whole update, all ranks and microbatches."""

    TOKEN = "token"  # N live tokens (DAPO; TRL "dapo", "cispo", and "bnpo" within one microbatch)
    SEQUENCE = "sequence"  # mean over a row's live tokens, then over rows, masked rows included (TRL "grpo")
    CONSTANT = "constant"  # rows * row_length (Dr. GRPO; TRL "dr_grpo")


@dataclass(frozen=True)
class GRPOLossConfig:
    """Which loss of the family. The defaults are GRPO without a reference model, normalised by tokens.

    Args:
        eps_low: the ratio is clipped below at 1 - eps_low (for A < 0). In [0, 1].
        eps_high: the ratio is clipped above at 1 + eps_high (for A >= 0). At least 0.
        delta: second upper bound, for either sign of A (two-sided clip); at least 1 + eps_high. None: no bound.
        cispo_cap: upper bound of the ratio in CISPO. TRL calls this number `epsilon_high` when its loss is "cispo".
        beta: weight of the k3 estimate of KL(policy || reference). 0: no reference needed.
        kl_with_ratio: multiply k3 by the unclipped ratio (TRL's `use_bias_correction_kl`).
        row_length: tokens a row may have at most; needed by `Normalisation.CONSTANT`, and by nothing else.

    Raises:
        UsageError: a value outside its range, or two that contradict each other.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float | None = None
    cispo_cap: float = 5.0
    beta: float = 0.0
    kl_with_ratio: bool = False
    level: RatioLevel = RatioLevel.TOKEN
    algorithm: Algorithm = Algorithm.CLIP
    normalisation: Normalisation = Normalisation.TOKEN
    row_length: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("level", RatioLevel), ("algorithm", Algorithm), ("normalisation", Normalisation)):
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}: {[str(m) for m in kind]}")
        if not 0 <= self.eps_low <= 1:
            raise UsageError(f"eps_low={self.eps_low} must be in [0, 1]: the ratio is clipped at 1 - eps_low")
        if not 0 <= self.eps_high < math.inf:
            raise UsageError(f"eps_high={self.eps_high} must be finite and >= 0; to leave out the clip, use CISPO")
        if not 0 <= self.beta < math.inf:
            raise UsageError(f"beta={self.beta} must be finite and >= 0; a negative one rewards leaving the reference")
        if not self.cispo_cap > 0:
            raise UsageError(f"cispo_cap={self.cispo_cap} must be > 0; usual values are 1 to 5")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.delta is not None:
            if self.algorithm is Algorithm.CISPO:
                raise UsageError("delta has no meaning in CISPO; set cispo_cap")
            # Below it, min() and the rule `ratio <= delta` part company for A < 0, and TRL's loss with them.
            if not self.delta >= 1 + self.eps_high:
                raise UsageError(f"delta={self.delta} must be >= 1 + eps_high = {1 + self.eps_high}")
        constant = self.normalisation is Normalisation.CONSTANT
        if constant and (self.row_length is None or self.row_length < 1):
            raise UsageError(
                f"row_length={self.row_length} must be >= 1 for CONSTANT; set it to the longest response allowed"
            )
        if not constant and self.row_length is not None:
            raise UsageError(f"row_length={self.row_length} is only read by CONSTANT, not {self.normalisation}")


def grpo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: Count | UpdateSize,
    *,
    config: GRPOLossConfig,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """This microbatch's share of the update's loss; its gradient in `logps` is `token_coefficients`.

    The shares of all microbatches and ranks add up to the loss of the whole update. Where gradients are then averaged
    (data-parallel ranks, accumulation steps), the caller multiplies by that number.

    Args:
        logps: [B, T] log-probabilities of the response tokens under the current model; carries the gradient.
        old_logps: [B, T] those at sampling time. None: the ratio is 1 and still has its gradient (first pass).
        advantages: [B], [B, 1] or [B, T].
        mask: [B, T] bool or 0/1; true where a token is optimised.
        num_tokens: N of the whole update, clamped to >= 1. `UpdateSize` where the normalisation counts rows.
        config: which loss.
        ref_logps: [B, T] those of the reference model; needed where beta > 0, unused otherwise.
        weights: [B], [B, 1] or [B, T] importance-sampling weights of the rollout engine; they multiply the policy
            term and not the KL.

    Returns:
        0-dim tensor, float32, or float64 if any input is.

    Raises:
        UsageError: shapes that do not fit, a reference or a row count that is missing.

    Source: design section 3; the forms of TRL's `GRPOTrainer._compute_loss`.
    """
    terms = _Terms.of(logps, old_logps, advantages, mask, num_tokens, config, ref_logps, weights)
    if config.algorithm is Algorithm.CISPO:
        policy = -terms.ratio.detach().clamp(max=config.cispo_cap) * terms.advantages * terms.logps
    else:
        clipped, bound = _clip(terms, config)
        # Clipped positions leave before exp: behind it their zero gradient would meet an infinite ratio.
        inside = torch.where(clipped, 0.0, terms.log_ratio).exp()
        policy = -torch.where(clipped, bound, inside) * terms.advantages
    if terms.weights is not None:
        policy = policy * terms.weights
    per_token = policy
    if terms.ref_gap is not None:
        k3 = torch.expm1(terms.ref_gap) - terms.ref_gap
        per_token = policy + config.beta * (k3 * terms.ratio if config.kl_with_ratio else k3)
    return (torch.where(terms.live, per_token, 0.0) * terms.share).sum()


@torch.no_grad()
def token_coefficients(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: Count | UpdateSize,
    *,
    config: GRPOLossConfig,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """omega = dLoss/dlogp of `grpo_loss` for the same arguments, in closed form, without autograd.

    Returns:
        [B, T], float32, or float64 if any input is; exactly 0 at masked positions.

    Raises:
        UsageError: as `grpo_loss`.

    Source: design section 3.
    """
    terms = _Terms.of(logps, old_logps, advantages, mask, num_tokens, config, ref_logps, weights)
    if config.algorithm is Algorithm.CISPO:
        # The capped ratio is a constant of this loss, so even a sequence-level one couples no tokens.
        policy = -terms.ratio.clamp(max=config.cispo_cap) * terms.advantages
    else:
        clipped, _ = _clip(terms, config)
        policy = torch.where(clipped, 0.0, -terms.ratio * terms.advantages)
    if terms.weights is not None:
        policy = policy * terms.weights
    if config.algorithm is Algorithm.CLIP and config.level is RatioLevel.SEQUENCE:
        policy = terms.row_mean(policy)
    omega = policy
    if terms.ref_gap is not None:
        omega = policy + config.beta * _kl_slope(terms, terms.ref_gap, config)
    return torch.where(terms.live, omega * terms.share, 0.0)


def first_pass_coefficients(
    advantages: Tensor,
    mask: Tensor,
    num_tokens: Count | UpdateSize,
    *,
    config: GRPOLossConfig,
    weights: Tensor | None = None,
) -> Tensor:
    """omega as it is known before forward: that of ratio 1 (the first pass over the data), without the KL term.

    Args and Raises as `token_coefficients`; returns [B, T].
    """
    dtype = torch.promote_types(advantages.dtype, torch.float32)
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    without_kl = replace(config, beta=0.0)
    return token_coefficients(zeros, None, advantages, mask, num_tokens, config=without_kl, weights=weights)


@dataclass(frozen=True)
class _Terms:
    """The arguments, widened, broadcast, and with masked positions replaced by harmless constants.

    live [B, T] bool; logps [B, T]; log_ratio [B, T], equal along T at sequence level; ratio = exp(log_ratio);
    advantages [B, T]; weights [B, T] or None; ref_gap = ref - logps [B, T], or None where beta is 0;
    row_tokens [B, 1] live tokens, at least 1; share [B, 1] or 0-dim: what a live token's loss is multiplied by.
    """

    live: Tensor
    logps: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    weights: Tensor | None
    ref_gap: Tensor | None
    row_tokens: Tensor
    share: Tensor

    @classmethod
    def of(
        cls,
        logps: Tensor,
        old_logps: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        num_tokens: Count | UpdateSize,
        config: GRPOLossConfig,
        ref_logps: Tensor | None,
        weights: Tensor | None,
    ) -> _Terms:
        named = {"logps": logps, "old_logps": old_logps, "mask": mask, "ref_logps": ref_logps}
        named |= {"advantages": advantages, "weights": weights}
        _check_shapes(named, config)
        live = mask != 0
        dtype = torch.float32
        for tensor in (logps, old_logps, advantages, ref_logps, weights):
            if tensor is not None:
                dtype = torch.promote_types(dtype, tensor.dtype)

        def select(tensor: Tensor) -> Tensor:
            column = tensor[:, None] if tensor.dim() == 1 else tensor
            return torch.where(live, column.to(dtype), 0.0)

        row_tokens = live.sum(1, keepdim=True).clamp(min=1).to(dtype)
        current = select(logps)
        log_ratio = current - (current if old_logps is None else select(old_logps)).detach()
        if config.level is RatioLevel.SEQUENCE:
            log_ratio = (log_ratio.sum(1, keepdim=True) / row_tokens).expand_as(current)
        use_ref = config.beta > 0 and ref_logps is not None
        return cls(
            live=live,
            logps=current,
            log_ratio=log_ratio,
            ratio=log_ratio.exp(),
            advantages=select(advantages).detach(),
            weights=None if weights is None else select(weights).detach(),
            ref_gap=select(ref_logps).detach() - current if use_ref and ref_logps is not None else None,
            row_tokens=row_tokens,
            share=_share(num_tokens, row_tokens, config),
        )

    def row_mean(self, value: Tensor) -> Tensor:
        """Mean over the live tokens of each row, as a column [B, 1]."""
        return torch.where(self.live, value, 0.0).sum(1, keepdim=True) / self.row_tokens


def _clip(terms: _Terms, config: GRPOLossConfig) -> tuple[Tensor, Tensor]:
    """Where the ratio is not active, [B, T] bool, and the constant that stands in its place there.

    The complement of design's `active`, written so that a NaN ratio counts as active and stays visible.
    """
    ratio, negative = terms.ratio.detach(), terms.advantages < 0
    low, high = 1 - config.eps_low, 1 + config.eps_high
    clipped = torch.where(negative, ratio < low, ratio > high)
    bound = torch.where(negative, torch.full_like(ratio, low), high)
    if config.delta is not None:
        beyond = ratio > config.delta
        clipped = clipped | beyond
        bound = torch.where(beyond & negative, config.delta, bound)
    return clipped, bound


def _kl_slope(terms: _Terms, ref_gap: Tensor, config: GRPOLossConfig) -> Tensor:
    """d(KL term)/dlogp without beta and share, [B, T]."""
    slope = -torch.expm1(ref_gap)
    if not config.kl_with_ratio:
        return slope
    if config.level is RatioLevel.TOKEN:
        return -terms.ratio * ref_gap
    # One ratio for the row: each token moves the ratio, and with it the k3 of all tokens of the row.
    return terms.ratio * (slope + terms.row_mean(torch.expm1(ref_gap) - ref_gap))


def _share(num_tokens: Count | UpdateSize, row_tokens: Tensor, config: GRPOLossConfig) -> Tensor:
    """What a live token's loss is multiplied by: 0-dim, or [B, 1] where it depends on the row."""
    if config.normalisation is Normalisation.TOKEN:
        tokens = num_tokens.tokens if isinstance(num_tokens, UpdateSize) else num_tokens
        return 1 / _at_least_one(tokens, row_tokens)
    if not isinstance(num_tokens, UpdateSize):
        raise UsageError(
            f"normalisation={config.normalisation} counts rows, and num_tokens is a plain number; pass "
            "UpdateSize(tokens=..., rows=...) of the whole update"
        )
    rows = _at_least_one(num_tokens.rows, row_tokens)
    if config.normalisation is Normalisation.SEQUENCE:
        return 1 / (rows * row_tokens)
    assert config.row_length is not None  # checked by GRPOLossConfig
    return 1 / (rows * config.row_length)


def _at_least_one(count: Count, like: Tensor) -> Tensor:
    """A count as a 0-dim tensor of `like`'s dtype and device, at least 1."""
    if isinstance(count, Tensor) and count.device == like.device:
        return count.detach().reshape(()).to(like.dtype).clamp(min=1)
    if isinstance(count, Tensor) and count.device.type != "cpu":
        raise UsageError(f"num_tokens is on {count.device} and logps on {like.device}; keep it there or on the CPU")
    # Filled on the device: a copy of a host scalar would wait for it.
    return like.new_full((), max(float(count), 1.0))


def _check_shapes(named: dict[str, Tensor | None], config: GRPOLossConfig) -> None:
    logps = named["logps"]
    assert logps is not None
    if logps.dim() != 2:
        raise UsageError(f"logps has shape {tuple(logps.shape)}; it must be [rows, tokens]")
    rows, tokens = logps.shape
    narrow: list[tuple[int, ...]] = [(rows,), (rows, 1)]
    for name, tensor in named.items():
        allowed = [(rows, tokens)] + (narrow if name in ("advantages", "weights") else [])
        if tensor is not None and tuple(tensor.shape) not in allowed:
            raise UsageError(f"{name} has shape {tuple(tensor.shape)}; with logps {rows, tokens} it may be {allowed}")
    if config.beta > 0 and named["ref_logps"] is None:
        raise UsageError(f"beta={config.beta} needs ref_logps; pass the reference model's, or set beta=0")
