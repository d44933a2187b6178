"""Features of an engine that are refused until they are proven (design fact 6), each with the way out.

Those that a JSON switches on are in core/host_rules.py; these are seen only on the engine.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hilore.core.errors import UnsupportedError


def refuse_engine(engine: Any) -> None:
    """Looks at an engine before anything is changed on it.

    Raises:
        UnsupportedError: with every feature that is refused.
    """
    found = []
    if _is_compiled(engine.module):
        found.append("the whole model is under torch.compile: compile modules inside a decoder layer instead")
    if getattr(engine, "is_compiled", False):
        found.append("engine.compile() was called: leave it out")
    if type(engine).__name__ == "PipelineEngine":
        found.append("pipeline engines are not supported yet: use ZeRO without a PipelineModule")
    if found:
        raise UnsupportedError("this engine cannot be combined with hilore:\n  " + "\n  ".join(found))


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
