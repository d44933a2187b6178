"""Pairs of engines that run the same updates: DeepSpeed by itself, and DeepSpeed with a "hilore" block."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.types import Action, Plan, UnitId
from ds_hilore.runtime.budget import all_units
from tests.engines import engine, gradients
from tests.models import FAMILIES, batch, decoder_layers, lora, plain_loss

H, R = Action.STORE, Action.RECOMPUTE

#: Budget of engines whose plan is forced: it is never looked at.
ANY_BUDGET = {"memory_budget": "1.0x"}

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def build(family: str = "llama", adapters: bool = True, dtype: str = "float32") -> nn.Module:
    """The same weights at every call."""
    model = FAMILIES[family]()
    return (lora(model) if adapters else model).to(getattr(torch, dtype))


def hilore_engine(model: nn.Module, settings: dict[str, Any], **block: Any) -> Any:
    """An engine from `ds_hilore.initialize`, with the trainable parameters of the model.

    Without a trial and self-checks, unless told otherwise: on models this small a trial would measure noise, and plans
    would be chance; and what is counted and recorded is to be the plan's own. `settings` stay as they are.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    given = deepcopy(settings) | {"hilore": quiet_block(**block)}
    made, *_ = ds_hilore.initialize(model=model, model_parameters=trainable, config=given)
    return made


def quiet_block(**block: Any) -> dict[str, Any]:
    """The block of `hilore_engine`."""
    planner = {"trial_microbatches": 0} | block.get("planner", {})
    return ANY_BUDGET | {"selfcheck": {"updates": 0}} | block | {"planner": planner}


def reference_engine(model: nn.Module, settings: dict[str, Any], leaves: bool = True) -> Any:
    """DeepSpeed without any checkpointing; under ZeRO-3 its decoder layers are leaf units, unless told otherwise."""
    staged3 = settings["zero_optimization"]["stage"] == 3
    return engine(model, settings, decoder_layers(model) if leaves and staged3 else None)


def pair(build_model: Callable[[], nn.Module], settings: dict[str, Any], **block: Any) -> tuple[Any, Any]:
    """(reference, ours): two engines of the same model and settings."""
    return reference_engine(build_model(), settings), hilore_engine(build_model(), settings, **block)


def run_update(made: Any, number: int, loss: Loss = plain_loss) -> dict[str, Tensor]:
    """All microbatches of one update, and the step. The same data and random numbers for the same number and rank.

    Returns:
        The whole reduced gradients just before the step.
    """
    found: dict[str, Tensor] = {}
    for k in range(made.gradient_accumulation_steps()):
        seed = 1000 * dist.get_rank() + 10 * number + k
        torch.manual_seed(seed)
        made.backward(loss(made, *batch(seed=seed)))
        if made.is_gradient_accumulation_boundary():
            found = gradients(made)
        made.step()
    return found


def run_one_microbatch(made: Any, number: int) -> None:
    """Forward, backward and `step` of one microbatch, for updates that are not meant to end."""
    made.backward(plain_loss(made, *batch(seed=number)))
    made.step()


def units_of(made: Any) -> list[str]:
    """Paths of the unit modules in forward order."""
    return [path for path, _ in made.hilore.parts.unit_names.values()]


def actions(made: Any) -> list[Action]:
    """What the units of the newest microbatch did, in forward order."""
    return list(made.hilore.microbatch.ran.values())


def alternating(made: Any, first: Action) -> Plan:
    """Store and recompute in turns."""
    second = R if first is H else H
    chosen = {UnitId(path): (first, second)[i % 2] for i, path in enumerate(units_of(made))}
    return Plan(choice={unit: action.letter for unit, action in chosen.items()}, actions=chosen)


def different_plans(made: Any) -> list[Plan]:
    """Three plans of this rank that differ from the other rank's: all-H beside all-R, the reverse, and mixed."""
    first = dist.get_rank() == 0
    units = [UnitId(path) for path in units_of(made)]
    return [
        all_units(units, H if first else R),
        all_units(units, R if first else H),
        alternating(made, H if first else R),
    ]


def unequal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the gradients that differ in any bit, or are missing."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]
