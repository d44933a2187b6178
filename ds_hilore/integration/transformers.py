"""transformers models: their decoder layers are the units, our function is their checkpoint function, for good.

transformers >= 5.23 checkpoints the inner `forward` of every `GradientCheckpointingLayer`, so module hooks (ZeRO-3's
among them) stay outside of a replay. Every family takes its function from `_set_gradient_checkpointing`; TRL and the
Trainer call the public switches around generation, which end there too, so that one method is guarded (design fact 15).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.integration.checkpoint import checkpoint

_log = logging.getLogger(__name__)
_SWITCH = "_set_gradient_checkpointing"


def checkpointing_layers(model: nn.Module) -> list[nn.Module]:
    """Every layer of the model that transformers can checkpoint, in order of definition; vision towers included."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def pretrained_models(model: nn.Module) -> list[Any]:
    """The outermost transformers models inside `model` (a PEFT wrapper, a value head, or the model itself)."""
    from transformers import PreTrainedModel

    found: list[Any] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inner:
            found.append(module)
            inner.update(id(child) for child in module.modules())
    return found


class CheckpointingGuard:
    """Keeps `checkpoint` installed in one model whatever the host switches; `undo` gives back what was there."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = [
            (module, module.__dict__.get("gradient_checkpointing"), module.__dict__.get("_gradient_checkpointing_func"))
            for module in model.modules()
            if hasattr(module, "gradient_checkpointing")
        ]

    def apply(self) -> None:
        """Installs our function and answers every later switch with it.

        Raises:
            UnsupportedError: the model's class cannot be checkpointed, or still has the switch of transformers < 4.35.
        """
        model = self._model
        try:
            _install(model)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be checkpointed by transformers ({error}); name other units in "
                '"hilore": {"units": [...]}'
            ) from error
        # a partial over a function of this module: pickles, and a deep copy of the model guards the copy
        model.__dict__[_SWITCH] = partial(_guarded_switch, model)

    def undo(self) -> None:
        """Removes the guard and restores every layer's switch and function."""
        self._model.__dict__.pop(_SWITCH, None)
        for module, enabled, function in self._before:
            _restore(module, "gradient_checkpointing", enabled)
            _restore(module, "_gradient_checkpointing_func", function)


def _install(model: Any) -> None:
    getattr(type(model), _SWITCH)(model, enable=True, gradient_checkpointing_func=checkpoint)


def _guarded_switch(model: Any, enable: bool = True, every_n_layers: int = 1, **_: Any) -> None:
    """Stands for `_set_gradient_checkpointing`: on or off, the plan decides."""
    if enable and every_n_layers != 1:
        _log.warning("hilore: every_n_layers=%d is superseded by the plan", every_n_layers)
    _install(model)


def _restore(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value
