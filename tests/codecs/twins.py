"""Compares the twins of every codec on one device: in Triton's interpreter on the CPU, natively on CUDA.

    TRITON_INTERPRET=1 python -m tests.codecs.twins cpu

prints one JSON object: case -> what differs, or null. (The interpreter is switched on when triton is imported, so it
needs a process of its own.)
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from ds_hilore.codecs.base import Encoded, Twin
from tests.codecs import tensors as t

SHAPES = ((1, 1), (2, 31), (5, 123), (3, 64), (70, 32), (1, 4500), (33, 200))


def inputs(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Rows [R, L] by name: sizes, strides, scales, special values."""
    for shape in SHAPES:
        yield f"{shape[0]}x{shape[1]}", t.values(shape, dtype, 0, seed=shape[1])
    wide = t.values((6, 256), dtype, 0, seed=1)
    yield "chunk", wide[:, 128:]
    yield "transposed", wide.t()
    for exponent in (-45, -38, -30, -8, 4, 30, 38):
        yield f"1e{exponent}", t.values((4, 96), dtype, exponent, seed=2)
    yield "spread", t.values((8, 130), dtype, 0, seed=3, spread=60)
    yield "zeros", torch.zeros(3, 40, dtype=dtype)
    yield "ties", torch.arange(-254, 255).div(2).to(dtype).repeat(3, 1)
    yield "all e4m3 codes and between", between_e4m3(dtype)
    largest = torch.finfo(dtype).max
    for name, value in (("inf", torch.inf), ("nan", torch.nan), ("-inf", -torch.inf), ("max", largest), ("480", 480.0)):
        spoiled = t.values((5, 100), dtype, 0, seed=4)
        spoiled[1, 70] = value
        yield name, spoiled


def between_e4m3(dtype: torch.dtype) -> Tensor:
    """Every e4m3 number of both signs, the midpoints between neighbours, and what lies close to those."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([numbers, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), torch.tensor([464.0])])
    return torch.stack([around, -around]).to(dtype)


def differences(codec: str, group: int | None, sheet: Tensor) -> str | None:
    """What differs between the twins on these rows; None if nothing does."""
    reference: Twin = importlib.import_module(f"ds_hilore.codecs.{codec}.reference")
    kernel: Twin = importlib.import_module(f"ds_hilore.codecs.{codec}.kernel")
    expected, found = reference.encode(sheet, group), kernel.encode(sheet, group)
    return difference_of_codes(expected, found, group) or difference_of_decoded(
        reference, kernel, expected, sheet, group
    )


def difference_of_codes(expected: Encoded, found: Encoded, group: int | None) -> str | None:
    if found.codes.dtype != expected.codes.dtype or found.codes.shape != expected.codes.shape:
        return f"codes: {found.codes.dtype} {tuple(found.codes.shape)}"
    same = found.codes.contiguous().view(torch.uint8) == expected.codes.contiguous().view(torch.uint8)
    if (found.scales is None) != (expected.scales is None):
        return "one twin has scales, the other has none"
    if found.scales is not None and expected.scales is not None:
        if not torch.equal(found.scales.nan_to_num(-1.0), expected.scales.nan_to_num(-1.0)):
            return "scales"
        if group is not None:  # codes of groups that cannot be used are free
            unusable = expected.scales.isnan().repeat_interleave(group, 1)[:, : expected.codes.shape[1]]
            same |= unusable
    elif expected.codes.dtype is torch.bfloat16:  # NaN has many forms
        same = same.view(*expected.codes.shape, 2).all(-1) | (expected.codes.isnan() & found.codes.isnan())
    if not same.all():
        return f"{int((~same).sum())} of {same.numel()} codes"
    sums, expected_sums = found.partials.sum((1, 2)), expected.partials.sum((1, 2))
    if not torch.equal(sums.sum().isfinite(), expected_sums.sum().isfinite()):
        return "non-finite flag"
    rows, expected_rows = found.partials.sum(2).sqrt(), expected.partials.sum(2).sqrt()
    near = (rows - expected_rows).abs() <= 1e-5 * expected_rows + 1e-7 * expected_rows[1]
    if not (near | ~expected_rows.isfinite()).all():
        return "statistics"
    return None


def difference_of_decoded(
    reference: Twin, kernel: Twin, payload: Encoded, sheet: Tensor, group: int | None
) -> str | None:
    """Decodes one payload with both twins: as it was, and into another dtype and other strides."""
    other_dtype = torch.bfloat16 if sheet.dtype is torch.float32 else torch.float32
    for dtype, transposed in ((sheet.dtype, False), (other_dtype, True)):
        shape = sheet.shape[::-1] if transposed else sheet.shape
        one, other = (torch.empty(shape, dtype=dtype, device=sheet.device) for _ in range(2))
        if transposed:
            one, other = one.t(), other.t()
        reference.decode(payload.codes, payload.scales, one, group)
        kernel.decode(payload.codes, payload.scales, other, group)
        if not torch.equal(one.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0)):
            return f"decoded to {dtype}{' transposed' if transposed else ''}"
    return None


def cases() -> Iterator[tuple[str, str, int | None, torch.dtype]]:
    """Name, codec's folder, group (0: a whole row) and dtype."""
    for dtype in t.DTYPES:
        for codec in t.codecs_for(dtype):
            folder, _, variant = codec.name.partition(":")
            group = {"": 32, "64": 64, "token": 0, "unscaled": None}[variant] if folder != "bf16" else None
            yield f"{codec.name} {str(dtype).removeprefix('torch.')}", folder, group, dtype


def compare(device: torch.device, only: str | None = None) -> dict[str, str | None]:
    """All cases on a device: case and input -> what differs."""
    found = {}
    for name, folder, group, dtype in cases():
        if only in (None, name):
            for what, sheet in inputs(dtype):
                width = sheet.shape[1] if group == 0 else group
                found[f"{name} {what}"] = differences(folder, width, sheet.to(device))
    return found


if __name__ == "__main__":
    print(json.dumps(compare(torch.device(sys.argv[1]), *sys.argv[2:3])))
