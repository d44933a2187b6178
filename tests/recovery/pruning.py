"""Runs a transformers model with its decoder layers pruned, without any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.treatment import REPLAYED, Treatment
from ds_hilore.core.types import UnitId
from ds_hilore.integration.roles import decoder_layer_roles
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.prune import PrunedCall, Pruning
from ds_hilore.recovery.unit import inside_unit
from tests.models import VOCAB
from tests.recovery.plans import Gradients, Host


@dataclass
class PruningHost(Host):
    """A model whose checkpointed calls are pruned where that is proven."""

    pruning: Pruning = field(default_factory=lambda: Pruning(decoder_layer_roles))
    treatment: Treatment = REPLAYED

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside_unit():
            return function(*args, **kwargs)
        inputs = UnitInputs.capture(function, args, kwargs)
        unit = UnitId(f"unit.{len(self.calls)}")
        make = (self.context, unit, type(inputs.module).__name__, self.treatment, inputs)
        call, result = self.pruning.run(make, function, args, kwargs)
        self.calls.append(call)
        return result

    def pruned(self) -> int:
        """Calls of the newest forward that ran pruned."""
        return sum(isinstance(call, PrunedCall) for call in self.calls)

    def pruned_gradients(self, loss: Callable[[nn.Module], Tensor]) -> Gradients:
        """Gradients of a pruned backward, after a microbatch in which classes show what they can."""
        loss(self._switched_on()).backward()
        self.calls.clear()
        self.pruning.clear()
        return self.gradients(loss, [])

    def _switched_on(self) -> nn.Module:
        get: Any = getattr(self.model, "get_base_model", lambda: self.model)
        get()._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=self.checkpoint)
        return self.model


@dataclass(frozen=True)
class Batch:
    """Ids [B, T], the padding mask [B, T] or None, and weights [B, T - 1] of the predicted tokens: omega."""

    ids: Tensor
    weights: Tensor
    padding: Tensor | None = None

    def loss(self, model: nn.Module) -> Tensor:
        """Sum of weight times log-probability: the gradient of a policy loss with these coefficients."""
        logits = model(input_ids=self.ids, attention_mask=self.padding, use_cache=False).logits[:, :-1]
        logps = logits.float().log_softmax(-1).gather(-1, self.ids[:, 1:, None]).squeeze(-1)
        return torch.where(self.weights != 0, self.weights * logps, 0.0).sum() / 8


def batch(lengths: list[int], tokens: int, prompt: int = 4, left: list[int] | None = None, seed: int = 0) -> Batch:
    """Rows that end at `lengths` (0: a dead row), behind `left` positions of padding.

    Rows are padded on the right; with `left` given there is a padding mask, else none.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    weights = torch.zeros(rows, tokens - 1)
    padding = None if left is None else torch.zeros(rows, tokens, dtype=torch.long)
    for row, end in enumerate(lengths):
        start = 0 if left is None else left[row]
        if padding is not None:
            padding[row, start : end or tokens] = 1
        if end:
            weights[row, start + prompt - 1 : end - 1] = torch.randn(end - start - prompt, generator=generator)
    return Batch(ids, weights, padding)
