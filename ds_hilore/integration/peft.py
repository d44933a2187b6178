"""PEFT models: what the frozen base needs so that units behave as in the plain model.

LoRA, DoRA, `modules_to_save` and dropout need nothing of their own: adapters are modules inside the units, replays
take the forward's random state, passes under `disable_adapter()` without grad never reach the units, and an adapter
switched between two updates changes what a unit saves, hence its class of proofs.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def feeds_from_frozen_embedding(model: nn.Module) -> bool:
    """Whether the first unit's input carries no gradient: a frozen input embedding under adapters."""
    embedding = input_embedding(model)
    return embedding is not None and not any(parameter.requires_grad for parameter in embedding.parameters())


def let_embedding_outputs_require_grad(model: nn.Module) -> bool:
    """Calls the model's `enable_input_require_grads` where a frozen embedding feeds the first unit.

    Under ZeRO-3 a leaf module whose inputs need no gradient never learns that its backward is over, and keeps its
    parameters gathered (design fact 2). Elsewhere it would only add work.
    """
    if not feeds_from_frozen_embedding(model):
        return False
    enable: Any = getattr(model, "enable_input_require_grads", None)
    if enable is None:
        return False
    enable()
    return True


def input_embedding(model: nn.Module) -> nn.Module | None:
    """What the model looks its token ids up with, as `get_input_embeddings` names it; None where it does not."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        embedding = getter()
    except NotImplementedError:
        return None
    return embedding if isinstance(embedding, nn.Module) else None
