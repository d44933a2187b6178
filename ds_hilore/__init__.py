"""HiLoRe for DeepSpeed: what to store, compress or recompute in a GRPO update, decided after the forward pass.

Set a "hilore" block in the DeepSpeed JSON and make the engine with `ds_hilore.initialize`, or call
`ds_hilore.install()` once in a script that lets others make it. Importing this package imports no host framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name -> module that defines it; loaded at first use.
_LAZY = {
    "GRPOLossConfig": "ds_hilore.objective.grpo",
    "HiLoReConfig": "ds_hilore.core.config",
    "begin_microbatch": "ds_hilore.runtime.current",
    "begin_update": "ds_hilore.runtime.current",
    "checkpoint": "ds_hilore.integration.checkpoint",
    "detach": "ds_hilore.integration.deepspeed_engine",
    "grpo_loss": "ds_hilore.runtime.current",
    "initialize": "ds_hilore.integration.deepspeed_engine",
    "install": "ds_hilore.integration.deepspeed_engine",
    "log_probs": "ds_hilore.objective.chunked",
    "observe_logps": "ds_hilore.runtime.current",
    "restart_update": "ds_hilore.integration.deepspeed_engine",
    "uninstall": "ds_hilore.integration.deepspeed_engine",
}

__all__ = [
    "GRPOLossConfig",
    "HiLoReConfig",
    "__version__",
    "begin_microbatch",
    "begin_update",
    "checkpoint",
    "detach",
    "grpo_loss",
    "initialize",
    "install",
    "log_probs",
    "observe_logps",
    "restart_update",
    "uninstall",
]

if TYPE_CHECKING:
    from ds_hilore.core.config import HiLoReConfig
    from ds_hilore.integration.checkpoint import checkpoint
    from ds_hilore.integration.deepspeed_engine import detach, initialize, install, restart_update, uninstall
    from ds_hilore.objective.chunked import log_probs
    from ds_hilore.objective.grpo import GRPOLossConfig
    from ds_hilore.runtime.current import begin_microbatch, begin_update, grpo_loss, observe_logps


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
