"""Codecs by name, as the configuration and the plans write them: `codec` or `codec:variant`.

A new codec is one folder and its lines here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ds_hilore.codecs.base import Codec, Implementation
from ds_hilore.codecs.bf16.codec import Bf16
from ds_hilore.codecs.fp8_e4m3.codec import Fp8E4M3, UnscaledFp8E4M3
from ds_hilore.codecs.int8.codec import Int8
from ds_hilore.core.errors import UsageError

Maker = Callable[[str, Implementation], Codec]

_MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "bf16": Bf16,
        "int8": lambda name, implementation: Int8(name, 32, implementation),
        "int8:64": lambda name, implementation: Int8(name, 64, implementation),
        "int8:token": lambda name, implementation: Int8(name, None, implementation),
        "fp8_e4m3": lambda name, implementation: Fp8E4M3(name, 32, implementation),
        "fp8_e4m3:64": lambda name, implementation: Fp8E4M3(name, 64, implementation),
        "fp8_e4m3:token": lambda name, implementation: Fp8E4M3(name, None, implementation),
        "fp8_e4m3:unscaled": UnscaledFp8E4M3,
    }
)


def codec_names() -> tuple[str, ...]:
    """Every known name; bare names have scales per group of 32."""
    return tuple(_MAKERS)


def codec_named(name: str, implementation: Implementation = Implementation.AUTO) -> Codec:
    """The codec of this name.

    Args:
        name: one of `codec_names()`.
        implementation: which twin; AUTO picks by device.

    Raises:
        UsageError: unknown name; the message lists the known ones.
        DependencyMissing: TRITON was asked for and is not installed.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise UsageError(f"unknown codec {name!r}; known: {', '.join(codec_names())}")
    return maker(name, implementation)
