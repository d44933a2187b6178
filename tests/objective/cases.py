"""Random microbatches for the loss tests, and watchers of what torch is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hilore.objective.grpo import Algorithm, GRPOLossConfig, Normalisation, RatioLevel, grpo_loss, token_coefficients
from ds_hilore.objective.update import UpdateSize

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e300)


def untimed(max_examples: int) -> settings:
    """No verdict of a test hangs on the speed of the machine; the first call of an operation may take a second."""
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Microbatch:
    """Arguments of the loss. Garbage at masked positions comes in by `with_garbage`."""

    logps: Tensor
    old_logps: Tensor | None
    advantages: Tensor
    mask: Tensor
    size: UpdateSize
    config: GRPOLossConfig
    ref_logps: Tensor
    weights: Tensor | None

    def loss_and_grad(self) -> tuple[Tensor, Tensor]:
        logps = self.logps.clone().requires_grad_()
        loss = grpo_loss(logps, self.old_logps, self.advantages, self.mask, self.size, **self._named())
        (grad,) = torch.autograd.grad(loss, logps)
        return loss.detach(), grad

    def omega(self) -> Tensor:
        return token_coefficients(self.logps, self.old_logps, self.advantages, self.mask, self.size, **self._named())

    def _named(self) -> dict[str, Any]:
        return {"config": self.config, "ref_logps": self.ref_logps, "weights": self.weights}

    def with_garbage(self, seed: int) -> Microbatch:
        """Every masked entry of every argument is NaN, an infinity or huge; row-wise ones where the row is masked."""
        generator = torch.Generator().manual_seed(seed)

        def spoil(tensor: Tensor) -> Tensor:
            choice = torch.randint(len(GARBAGE), tensor.shape, generator=generator)
            garbage = torch.tensor(GARBAGE, dtype=torch.float64)[choice].to(tensor.dtype)
            live = self.mask.bool()
            if tensor.shape != live.shape:
                live = live.any(1).view(tensor.shape)
            return torch.where(live, tensor, garbage)

        return replace(
            self,
            logps=spoil(self.logps),
            old_logps=None if self.old_logps is None else spoil(self.old_logps),
            advantages=spoil(self.advantages),
            ref_logps=spoil(self.ref_logps),
            weights=None if self.weights is None else spoil(self.weights),
        )


@st.composite
def configs(draw: st.DrawFn) -> GRPOLossConfig:
    algorithm = draw(st.sampled_from(Algorithm))
    normalisation = draw(st.sampled_from(Normalisation))
    eps_high = draw(st.sampled_from([0.0, 0.2, 0.28]))
    second = st.sampled_from([None, 1 + eps_high, 1.5])
    return GRPOLossConfig(
        eps_low=draw(st.sampled_from([0.0, 0.1, 0.2])),
        eps_high=eps_high,
        delta=draw(second) if algorithm is Algorithm.CLIP else None,
        cispo_cap=draw(st.sampled_from([1.1, 5.0])),
        beta=draw(st.sampled_from([0.0, 0.04, 1.0])),
        kl_with_ratio=draw(st.booleans()),
        level=draw(st.sampled_from(RatioLevel)),
        algorithm=algorithm,
        normalisation=normalisation,
        row_length=11 if normalisation is Normalisation.CONSTANT else None,
    )


@st.composite
def microbatches(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Microbatch:
    """Ratios lie on both sides of every bound; some rows are masked whole; some advantages are exactly 0."""
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    narrow = st.sampled_from([(rows,), (rows, 1), (rows, tokens)])
    logps = -normal(rows, tokens).abs()
    mask = torch.rand(rows, tokens, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    advantages = normal(*draw(narrow))
    advantages[torch.rand(advantages.shape, generator=generator) < 0.2] = 0.0
    spread = draw(st.sampled_from([0.05, 0.3]))
    weights = normal(*draw(narrow)).abs().to(dtype) if draw(st.booleans()) else None
    return Microbatch(
        logps=logps.to(dtype),
        old_logps=(logps + spread * normal(rows, tokens)).to(dtype) if draw(st.booleans()) else None,
        advantages=advantages.to(dtype),
        mask=mask if draw(st.booleans()) else mask.long(),
        size=UpdateSize(tokens=draw(st.integers(0, 50)), rows=draw(st.integers(rows, 20))),
        config=draw(configs()),
        ref_logps=(logps + spread * normal(rows, tokens)).to(dtype),
        weights=weights,
    )


@dataclass
class Watch:
    """What happened under a `Watcher`."""

    largest: int = 0  # elements of the largest tensor that any operation gave back
    host_reads: list[str] = field(default_factory=list)  # operations that wait for a device
    products: int = 0  # matrix products


class Watcher(TorchDispatchMode):
    """Records sizes, host reads and matrix products of all operations, in backward too."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
    PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.addmm_.", "aten.bmm.", "aten.linear.")

    def __init__(self) -> None:
        super().__init__()
        self.seen = Watch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.seen.largest = max(self.seen.largest, tensor.numel())
        if any(f"aten.{waiting}." in name for waiting in self.WAITING):
            self.seen.host_reads.append(name)
        # Boolean indexing is a nonzero in disguise.
        if "aten.index." in name and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen.host_reads.append(name)
        self.seen.products += name.startswith(self.PRODUCTS)
        return result
