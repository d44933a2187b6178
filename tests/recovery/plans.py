"""Runs a transformers model with its decoder layers as recovery units, without any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action, UnitId
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.unit import RecoveryContext, UnitCall, inside_unit
from tests import models

H, R = Action.STORE, Action.RECOMPUTE
Gradients = dict[str, Tensor]


@dataclass
class Host:
    """A model whose checkpointed calls become unit calls; `actions` is repeated over the units."""

    model: nn.Module
    context: RecoveryContext = field(default_factory=RecoveryContext)
    actions: Sequence[Action | Treatment] = (R,)
    calls: list[UnitCall] = field(default_factory=list)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside_unit():
            return function(*args, **kwargs)
        index = len(self.calls)
        inputs = UnitInputs.capture(function, args, kwargs)
        action = self.actions[index % len(self.actions)]
        treatment = Treatment(action) if isinstance(action, Action) else action
        call = UnitCall(self.context, UnitId(f"unit.{index}"), type(inputs.module).__name__, treatment, inputs)
        self.calls.append(call)
        return call.run(function, args, kwargs)

    def gradients(
        self, loss: Callable[[nn.Module], Tensor], actions: Sequence[Action | Treatment] | None, drop: bool = False
    ) -> Gradients:
        """Gradients of one backward; `actions=None` is the plain model. `drop` turns all stored units to R first."""
        base = _pretrained(self.model)
        self.calls.clear()
        if actions is not None:
            self.actions = actions
            base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=self.checkpoint)
        else:
            base._set_gradient_checkpointing(enable=False)
        self.model.zero_grad()
        torch.manual_seed(7)
        value = loss(self.model)
        if drop:
            for call in self.calls:
                call.drop()
        self.calls.clear()
        value.backward()
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def small_loss(model: nn.Module, rows: int = 2, tokens: int = 16) -> Tensor:
    """Of one and the same random batch."""
    return models.plain_loss(model, *models.batch(3, rows=rows, tokens=tokens))


def adapted(family: str, adapters: str) -> nn.Module:
    """A tiny model: "full" trains all of it; "lora", "lora-dropout" and "dora" adapters on its projections."""
    model = models.FAMILIES[family]()
    if adapters == "full":
        return model
    dropout = 0.1 if adapters == "lora-dropout" else 0.0
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if family in ("mixtral", "qwen3_next") else "all"
    return models.lora(model, targets, lora_dropout=dropout, use_dora=adapters == "dora")


def _pretrained(model: nn.Module) -> Any:
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model is not None else model


def differences(left: Gradients, right: Gradients) -> list[str]:
    """Names of the gradients that are not the same bits in both."""
    names = sorted(left.keys() | right.keys())
    return [n for n in names if n not in left or n not in right or not torch.equal(left[n], right[n])]
