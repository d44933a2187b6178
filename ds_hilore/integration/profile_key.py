"""The setting that a stored profile belongs to, read from a model and the device it runs on."""

from __future__ import annotations

import dataclasses
import json
import platform
from enum import Enum
from typing import Any

import torch
from torch import nn

from ds_hilore.core import deps
from ds_hilore.integration.fingerprint import digest
from ds_hilore.profiling.layout import Fingerprint

#: Of a config, what changes no layer: where it came from, who wrote it, and what the Trainer sets after a tokenizer.
_NOT_THE_MODEL = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def profile_fingerprint(
    model: nn.Module,
    *,
    zero_stage: int,
    world_size: int,
    loss_path: str,
    device: torch.device,
    state: str = "exact",
    tensor_parallel: int = 1,
) -> Fingerprint:
    """Everything that decides a unit's bytes and seconds, as a profile is stored with it, and the form of its gradient.

    Args:
        model: as it is trained, adapters included; under ZeRO-3 parameters may be partitioned.
        loss_path: "chunked" or "logits".
        state, tensor_parallel: see `Fingerprint`.
    """
    shapes = [(name, list(getattr(p, "ds_shape", p.shape))) for name, p in model.named_parameters()]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    config = getattr(model, "config", None)
    return Fingerprint(
        model=_digest([type(model).__name__, _config_fields(config), shapes, _scalings(model)]),
        trained=_digest(trained),
        dtypes=_dtypes(model),
        attention=str(getattr(config, "_attn_implementation", None) or "own"),
        loss_path=loss_path,
        state=state,
        zero_stage=zero_stage,
        world_size=world_size,
        device=_device_name(device),
        torch=torch.__version__,
        deepspeed=deps.installed_version("deepspeed") or "",
        transformers=deps.installed_version("transformers") or "",
        ds_hilore=deps.installed_version("ds_hilore") or "",
        tensor_parallel=tensor_parallel,
    )


def _config_fields(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return {name: value for name, value in config.to_dict().items() if name not in _NOT_THE_MODEL}
    if not dataclasses.is_dataclass(config):
        return {}
    # Megatron-Core's holds functions too, whose names are addresses.
    found = {item.name: getattr(config, item.name, None) for item in dataclasses.fields(config)}
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str | Enum)


def _scalings(model: nn.Module) -> list[tuple[str, str]]:
    """What adapters multiply their products by, which no shape shows: errors of a gradient go with it."""
    named = [(name, getattr(module, "scaling", None)) for name, module in model.named_modules()]
    return [(name, str(found)) for name, found in named if isinstance(found, int | float | dict)]


def _dtypes(model: nn.Module) -> str:
    """Of frozen and of trained parameters, and of autocast where it is on."""
    kinds = sorted({(_name(p.dtype), "trained" if p.requires_grad else "frozen") for p in model.parameters()})
    found = ", ".join(f"{kind} {dtype}" for dtype, kind in kinds)
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            found += f", autocast {_name(torch.get_autocast_dtype(device))}"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":  # its speed is that of the threads in use
        return f"{platform.machine()} {platform.processor()} x {torch.get_num_threads()}".replace("  ", " ")
    module = torch.get_device_module(device)
    facts = module.get_device_properties(device)
    return f"{facts.name}, {facts.total_memory >> 30} GiB"


def _digest(values: Any) -> str:
    return digest(json.dumps(values, sort_keys=True, default=str))
