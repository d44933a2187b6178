"""The interface of all codecs: encode, decode, bytes, error bound.

NOTE [Codec rules]
C1  Floating state only: integer, boolean and other tensors are refused with a UsageError, never encoded.
C2  Deterministic, and without random numbers: the model's random streams are as they were.
C3  Nothing waits for the device. What is learnt about a tensor (C5, C6) stays on it as tensors.
C4  decode gives back the shape, the strides and, unless told otherwise, the dtype of what was encoded. Strides matter:
    a recipe that recomputes from a decoded tensor of other strides adds in another order (design fact 12).
C5  Error statistics come from the pass that encodes: sums of squared errors and of squared values, over the tensor and,
    if asked for, over each row (one row = the last dimension at one position). The error is that of decode in the
    tensor's own dtype, its rounding to that dtype included.
C6  A payload is `nonfinite` if the tensor, or what would be decoded, holds an infinite value or NaN; for codecs with
    scales also if a value lies within 1 % of the largest of its dtype (masks of the smallest number do). It must never
    be used: the caller keeps the tensor, or replays. Decoding it all the same gives NaN, or an infinite value, in the
    place of those values at least.
C7  Twins give the same codes and scales bit for bit (but for groups that C6 speaks of); statistics to 1e-5.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ds_hilore.codecs.layout import Layout
from ds_hilore.core import deps
from ds_hilore.core.errors import UsageError

#: Added to the norm of the values, as in design section 3: a tensor of zeros has error 0.
TINY_NORM = 1e-8

FLOATING = (torch.float32, torch.bfloat16, torch.float16)

STATISTICS_BYTES = 2 * torch.float64.itemsize

#: Longest group that a kernel keeps in registers; longer ones (scales per token of wide rows) are left to torch.
LONGEST_GROUP = 16384

_LOG = logging.getLogger(__name__)


class Implementation(Enum):
    """Which twin does the work."""

    AUTO = "auto"  # Triton on CUDA where it is installed, else torch
    TORCH = "torch"
    TRITON = "triton"


@dataclass(frozen=True)
class Encoded:
    """What a twin gives back for rows [R, L] cut into G groups each.

    Args:
        codes: [R, L].
        scales: [R, G], or one factor for all (0-dim), or None.
        partials: [2, R, any], float64: sums of squared errors, and of squared values, over parts of each row.
    """

    codes: Tensor
    scales: Tensor | None
    partials: Tensor


class Twin(Protocol):
    """What reference.py and kernel.py of a codec both offer."""

    def encode(self, sheet: Tensor, group: int | None) -> Encoded:
        """Encodes `sheet`, [R, L], with one scale per `group` values of a row (None: without scales)."""

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor, group: int | None) -> None:
        """Writes decoded values into `out`, [R, L], of any floating dtype."""


@dataclass(frozen=True, eq=False)
class Payload:
    """An encoded tensor. Frozen; its tensors are all that it holds.

    Args:
        codec: name of the codec that made it.
        codes, scales: as in `Encoded`; rows in the order of `layout`.
        layout: shape and strides of the tensor.
        dtype: dtype of the tensor.
        squares: [2] float64, sums over the tensor: squared errors, squared values.
        row_squares: [2, R] float64, the same over each row, where asked for.
    """

    codec: str
    codes: Tensor
    scales: Tensor | None
    layout: Layout
    dtype: torch.dtype
    squares: Tensor
    row_squares: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def error_square(self) -> Tensor:
        """Sum of squared errors, 0-dim float64 on the device."""
        return self.squares[0]

    @property
    def value_square(self) -> Tensor:
        """Sum of squared values, 0-dim float64 on the device."""
        return self.squares[1]

    @property
    def relative_error(self) -> Tensor:
        """||decoded - value|| / (||value|| + 1e-8), the e of design section 3; 0-dim float64 on the device."""
        return self.error_square.sqrt() / (self.value_square.sqrt() + TINY_NORM)

    @property
    def nonfinite(self) -> Tensor:
        """True if the payload must not be used (rule C6); 0-dim bool on the device."""
        return self.squares.sum().isfinite().logical_not_()

    @property
    def row_error_square(self) -> Tensor:
        """Sum of squared errors of each row, float64, of shape[:-1] (in the last two: repeated as the tensor is)."""
        return self._of_rows(0)

    @property
    def row_value_square(self) -> Tensor:
        """Sum of squared values of each row, float64, of shape[:-1]."""
        return self._of_rows(1)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the payload holds."""
        yield from (t for t in (self.codes, self.scales, self.squares, self.row_squares) if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def _of_rows(self, which: int) -> Tensor:
        if self.row_squares is None:
            raise UsageError("this payload has no statistics of its rows: encode with rows=True")
        return self.layout.spread(self.row_squares[which])


class Codec(ABC):
    """One way to hold a tensor in fewer bits; see NOTE [Codec rules].

    Args:
        name: as the registry knows it, for example "int8:64".
        implementation: which twin; what is asked for by name must work or raise.
    """

    def __init__(self, name: str, implementation: Implementation = Implementation.AUTO) -> None:
        if implementation is Implementation.TRITON:
            deps.require("triton")
        self.name = name
        self._implementation = implementation

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether tensors of `dtype` can be encoded, and are smaller then."""
        return dtype in FLOATING

    @torch.no_grad()
    def encode(self, tensor: Tensor, *, rows: bool = False) -> Payload:
        """Encodes `tensor` (float32, bfloat16 or float16; any shape and strides), which stays as it is.

        Args:
            tensor: what to encode.
            rows: whether statistics of each row are kept too, for token-resolved weights.

        Raises:
            UsageError: the tensor is not floating, or not smaller when encoded.
        """
        self._refuse(tensor)
        layout = Layout.of(tensor)
        sheet = layout.rows(tensor.detach())
        group = self._group(layout.row_length)
        encoded = self._twin(sheet).encode(sheet, group)
        squares = encoded.partials.sum((1, 2))
        row_squares = encoded.partials.sum(2) if rows else None
        if layout.repeats != 1:
            squares *= layout.repeats
        if row_squares is not None and layout.row_length != (layout.shape or (1,))[-1]:
            row_squares *= layout.shape[-1]
        return Payload(self.name, encoded.codes, encoded.scales, layout, tensor.dtype, squares, row_squares)

    @torch.no_grad()
    def decode(self, payload: Payload, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
        """The tensor again, within the codec's error.

        Args:
            payload: made by a codec of the same name.
            dtype: of the result; by default that of the encoded tensor.
            out: written and returned in place of a new tensor; of the same shape, any strides. A view of a larger base
                will do, so that chunks of one tensor can be decoded into it.

        Raises:
            UsageError: the payload is another codec's, or `out` has another shape, dtype or device.
        """
        if payload.codec != self.name:
            raise UsageError(f"a payload of codec {payload.codec!r} was given to codec {self.name!r}")
        if out is None:
            out = payload.layout.empty(dtype or payload.dtype, payload.device)
        elif out.shape != payload.shape or out.device != payload.device or out.dtype != (dtype or out.dtype):
            raise UsageError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}; the payload is {payload.shape} "
                f"{dtype or payload.dtype} on {payload.device}"
            )
        if payload.codes.numel():
            self._decode_into(payload, out)
        return out

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype, *, rows: bool = False) -> int:
        """Bytes of the payload of a tensor of `shape` and `dtype` (less if it repeats itself by stride 0)."""
        layout = Layout.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        held = layout.row_count * self._row_bytes(layout.row_length) + self._fixed_bytes() + STATISTICS_BYTES
        return held + (layout.row_count * STATISTICS_BYTES if rows else 0)

    @abstractmethod
    def error_bound(self, tensor: Tensor) -> Tensor:
        """Largest |decoded - value| that the codec may make at each position, float64, of the tensor's shape.

        For finite tensors with every |value| below 0.99 of its dtype's largest (rule C6). Slow: for tests and for
        people who ask.
        """

    def _decode_into(self, payload: Payload, out: Tensor) -> None:
        layout = payload.layout
        # Repeated dimensions are written once, which is right only where `out` repeats itself in the same way.
        alike = layout.repeats == 1 or out.stride() == layout.strides
        target = layout.rows_in_place(out) if alike else None
        rows = target if target is not None else out.new_empty(layout.row_count, layout.row_length)
        self._twin(rows).decode(payload.codes, payload.scales, rows, self._group(layout.row_length))
        if target is None and alike:
            layout.permuted(out).copy_(layout.unfolded(rows))
        elif target is None:
            out.copy_(layout.whole(rows))

    def _refuse(self, tensor: Tensor) -> None:
        what = f"a tensor of {tuple(tensor.shape)} {tensor.dtype}"
        if tensor.dtype not in FLOATING or tensor.layout is not torch.strided:
            raise UsageError(
                f"{what} ({tensor.layout}) is never encoded: codec {self.name} takes dense float32, bfloat16 and "
                "float16. Keep it as it is"
            )
        if not self.supports(tensor.dtype):
            raise UsageError(f"codec {self.name} does not make {what} smaller: keep it as it is")

    def _twin(self, sheet: Tensor) -> Twin:
        """The twin for rows such as `sheet`, [R, L]."""
        if sheet.numel() == 0:
            return self._reference()
        if self._implementation is Implementation.TRITON:
            return self._kernel()
        wanted = self._implementation is Implementation.AUTO and sheet.device.type == "cuda"
        if not wanted or (self._group(sheet.shape[1]) or 0) > LONGEST_GROUP:
            return self._reference()
        if not deps.has("triton"):
            _say_once(f"codec {self.name}: torch in place of a kernel, as triton is not installed")
            return self._reference()
        return self._kernel()

    @abstractmethod
    def _reference(self) -> Twin:
        """The torch twin."""

    @abstractmethod
    def _kernel(self) -> Twin:
        """The Triton twin; imports triton."""

    def _group(self, length: int) -> int | None:
        """Values that share a scale in rows of `length`; None for codecs without scales."""
        return None

    @abstractmethod
    def _row_bytes(self, length: int) -> int:
        """Bytes of codes and scales of one row."""

    def _fixed_bytes(self) -> int:
        """Bytes of a payload that do not grow with the tensor, statistics aside."""
        return 0


def usable_factor(partials: Tensor) -> Tensor:
    """1, or NaN where the sums of squares say that codes must not be used (rule C6); 0-dim float32 on the device."""
    return (partials.sum() * 0 + 1).float()


@functools.cache
def _say_once(message: str) -> None:
    _LOG.info(message)
