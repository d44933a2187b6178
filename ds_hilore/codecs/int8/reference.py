"""int8 in torch. Code = round half to even of value / scale, in -127 ... 127."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hilore.codecs import scaled
from ds_hilore.codecs.base import Encoded
from ds_hilore.codecs.grid import Part, Scratch

LARGEST = 127.0


def encode(sheet: Tensor, group: int | None) -> Encoded:
    """See `Twin.encode`."""
    assert group is not None
    return scaled.encode(sheet, group, LARGEST, torch.int8, _round)


def decode(codes: Tensor, scales: Tensor | None, out: Tensor, group: int | None) -> None:
    """See `Twin.decode`."""
    assert group is not None and scales is not None
    scaled.decode(codes, scales, out, group, lambda block, into: into.copy_(block))


def _round(units_RGg: Tensor, nearest_RGg: Tensor, scratch: Scratch, part: Part) -> Tensor:
    """No clamping: no value is beyond 127.497 (scaled.py)."""
    torch.round(units_RGg, out=nearest_RGg)
    return scratch.groups("codes", part, torch.int8).copy_(nearest_RGg)
