"""Roles of the arguments of transformers' decoder layers, for pruning (recovery/roles.py).

Names are those that layers of transformers 5 share. A layer with any other tensor among its arguments (encoder states,
caches) is not pruned for that call. Whether it is causal, and whether its rows stand for themselves, is not declared
but proven in the running job.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_hilore.recovery.roles import Role, UnitRoles

_ARGUMENTS: Mapping[str, Role] = {
    "hidden_states": Role.HIDDEN,
    "attention_mask": Role.MASK,
    "position_ids": Role.POSITIONS,
    "position_embeddings": Role.POSITIONS,
    "position_embeddings_global": Role.POSITIONS,
    "position_embeddings_local": Role.POSITIONS,
    "cache_position": Role.INDEX,
    "cu_seq_lens_q": Role.STARTS,
    "cu_seq_lens_k": Role.STARTS,
    "max_length_q": Role.LIMIT,
    "max_length_k": Role.LIMIT,
    "cache": Role.SETTING,
    "past_key_value": Role.SETTING,
    "past_key_values": Role.SETTING,
    "layer_past": Role.SETTING,
}
_ROLES = UnitRoles(_ARGUMENTS)


def decoder_layer_roles(module: nn.Module) -> UnitRoles | None:
    """Roles of a layer's arguments by name; None for modules that are no layers of transformers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return _ROLES if isinstance(module, GradientCheckpointingLayer) else None
