"""Gated MLPs of transformers models run through `recovery.gated` while they belong to a recovery unit.

An MLP is taken only if the source of its class's forward is one of the forms below, word for word but for the names of
variables, and its activation is one that we know; so a host that has fused its MLP already keeps its own. Outside of a
unit (no checkpointing, generation, no-grad passes) the original forward runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ds_hilore.recovery.gated import Gate, gated_product
from ds_hilore.recovery.routing import is_compiled
from ds_hilore.recovery.unit import inside_unit


def _separate(self: Any, x: Tensor, gate: Gate) -> Tensor:
    """Llama, Qwen, Mistral, Gemma and many more."""
    return self.down_proj(gated_product(self.gate_proj(x), self.up_proj(x), gate))


def _joint(self: Any, hidden_states: Tensor, gate: Gate) -> Tensor:
    """Phi-3: one projection gives both."""
    x, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return self.down_proj(gated_product(x, up, gate))


#: Source of the host's forward, the attribute that holds its activation, and what runs in its place.
_FORMS: tuple[tuple[str, str, Callable[..., Tensor]], ...] = (
    (
        """
        def forward(self, x):
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return down_proj
        """,
        "act_fn",
        _separate,
    ),
    (
        """
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        """,
        "act_fn",
        _separate,
    ),
    (
        """
        def forward(self, hidden_states):
            up_states = self.gate_up_proj(hidden_states)
            gate, up_states = up_states.chunk(2, dim=-1)
            up_states = up_states * self.activation_fn(gate)
            return self.down_proj(up_states)
        """,
        "activation_fn",
        _joint,
    ),
)


def apply_gated_mlps(units: Iterable[nn.Module]) -> list[nn.Module]:
    """Gives every known MLP inside `units` the leaner forward; gives those MLPs, for `undo_gated_mlps`.

    Units in which something is compiled are left alone: what was compiled would have to be compiled again.
    """
    changed = []
    for unit in units:
        if any(is_compiled(module) for module in unit.modules()):
            continue
        for module, lean, gate in _known_mlps(unit):
            # a partial over functions of this module: pickles, and a deep copy of the model changes the copy
            module.__dict__["forward"] = functools.partial(_inside_units, module, lean, gate)
            changed.append(module)
    return changed


def undo_gated_mlps(modules: Iterable[nn.Module]) -> None:
    """Gives the MLPs their own forward back."""
    for module in modules:
        module.__dict__.pop("forward", None)


def _inside_units(module: nn.Module, lean: Callable[..., Tensor], gate: Gate, *args: Any, **kwargs: Any) -> Tensor:
    if not inside_unit() or len(args) != 1 or kwargs:
        return type(module).forward(module, *args, **kwargs)
    return lean(module, args[0], gate)


def _known_mlps(unit: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Tensor], Gate]]:
    for module in unit.modules():
        if not hasattr(module, "down_proj") or "forward" in module.__dict__:
            continue
        try:
            source = _normal_form(inspect.getsource(type(module).forward))
        except (OSError, TypeError, SyntaxError):  # no source at hand
            continue
        for text, activation, lean in _FORMS:
            gate = _gate_of(getattr(module, activation, None)) if source == _normal_form(text) else None
            if gate is not None:
                yield module, lean, gate


def _normal_form(source: str) -> str:
    """The function without annotations, docstring and decorators, its variables numbered in order of appearance."""
    function = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    if function.decorator_list or arguments.kwonlyargs or arguments.vararg or arguments.kwarg or arguments.defaults:
        return ""
    names: dict[str, str] = {}
    for argument in arguments.args:
        names.setdefault(argument.arg, f"v{len(names)}")
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    for node in (found for statement in body for found in ast.walk(statement)):
        if isinstance(node, ast.Name):
            node.id = names.setdefault(node.id, f"v{len(names)}")
    return "\n".join(ast.dump(statement) for statement in body)


def _gate_of(activation: Any) -> Gate | None:
    """The activation as one that we know to the bit."""
    kind = type(activation).__name__
    if isinstance(activation, nn.SiLU) or kind == "SiLUActivation":
        return Gate()
    if isinstance(activation, nn.GELU):
        return Gate(activation.approximate)
    if kind in ("GELUTanh", "GELUActivation"):
        function = activation.act
        if function is F.gelu:
            return Gate("none")
        if isinstance(function, functools.partial) and function.func is F.gelu:
            return Gate(function.keywords.get("approximate", "none"))
    return None
