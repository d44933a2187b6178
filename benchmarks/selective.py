"""torch's selective activation checkpointing with fixed policies: which operator outputs of a decoder layer are kept.

A policy is the same for every layer that has one. Its replay takes the kept outputs from forward and runs the rest.
What an output is for is told by the order of the operators in a layer and by their shapes, so one policy serves every
dense decoder.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.subject import LORA_RANK
from ds_hilore.recovery.operators import is_operator

_aten = torch.ops.aten


class Role(enum.Enum):
    """What an operator with a costly output does in its layer."""

    ATTENTION = "the attention kernel"
    PROJECTION = "products before it: queries, keys, values"
    ATTENTION_OUT = "the first product after it"
    MLP_IN = "further products: gate and up"
    MLP_OUT = "products that narrow: down"
    ADAPTER = "products with a LoRA matrix"
    UNWEIGHTED = "products of two activations: attention without a kernel of its own"


_WEIGHTED = frozenset(Role) - {Role.ATTENTION, Role.UNWEIGHTED}


@dataclass(frozen=True)
class SelectivePolicy:
    """Roles whose outputs are kept. `every_second`: of products with a weight only the first, third, fifth, ..."""

    roles: frozenset[Role]
    every_second: bool = False


#: Fixed policies from narrow to wide. Under LoRA nothing saved depends on a base product but through the sum with its
#: adapter's, so keeping the adapter's output too (all_products) costs as many bytes again for a small product.
POLICIES: Mapping[str, SelectivePolicy] = MappingProxyType(
    {
        "attention": SelectivePolicy(frozenset({Role.ATTENTION})),
        "down": SelectivePolicy(frozenset({Role.MLP_OUT})),
        "attention+down": SelectivePolicy(frozenset({Role.ATTENTION, Role.MLP_OUT})),
        "attention+projections": SelectivePolicy(frozenset({Role.ATTENTION, Role.PROJECTION, Role.ATTENTION_OUT})),
        # torchtitan's rule: attention, and products by turns
        "every_second_product": SelectivePolicy(frozenset({Role.ATTENTION} | _WEIGHTED), every_second=True),
        "products": SelectivePolicy(frozenset(Role) - {Role.ADAPTER}),
        "all_products": SelectivePolicy(frozenset(Role)),
    }
)


def selective_checkpoint(policy: str) -> Callable[..., Any]:
    """torch's non-reentrant checkpoint that keeps what the policy of that name says."""
    return partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, POLICIES[policy]))


def _contexts(policy: SelectivePolicy) -> Any:
    return create_selective_checkpoint_contexts(_Chooser(policy))


class _Chooser:
    """torch's policy function of one layer call."""

    def __init__(self, policy: SelectivePolicy) -> None:
        self._policy = policy
        # torch before 2.13 asks again in the replay, which has to count from the start
        self._passes = {False: _Pass(), True: _Pass()}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        run = self._passes[context.is_recompute]
        role = run.role(operator, args)
        keep = role in self._policy.roles
        if self._policy.every_second and role in _WEIGHTED:
            keep = keep and run.products % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Pass:
    """One run through a layer: what each operator does in it. `products`: so many had a weight, the last included."""

    def __init__(self) -> None:
        self.products = 0
        self._attended = False
        self._attention_out = False

    def role(self, operator: Any, args: tuple[Any, ...]) -> Role | None:
        """The role of the operator that comes next; None for cheap ones."""
        if is_operator(operator, "attention"):
            self._attended = True
            return Role.ATTENTION
        if operator is _aten.bmm.default:
            return Role.UNWEIGHTED
        widths = _weight_widths(operator, args)
        if widths is None:
            return None
        self.products += 1
        if min(widths) <= LORA_RANK:
            return Role.ADAPTER
        if not self._attended:
            return Role.PROJECTION
        if not self._attention_out:
            self._attention_out = True
            return Role.ATTENTION_OUT
        contracted, result = widths
        return Role.MLP_OUT if contracted > result else Role.MLP_IN


def _weight_widths(operator: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Contracted and resulting width of a product with a weight; None for any other operator."""
    if operator is _aten.mm.default:
        contracted, result = args[1].shape
    elif operator is _aten.addmm.default:
        contracted, result = args[2].shape
    elif operator is _aten.linear.default:
        result, contracted = args[1].shape
    else:
        return None
    return contracted, result
