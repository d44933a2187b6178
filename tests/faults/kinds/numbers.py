"""Losses, coefficients and state that are no numbers: gradients are what DeepSpeed alone makes of them, and pass.

A trainer that meets such gradients does not step; nor does it here, or weights would be no numbers either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_hilore
from tests.faults.bench import Bench, policy_loss
from tests.faults.kinds.microbatch import STEP
from tests.faults.records import FAULTY, Fault, Pair, Place, Plans, Site, update
from tests.faults.sites import Strike, patched


def times(factor: float, ranks: tuple[int, ...] = (0, 1)) -> Callable[[Bench], Pair]:
    """The loss of the second microbatch is multiplied, for DeepSpeed alone too."""

    def run(bench: Bench) -> Pair:
        def loss(made: Any, ids: Tensor, advantages: Tensor) -> Tensor:
            spoilt = bench.microbatch == 1 and dist.get_rank() in ranks
            return policy_loss(made, ids, advantages) * (factor if spoilt else 1.0)

        bench.loss = loss
        with patched({STEP: lambda original: lambda *_, **__: None}):
            return bench.update(FAULTY), bench.plain(FAULTY, loss)

    return run


def dropped(bench: Bench) -> Pair:
    """A loop that sees what came out, drops it, and computes the microbatch again."""

    def loss(made: Any, ids: Tensor, advantages: Tensor) -> Tensor:
        numbers = torch.get_rng_state()
        spoilt = policy_loss(made, ids, advantages) * math.nan
        assert not spoilt.isfinite()
        del spoilt
        torch.set_rng_state(numbers)
        return policy_loss(made, ids, advantages)

    bench.loss = loss
    return update(bench)


def announced(value: float) -> Callable[[Bench], Pair]:
    """Advantages that are no numbers are announced; the loss does not use them."""

    def run(bench: Bench) -> Pair:
        def loss(made: Any, ids: Tensor, advantages: Tensor) -> Tensor:
            mask = torch.ones(ids.shape[0], ids.shape[1] - 1)
            ds_hilore.begin_microbatch(torch.full((len(ids),), value), mask, mask.sum(), engine=made)
            return policy_loss(made, ids, advantages)

        bench.loss = loss
        return update(bench)

    return run


def overflowing(codec: str) -> Site:
    """What is encoded cannot be decoded to numbers: an encoder's arithmetic has overflowed."""

    @contextmanager
    def site(bench: Bench, strike: Strike) -> Iterator[None]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def encode(self: Any, tensor: Tensor, **kwargs: Any) -> Any:
                return original(self, tensor * math.inf if strike.due() else tensor, **kwargs)

            return encode

        with patched({codec: make}):
            yield

    return site


def _fault(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(name, Place.NUMBERS, run=run, **more)


FAULTS: tuple[Fault, ...] = (
    _fault("a loss that is NaN", times(math.nan)),
    _fault("a loss that is NaN, on one rank", times(math.nan, (1,))),
    _fault("a loss that is infinite", times(math.inf), thorough=True),
    _fault("a loss that overflows float32 in backward", times(1e38), thorough=True),
    _fault("a loss that is NaN, under compressed state", times(math.nan), plan=Plans.COMPRESS),
    _fault("a NaN loss that the loop drops", dropped),
    _fault("advantages that are NaN are announced", announced(math.nan)),
    _fault("advantages that are infinite are announced", announced(math.inf), thorough=True),
    Fault(
        "encoded state that overflows",
        Place.NUMBERS,
        overflowing("ds_hilore.codecs.bf16.codec:Bf16.encode"),
        plan=Plans.COMPRESS,
    ),
)
