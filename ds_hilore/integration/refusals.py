"""Features of a model or an engine that are refused until they are proven (design fact 6), each with the way out.

Those that a JSON switches on are in core/host_rules.py; these are seen only on the objects, at the start or later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.integration.megatron import megatron_faults
from ds_hilore.integration.model_parallel import faults_of_groups, tensor_parallel_size
from ds_hilore.recovery.routing import is_compiled

_COMPILED = "the whole model is under torch.compile: compile modules inside a decoder layer instead"


def refuse_model(
    model: nn.Module, units: Iterable[nn.Module], zero_stage: int = 0, mpu_size: int | None = None
) -> None:
    """Looks at a model before DeepSpeed does.

    Args:
        zero_stage: that the JSON names.
        mpu_size: ranks that share layers by what the `mpu` says; None: not known.

    Raises:
        UnsupportedError: with every feature that is refused.
    """
    modules = set(units)
    found = [*_faults_of(model), *megatron_faults(model, modules, zero_stage, mpu_size)]
    around = [] if is_compiled(model) else _compiled_around(model, modules)
    if around:
        found.append(f"torch.compile around a unit ({', '.join(around[:5])}): compile modules inside the unit instead")
    _raise(found, "this model")


def refuse_engine(engine: Any, units: Iterable[nn.Module], compresses: bool = False) -> None:
    """Looks at an engine before anything is changed on it.

    Args:
        compresses: plans may compress.

    Raises:
        UnsupportedError: with every feature that is refused.
    """
    modules, stage = list(units), engine.zero_optimization_stage()
    found = _faults_of(engine.module)
    shared = tensor_parallel_size(getattr(engine, "mpu", None))
    found += megatron_faults(engine.module, modules, stage, shared, compresses)
    if getattr(engine, "is_compiled", False):
        found.append("engine.compile() was called: leave it out")
    if stage == 3 and not all(getattr(unit, "_z3_leaf", False) for unit in modules):
        found.append(
            "a ZeRO-3 engine made without us gathers parameters within units, so ranks with different plans would wait "
            "for each other: make it with ds_hilore.initialize, or call ds_hilore.install() before deepspeed.initialize"
        )
    found += faults_of_groups(engine, compresses)
    _raise(found, "this engine")


def refuse_compiled_model(model: nn.Module) -> None:
    """Called before each forward: `model.compile()` may come at any time.

    Raises:
        UnsupportedError: the whole model is compiled by now.
    """
    if is_compiled(model):
        _raise([_COMPILED], "this engine")


def refuse_compile() -> None:
    """Stands for `engine.compile` while a controller is attached.

    Raises:
        UnsupportedError: always.
    """
    _raise(
        ["engine.compile(): compile modules inside a decoder layer instead, or ds_hilore.detach(engine)"], "this engine"
    )


def refuse_no_sync(engine: Any) -> None:
    """Called where `engine.no_sync` is.

    Raises:
        UnsupportedError: under ZeRO-2 and ZeRO-3, which reduce gradients while backward runs.
    """
    if engine.zero_optimization_partition_gradients():
        stage = engine.zero_optimization_stage()
        _raise([f"no_sync under ZeRO-{stage}: set gradient_accumulation_steps instead, or use ZeRO-1"], "this engine")


def _faults_of(model: nn.Module) -> list[str]:
    return [_COMPILED] if is_compiled(model) else []


def _compiled_around(model: nn.Module, units: set[nn.Module]) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if is_compiled(module) and any(child in units for child in module.modules())
    ]


def _raise(found: list[str], what: str) -> None:
    if found:
        raise UnsupportedError(f"{what} cannot be combined with hilore:\n  " + "\n  ".join(found))
