"""Features of a model or an engine that are refused until they are proven (design fact 6), each with the way out.

Those that a JSON switches on are in core/host_rules.py; these are seen only on the objects, at the start or later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.recovery.routing import is_compiled

_COMPILED = "the whole model is under torch.compile: compile modules inside a decoder layer instead"


def refuse_model(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Looks at a model before DeepSpeed does.

    Raises:
        UnsupportedError: with every feature that is refused.
    """
    found = _faults_of(model)
    around = [] if is_compiled(model) else _compiled_around(model, set(units))
    if around:
        found.append(f"torch.compile around a unit ({', '.join(around[:5])}): compile modules inside the unit instead")
    _raise(found, "this model")


def refuse_engine(engine: Any, units: Iterable[nn.Module]) -> None:
    """Looks at an engine before anything is changed on it.

    Raises:
        UnsupportedError: with every feature that is refused.
    """
    found = _faults_of(engine.module)
    if getattr(engine, "is_compiled", False):
        found.append("engine.compile() was called: leave it out")
    if engine.zero_optimization_stage() == 3 and not all(getattr(unit, "_z3_leaf", False) for unit in units):
        found.append(
            "a ZeRO-3 engine made without us gathers parameters within units, so ranks with different plans would wait "
            "for each other: make it with ds_hilore.initialize, or call ds_hilore.install() before deepspeed.initialize"
        )
    if (shared := _model_parallel_size(engine)) > 1:
        found.append(
            f"its mpu splits the model over {shared} ranks, and replays would wait for each other where plans differ: "
            "remove the hilore block, or use ZeRO-3 to shard the model"
        )
    _raise(found, "this engine")


def _model_parallel_size(engine: Any) -> int:
    """Ranks that share one copy of the model: what DeepSpeed asks an `mpu` for (`DeepSpeedEngine.mpu`)."""
    mpu = getattr(engine, "mpu", None)
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 1


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
