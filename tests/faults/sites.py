"""Places at which a fault can strike: in modules, in calls of any function, and between forward and backward."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faults.bench import Bench
from tests.faults.records import Site
from tests.models import decoder_layers
from tests.runtime.shortage import failure


@dataclass
class Strike:
    """Raises at its site `left` times, in one microbatch. `count`: how often it did."""

    bench: Bench
    error: Callable[[], BaseException]
    at: int
    left: int
    count: int = 0

    def __call__(self, *_: Any) -> None:
        if self.due():
            raise self.error()

    def due(self) -> bool:
        """Whether it strikes now; counts."""
        if self.left == 0 or self.bench.microbatch != self.at:
            return False
        self.left -= 1
        self.count += 1
        return True


def no_memory() -> BaseException:
    """What torch raises on CPU."""
    return failure(4096)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


# -- modules -------------------------------------------------------------------------------------------------------


def module_forward(path: str) -> Site:
    """After the forward of a module of the model, by the end of its path. Not in a replay."""
    return _hooked(lambda made: _named(made.module, path), lambda: not in_backward())


def unit_forward(number: int) -> Site:
    """Within a unit's forward: its attention has run, its MLP has not."""
    return _hooked(lambda made: _attention(made, number), lambda: not in_backward())


def unit_replay(number: int) -> Site:
    """At the same place of its replay."""
    return _hooked(lambda made: _attention(made, number), in_backward)


def unit_backward(number: int) -> Site:
    """When the gradient of a unit's attention has been computed."""

    @contextmanager
    def site(bench: Bench, strike: Strike) -> Iterator[None]:
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not in_backward() and tensor.requires_grad:
                tensor.register_hook(strike)

        handle = _attention(bench.ours, number).register_forward_hook(watch)
        try:
            yield
        finally:
            handle.remove()

    return site


def _attention(made: Any, number: int) -> nn.Module:
    attention: nn.Module = decoder_layers(made.module)[number].self_attn  # type: ignore[assignment]
    return attention


def _named(model: nn.Module, ending: str) -> nn.Module:
    (found,) = [module for path, module in model.named_modules() if path.endswith(ending)]
    return found


def _hooked(find: Callable[[Any], nn.Module], when: Callable[[], bool]) -> Site:
    @contextmanager
    def site(bench: Bench, strike: Strike) -> Iterator[None]:
        handle = find(bench.ours).register_forward_hook(lambda *_: strike() if when() else None)
        try:
            yield
        finally:
            handle.remove()

    return site


# -- functions -----------------------------------------------------------------------------------------------------


def calls(*paths: str, after: bool = False) -> Site:
    """A function or method, as "module:name" or "module:Class.name", when it is called or (`after`) has worked."""

    @contextmanager
    def site(bench: Bench, strike: Strike) -> Iterator[None]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not after:
                    strike()
                result = original(*args, **kwargs)
                if after:
                    strike()
                return result

            return call

        with patched(dict.fromkeys(paths, around)):
            yield

    return site


def by_stage(paths: dict[int, str]) -> Site:
    """`calls`, of another function for each ZeRO stage."""
    return lambda bench, strike: calls(paths[bench.stage])(bench, strike)


@contextmanager
def patched(makers: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """What paths name is replaced by what their makers make of it."""
    undo: list[tuple[Any, str, bool, Any]] = []
    try:
        for path, make in makers.items():
            module, _, name = path.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, last = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            original = getattr(owner, last)
            undo.append((owner, last, last in vars(owner), original))
            setattr(owner, last, make(original))
        yield
    finally:
        for owner, last, own, original in reversed(undo):
            if own:
                setattr(owner, last, original)
            else:
                delattr(owner, last)


def replaced(values: dict[str, Any]) -> Callable[[], Any]:
    """As `patched`, by values."""
    return lambda: patched({path: (lambda _, value=value: value) for path, value in values.items()})


def shared_folder() -> Path:
    """One folder for all ranks."""
    names: list[Any] = [tempfile.mkdtemp(prefix="faults-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    return Path(names[0])


# -- between forward and backward ----------------------------------------------------------------------------------


def between(action: Callable[[Bench], object] | None = None) -> Site:
    """When the loss is there and its backward is to come: an action of the host's, or by default the strike's error."""

    @contextmanager
    def site(bench: Bench, strike: Strike) -> Iterator[None]:
        def act() -> None:
            if action is None:
                strike()
            elif strike.due():
                action(bench)

        bench.between.append(act)
        try:
            yield
        finally:
            bench.between.clear()

    return site


def edited(number: int, output: bool) -> Site:
    """A unit's input or output is changed in place before backward."""

    @contextmanager
    def site(bench: Bench, strike: Strike) -> Iterator[None]:
        noted: list[Tensor] = []
        layer = decoder_layers(bench.ours.module)[number]
        if output:
            hook = layer.register_forward_hook(lambda _, args, result: noted.append(_first(result)))
        else:
            hook = layer.register_forward_pre_hook(lambda _, args: noted.append(args[0]))

        def edit(_: Bench) -> None:
            with torch.no_grad():
                noted[-1].add_(1)

        try:
            with between(edit)(bench, strike):
                yield
        finally:
            hook.remove()
            noted.clear()

    return site


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor
