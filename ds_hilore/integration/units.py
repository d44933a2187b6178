"""Which modules of a model are its recovery units, and by what names plans and messages call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ds_hilore.core.errors import ConfigError
from ds_hilore.integration.checkpoint import checkpoint
from ds_hilore.integration.megatron import layer_groups
from ds_hilore.integration.transformers import checkpointing_layers


@dataclass(frozen=True)
class Units:
    """Path and class label by module, and which modules need to be led through `checkpoint` by us."""

    names: Mapping[nn.Module, tuple[str, str]]
    wrapped: tuple[nn.Module, ...] = ()

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.names)

    def summary(self) -> str:
        """For the start line: "30 LlamaDecoderLayer"."""
        counts: dict[str, int] = {}
        for _, label in self.names.values():
            counts[label] = counts.get(label, 0) + 1
        return ", ".join(f"{count} {label}" for label, count in counts.items()) or "no unit modules"


def find_units(model: nn.Module, wanted: str | tuple[str, ...]) -> Units:
    """The units of a model.

    Args:
        wanted: "auto" for the layers that transformers can checkpoint and the groups of layers that Megatron-Core
            does, else class names and patterns of module paths.

    Raises:
        ConfigError: a name in `wanted` matches no module, or matches modules inside each other.
    """
    layers = checkpointing_layers(model)
    if wanted == "auto":
        return Units(labelled({**_paths(model, layers), **layer_groups(model)}))
    modules = _outermost(_matching(model, tuple(wanted)))
    by_host = set(layers)
    return Units(named(model, modules), tuple(module for module in modules if module not in by_host))


def apply_wrapping(modules: tuple[nn.Module, ...]) -> None:
    """Makes the inner `forward` of these modules a checkpointed call. Module hooks stay outside of it."""
    for module in modules:
        if "forward" in module.__dict__:
            raise ConfigError(
                f"hilore.units: {type(module).__name__} already has a `forward` of its own on the instance; "
                "name a module around it"
            )
        module.forward = _Checkpointed(module)


def undo_wrapping(modules: tuple[nn.Module, ...]) -> None:
    for module in modules:
        if isinstance(module.__dict__.get("forward"), _Checkpointed):
            del module.__dict__["forward"]


class _Checkpointed:
    """The class's forward of one module, called through `checkpoint`. Copies and pickles with its module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        return checkpoint(forward, *args, **kwargs)


def _matching(model: nn.Module, wanted: tuple[str, ...]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for name in wanted:
        hits = [
            module
            for path, module in model.named_modules()
            if path and (type(module).__name__ == name or fnmatchcase(path, name) or fnmatchcase(path, f"*.{name}"))
        ]
        if not hits:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(
                f'hilore.units: "{name}" matches no module of {type(model).__name__}; its module classes are: '
                f"{', '.join(classes[:40])}"
            )
        found.update(dict.fromkeys(hits))
    return list(found)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inner]


def named(model: nn.Module, modules: list[nn.Module]) -> dict[nn.Module, tuple[str, str]]:
    """Paths in the model, and class labels."""
    return labelled(_paths(model, modules))


def _paths(model: nn.Module, modules: list[nn.Module]) -> dict[nn.Module, str]:
    wanted = set(modules)
    return {module: path for path, module in model.named_modules() if module in wanted}


def labelled(paths: Mapping[nn.Module, str]) -> dict[nn.Module, tuple[str, str]]:
    """Adds class labels to paths: layers of one class but another make-up are told apart (fact 17)."""
    labels: dict[tuple[Any, ...], str] = {}
    per_class: dict[str, int] = {}
    names: dict[nn.Module, tuple[str, str]] = {}
    for module, path in paths.items():
        make = (type(module), *sorted(_children(module)))
        if make not in labels:
            kind = type(module).__name__
            if isinstance(module, nn.ModuleList):  # a group: "2xTransformerLayer"
                kind = f"{len(module)}x{type(module[0]).__name__}"
            per_class[kind] = per_class.get(kind, 0) + 1
            labels[make] = kind if per_class[kind] == 1 else f"{kind}/{per_class[kind]}"
        names[module] = (path, labels[make])
    return names


def _children(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, child in module.named_children():
        yield name, type(child).__name__
        for inner, grandchild in child.named_children():
            yield f"{name}.{inner}", type(grandchild).__name__
