"""What all ranks must have in common, in a form that can be compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ds_hilore.core import deps
from ds_hilore.core.config import BLOCK, HiLoReConfig
from ds_hilore.core.errors import ConfigError

_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "ds_hilore")


def read_ds_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The DeepSpeed JSON as `deepspeed.initialize` would find it: `config`, `config_params`, or a file in `args`.

    None where there is none that we can read (then there is no block either).

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    given = kwargs.get("config")
    if given is None:
        given = kwargs.get("config_params")
    if given is None:
        namespace = kwargs.get("args", args[0] if args else None)
        given = getattr(namespace, "deepspeed_config", None)
    if given is None or isinstance(given, Mapping):
        return given
    if not isinstance(given, str | os.PathLike):
        return None
    try:
        loaded = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the DeepSpeed config {given} cannot be read: {error}") from error
    return loaded if isinstance(loaded, Mapping) else None


def fingerprint(
    model: nn.Module, config: HiLoReConfig, ds: Mapping[str, Any], units: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """JSON-able values that must be the same on every rank, by the name that an error would say."""
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape)), p.requires_grad) for name, p in model.named_parameters()]
    rest = {key: value for key, value in ds.items() if key != BLOCK}
    return {
        "versions": {name: deps.installed_version(name) for name in _PACKAGES},
        "hilore block": config.fingerprint(),
        "DeepSpeed JSON": digest(json.dumps(rest, sort_keys=True, default=str)),
        "model parameters": digest(repr(shapes)),
        "number of units": len(list(units)),
    }


def digest(text: str) -> str:
    """A short name for a text that is too long to compare by eye."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
