"""Tensors on which codecs are tried: odd shapes and strides, extreme and special values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from ds_hilore.codecs.base import Codec
from ds_hilore.codecs.registry import codec_named, codec_names

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Name -> how a tensor of about the asked shape is laid out. Each takes a contiguous tensor of at least one dimension.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "reversed dimensions": lambda x: x.permute(*range(x.dim())[::-1]),
    "chunk": lambda x: torch.cat([x, x], -1).chunk(2, -1)[1],
    "corner": lambda x: torch.nn.functional.pad(x, (1, 2) * x.dim())[(slice(1, -2),) * x.dim()],
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "repeated rows": lambda x: x[:1].expand(x.shape[0], *x.shape[1:]) if x.dim() > 1 else x,
    "repeated values": lambda x: x[..., :1].expand(x.shape),
    "one value": lambda x: x.flatten()[:1].view((1,) * x.dim()).expand(x.shape) if x.numel() else x,
    "sliding windows": lambda x: x.flatten().unfold(0, min(x.numel(), 5), 1) if x.numel() else x,
    "heads": lambda x: x.unflatten(-1, (1, -1)).transpose(0, -2) if x.shape[-1] else x,
}


def codecs_for(dtype: torch.dtype) -> list[Codec]:
    return [codec for codec in map(codec_named, codec_names()) if codec.supports(dtype)]


def pairs() -> list[tuple[str, torch.dtype]]:
    """Every codec name with every dtype it supports."""
    return [(codec.name, dtype) for dtype in DTYPES for codec in codecs_for(dtype)]


def values(shape: tuple[int, ...], dtype: torch.dtype, exponent: float, seed: int, spread: float = 0.0) -> Tensor:
    """Normal values times 10 ** exponent, the magnitude of each row or group spread over that many decades more.

    Clamped to what every codec takes (rule C6); float16 and bfloat16 round, so small ones may be subnormal or zero.
    """
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
    decades = exponent + spread * (torch.rand(shape, generator=rng, dtype=torch.float64) - 0.5)
    limit = 0.98 * torch.finfo(dtype).max
    return (drawn * 10.0**decades).clamp_(-limit, limit).to(dtype)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """One to four dimensions; sizes 0 and 1 and last dimensions around multiples of the groups are likely."""
    leading = draw(st.lists(st.integers(0, 5), max_size=3))
    last = draw(st.one_of(st.integers(0, 4), st.sampled_from([31, 32, 33, 63, 64, 65, 96, 127, 130])))
    return (*leading, last)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """A finite tensor of any shape, strides and scale that a dtype allows."""
    shape = draw(shapes())
    exponent = draw(st.integers(-45, 38) | st.integers(-4, 4))
    spread = draw(st.sampled_from([0.0, 3.0, 30.0]))
    made = values(shape, dtype, exponent, draw(st.integers(0, 2**31)), spread)
    if draw(st.booleans()):
        made = made * (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3).to(dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](made)
