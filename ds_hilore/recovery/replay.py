"""One replay of one unit call: run its forward again and take what it saves, until nothing is missing any more.

What the replay saves is held by the same recipes as in forward (design fact 13), the replay ends right after the last
slot that is no parameter, and calls whose output nothing depends on are skipped (design fact 14, see deadwork.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.errors import RecoveryMismatch
from ds_hilore.recovery.bundle import Handle, Kept, ParameterRef, SlotMeta, Value
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.operators import OutputTape
from ds_hilore.recovery.recipes import BundleBuilder, RecipeProofs
from ds_hilore.recovery.routing import RoutingTape
from ds_hilore.recovery.surroundings import Surroundings


class EarlyStop(BaseException):
    """Raised out of a replay once everything is recovered. Not an `Exception`: model code may catch those."""


@dataclass(frozen=True, order=True)
class Site:
    """One call of a submodule within a unit: its path below the unit, and which of its calls."""

    module: str
    call: int = 0


@dataclass
class SiteTrace:
    """What a traced replay saw: the autograd node of every site's output, and those of the recovered slots."""

    outputs: dict[Site, Any] = field(default_factory=dict)
    slots: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class ReplaySource:
    """Everything a replay needs to know of the call that it repeats."""

    label: str  # unit and rank, for errors
    unit_class: str
    inputs: UnitInputs
    surroundings: Surroundings
    metas: Sequence[SlotMeta | None]
    last_needed: int
    proofs: RecipeProofs
    routing: RoutingTape | None = None
    outputs: OutputTape | None = None  # of operators that are not to run again
    lean: bool = True  # hold recipes where they lower the peak of the unit's backward; costs a little time


class Replay:
    """A replay in progress. `slots` are the recovered values by position; parameters and what follows are None.

    `poison` is what a skipped call gives back.
    """

    def __init__(self, source: ReplaySource, skip: frozenset[Site] = frozenset(), poison: float = float("nan")) -> None:
        self.source = source
        self.skip = skip
        self.poison = poison
        self.trace: SiteTrace | None = None
        self.slots: list[Value | None] = [None] * (source.last_needed + 1)
        self._count = 0
        self._skipped_input: Tensor | None = None  # of the site that is being skipped right now
        self._builder: BundleBuilder | None = None
        self._mismatch: RecoveryMismatch | None = None

    def run(self, traced: Sequence[tuple[str, nn.Module]] = ()) -> list[Value | None]:
        """Recovers all slots. `traced` names submodules whose outputs are to be noted in `self.trace`.

        Raises:
            RecoveryMismatch: the replay saved something else than the forward did.
            StateChanged: an input or parameter was changed since.
        """
        source = self.source
        args, kwargs, tensors = source.inputs.fresh()
        if source.lean:
            self._builder = BundleBuilder(source.proofs, source.unit_class, tensors, self, short_lived=True)
        try:
            with ExitStack() as stack:
                stack.enter_context(source.surroundings.restored())
                stack.enter_context(torch.enable_grad())
                if source.routing is not None:
                    stack.enter_context(source.routing.replaying())
                if source.outputs is not None:
                    stack.enter_context(source.outputs.replaying())
                self._hook_sites(stack, traced)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _forbidden))
                source.inputs.function(*args, **kwargs)
        except EarlyStop:
            pass
        except BaseException:
            self.trace = None  # its nodes hold the handles, which hold the replay: a cycle that gc cannot see
            raise
        finally:
            self._builder = None  # it holds the nodes of this replay, hence its graph
            self._skipped_input = None  # so does this one, where a call ended early
        if self._mismatch is not None:  # raised already, but the unit may catch exceptions around its work
            raise self._mismatch
        if self._count > source.last_needed:
            return self.slots
        raise RecoveryMismatch(
            f"{source.label}: the replay saved {self._count} tensors, the forward pass at least "
            f"{source.last_needed + 1}; the unit must do the same work twice (no state that changes between calls)"
        )

    def _pack(self, tensor: Tensor) -> Handle | ParameterRef | None:
        index = self._count
        if index > self.source.last_needed:
            raise EarlyStop  # once more: the unit caught the first one
        self._count = index + 1
        parameter = self.source.inputs.parameter_of(tensor)
        meta = self.source.metas[index]
        if parameter is not None:
            if meta is not None:
                raise self._mismatched(index, f"a parameter of shape {tuple(tensor.shape)}", meta)
            # a replay's graph is never unpacked: only recipes look, and they look for whole parameters (norm weights)
            return ParameterRef(parameter, tensor) if tensor is parameter else None
        if self._skipped_input is not None:
            tensor = _stand_in(tensor, self._skipped_input, meta)
        if meta is None or tensor.shape != meta.shape or tensor.dtype != meta.dtype:
            raise self._mismatched(index, f"{tensor.dtype} of shape {tuple(tensor.shape)}", meta)
        value = Kept(tensor, 0) if self._builder is None else self._builder.hold(tensor, index)
        self.slots[index] = value
        if self.trace is not None:
            self.trace.slots.append(tensor.grad_fn)
        if index == self.source.last_needed:
            raise EarlyStop
        return Handle(self, index, value)

    def _mismatched(self, index: int, found: str, meta: SlotMeta | None) -> RecoveryMismatch:
        expected = "a parameter" if meta is None else f"{meta.dtype} of shape {tuple(meta.shape)}"
        self._mismatch = self._mismatch or RecoveryMismatch(
            f"{self.source.label}: saved tensor {index} of the replay is {found}, the forward pass saved {expected}; "
            "the unit must do the same work twice (no state that changes between calls)"
        )
        return self._mismatch

    # -- sites -----------------------------------------------------------------------------------------------------

    def _hook_sites(self, stack: ExitStack, traced: Sequence[tuple[str, nn.Module]]) -> None:
        module = self.source.inputs.module
        if self.skip and module is not None:
            for name in sorted({site.module for site in self.skip}):
                calls = _CallCounter(name)
                submodule = module.get_submodule(name)
                stack.callback(submodule.register_forward_pre_hook(self._before(calls)).remove)
                stack.callback(submodule.register_forward_hook(self._after(calls)).remove)
        if traced:
            self.trace = SiteTrace()
            for name, submodule in traced:
                stack.callback(submodule.register_forward_hook(self._note(_CallCounter(name))).remove)

    def _before(self, calls: _CallCounter) -> Callable[..., Any]:
        def skip_rows(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if calls.next() not in self.skip:
                return None
            self._skipped_input = args[0]
            # The real call on no rows: it saves as many tensors as ever, parameters right, and costs nothing.
            return (args[0][..., :0, :], *args[1:])

        return skip_rows

    def _after(self, calls: _CallCounter) -> Callable[..., Any]:
        def give_poison(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if self._skipped_input is None:
                return None
            shape = (*self._skipped_input.shape[:-1], output.shape[-1])
            self._skipped_input = None
            poison = output.new_full((1,), self.poison).requires_grad_(output.requires_grad)
            return poison.expand(shape)

        return give_poison

    def _note(self, calls: _CallCounter) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            site = calls.next()
            if self.trace is not None and isinstance(output, Tensor) and output.numel() > 0 and output.dim() >= 2:
                self.trace.outputs[site] = output.grad_fn

        return note


class _CallCounter:
    """Numbers the calls of one submodule."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def next(self) -> Site:
        site = Site(self.name, self.calls)
        self.calls += 1
        return site


def _stand_in(tensor: Tensor, source: Tensor, meta: SlotMeta | None) -> Tensor:
    """A skipped call saved its input without rows: the input itself belongs there."""
    if meta is None or tensor.numel() > 0 or meta.shape.numel() != source.numel():
        return tensor
    return source if source.shape == meta.shape else source.reshape(meta.shape)


def _forbidden(_: object) -> Tensor:
    raise AssertionError("a replay's own graph is never differentiated")
