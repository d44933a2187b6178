"""Pruned replays: rows and positions that cannot change the model cost no replay and no backward (design fact 18).

Saved-tensor hooks cannot shrink what autograd computes. So a pruned unit is one autograd function: its forward is the
plain unit without grad, bit for bit; its backward cuts the unit's inputs and the incoming gradient to what is live,
replays and differentiates that, and puts the input gradient back between zeros.

NOTE [Pruning rules]
P1  Live is what has a gradient. It is read from the gradient that arrives (live.py), whatever was announced, so a loss
    that reaches positions nobody told of is as exact as any.
P2  A unit class is pruned only after it has shown, in the running job, that its rows and prefixes stand for themselves:
    the first call runs as R, and parts of it, run alone, must give the same output (`_prove`).
P3  What a unit gives besides its hidden states would lose its gradient. More outputs, routers, tensors kept by hooks,
    inputs with a gradient of their own: not pruned (roles.py `Reason`). Random numbers: not pruned.
P4  Every trainable parameter of the unit gets a gradient, zeros where nothing is live, through autograd itself and in
    the order in which the plain unit gives them: ranks fill their reduction buckets alike, whoever prunes (ZeRO-1/2).
P5  As for any replay: nothing here calls a collective (R9), weights and inputs must be unchanged (R5, R6).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.recovery.escapes import EscapeWatch
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.live import Borders, Cut, Extent, LiveChain
from ds_hilore.recovery.parts import GradientSums, UnitPart, only_output
from ds_hilore.recovery.roles import Assignment, PruneRefusal, Reason, UnitRoles, assign
from ds_hilore.recovery.skipping import skipped
from ds_hilore.recovery.unit import CallParts, RecoveryContext, UnitCall, unit_scope

RolesOf = Callable[[nn.Module], UnitRoles | None]


@dataclass(frozen=True)
class PruneProof:
    """What a unit class has shown (P2).

    Args:
        extent: what may be left out.
        starts: whether segments may also be cut at their begin; None: no batch had such segments yet.
        order: trainable parameters as the plain unit's backward gives their gradients.
    """

    extent: Extent
    starts: bool | None
    order: tuple[str, ...]


ProofKey = tuple[str, tuple[bool, ...], tuple[str, ...]]


@dataclass
class PruneSource:
    """What a pruned call knows beyond an ordinary one. `parameters`: the trainable ones, in order of delivery."""

    assignment: Assignment
    proof: PruneProof
    borders: Borders
    parameters: list[Parameter]
    key: ProofKey


class Pruning:
    """Runs unit calls pruned where that is proven; one per controller.

    Attributes:
        chain: live positions on their way from unit to unit.
        refused: why a unit class is not pruned, the newest reason.
        live_share: positions that the newest pruned backward ran, of all; None before the first.
    """

    def __init__(self, roles: RolesOf, report: Callable[[str, PruneRefusal], None] | None = None) -> None:
        self.chain = LiveChain()
        self.refused: dict[str, PruneRefusal] = {}
        self.live_share: float | None = None
        self._roles = roles
        self._report = report
        self._proofs: dict[ProofKey, PruneProof | PruneRefusal] = {}
        self._borders: list[tuple[Tensor, int, Borders]] = []  # of the masks, or starts, of the microbatch in hand
        self._whole_rows: dict[tuple[int, int], Borders] = {}
        self._parameters: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, Parameter]]]
        self._parameters = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """The microbatch is over."""
        self.chain.clear()
        self._borders.clear()
        self._whole_rows.clear()

    def run(
        self,
        make: CallParts,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[UnitCall, Any]:
        """Runs one call of a unit that is planned R: pruned, or as R where it may not be.

        Raises:
            UnsupportedError: something kept a tensor from within a unit that was proven to let none out.
        """
        context, _, unit_class, _, inputs = make
        assignment = self._assign(context, unit_class, inputs)
        if assignment is None:
            call = UnitCall(*make)
            return call, call.run(function, args, kwargs)
        assert inputs.module is not None
        named = self._trainable(inputs.module)
        key = (unit_class, assignment.layout, tuple(named))
        proof = self._proofs.get(key)
        if isinstance(proof, PruneProof):
            source = self._source(assignment, proof, named, inputs, key)
            pruned = PrunedCall(make, source, self)
            result = pruned.attempt(function, args, kwargs)
            if not isinstance(result, PruneRefusal):
                return pruned, result
            self._refuse(key, result)
        call = UnitCall(*make)
        with EscapeWatch(inputs.module) as watch:
            result = call.run(function, args, kwargs)
        if proof is None:
            found = self._first_look(call, assignment, named, result, watch)
            if isinstance(found, PruneRefusal):
                self._refuse(key, found)
            else:
                self._proofs[key] = found
        return call, result

    def _assign(self, context: RecoveryContext, unit_class: str, inputs: UnitInputs) -> Assignment | None:
        module = inputs.module
        roles = None if module is None else self._roles(module)
        if module is None or roles is None:
            refusal = PruneRefusal(Reason.UNDECLARED)
        elif context.facts(module).has_router:
            refusal = PruneRefusal(Reason.ROUTER)
        elif context.rng_tracker is not None:
            refusal = PruneRefusal(Reason.RANDOM, "a model-parallel random state is in use")
        else:
            found = assign(inputs, roles)
            if isinstance(found, Assignment):
                return found
            refusal = found
        self._note(unit_class, refusal)
        return None

    def _trainable(self, module: nn.Module) -> dict[str, Parameter]:
        known = self._parameters.get(module)
        if known is None:
            known = self._parameters[module] = list(module.named_parameters())
        return {name: parameter for name, parameter in known if parameter.requires_grad}

    def _source(
        self,
        assignment: Assignment,
        proof: PruneProof,
        named: dict[str, Parameter],
        inputs: UnitInputs,
        key: ProofKey,
    ) -> PruneSource:
        borders = self._borders_of(assignment, inputs)
        return PruneSource(assignment, proof, borders, [named[name] for name in proof.order], key)

    def _borders_of(self, assignment: Assignment, inputs: UnitInputs) -> Borders:
        divided = assignment.starts is not None
        leaf = assignment.starts if divided else assignment.mask
        told = None if leaf is None or assignment.aligned else inputs.tensor_at(leaf)
        for known, version, borders in self._borders:
            if told is not None and _same_tensor(known, told) and told._version == version:
                return borders
        if told is None:
            return self.whole_rows(assignment)
        rows, length = assignment.rows, assignment.length
        borders = Borders.of_starts(told, rows, length) if divided else Borders.of_mask(told, rows)
        self._borders.append((told, told._version, borders))
        return borders

    def whole_rows(self, assignment: Assignment) -> Borders:
        """Borders for rows that are one segment each, one object per shape."""
        shape = assignment.rows, assignment.length
        if shape not in self._whole_rows:
            self._whole_rows[shape] = Borders.none(*shape)
        return self._whole_rows[shape]

    def seen_starts(self, source: PruneSource) -> None:
        """A batch has segments whose begin could be cut: the class is to show that at its next call."""
        if source.proof.starts is None:
            self._proofs.pop(source.key, None)

    # -- proof (P2) ------------------------------------------------------------------------------------------------

    def _first_look(
        self, call: UnitCall, assignment: Assignment, named: dict[str, Parameter], result: Any, watch: EscapeWatch
    ) -> PruneProof | PruneRefusal:
        if not call.surroundings.undisturbed():
            return PruneRefusal(Reason.RANDOM)
        hidden = call.inputs.tensor_at(assignment.hidden)
        assert hidden is not None
        output = only_output(result, hidden)
        if output is None:
            return PruneRefusal(Reason.OUTPUTS)
        escaped = watch.escaped(output)
        if escaped:
            return PruneRefusal(Reason.ESCAPES, escaped)
        part = UnitPart(call.inputs, call.surroundings, assignment)
        borders = self._borders_of(assignment, call.inputs)
        trivial = self.whole_rows(assignment)
        with unit_scope():
            order = part.delivery_order(named)
            if not borders.trivial and part.reproduces(output.detach(), borders, borders):
                return PruneProof(Extent.SEGMENTS, True, order)
            if part.reproduces(output.detach(), trivial, borders):
                return PruneProof(Extent.SEGMENTS, None if borders.trivial else False, order)
            if part.reproduces(output.detach(), trivial, borders, Extent.ROWS):
                return PruneProof(Extent.ROWS, False, order)
        return PruneRefusal(Reason.MIXES)

    def _refuse(self, key: ProofKey, refusal: PruneRefusal) -> None:
        self._proofs[key] = refusal
        self._note(key[0], refusal)

    def _note(self, unit_class: str, refusal: PruneRefusal) -> None:
        if self.refused.get(unit_class) != refusal:
            self.refused[unit_class] = refusal
            if self._report is not None:
                self._report(unit_class, refusal)


class PrunedCall(UnitCall):
    """One call of one unit that ran without grad and differentiates live positions only.

    Held by what autograd saved for it, so it goes at its last use (R3), as every call does.
    """

    def __init__(
        self,
        make: CallParts,
        source: PruneSource,
        pruning: Pruning,
    ) -> None:
        super().__init__(*make)
        self.source = source
        self.pruning = pruning
        self._output: Tensor | None = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def attempt(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's outputs; or why it may not be pruned, with random streams as they were."""
        assignment, inputs = self.source.assignment, self.inputs
        assert inputs.module is not None
        hidden = inputs.tensors[assignment.tensor_index(inputs)]
        try:
            with unit_scope(), torch.no_grad(), _casts_anew(), EscapeWatch(inputs.module) as watch:
                result = function(*args, **kwargs)
        finally:
            self._version = self._facts.version()
        if not self.surroundings.undisturbed():
            self.surroundings.rewind()
            return PruneRefusal(Reason.RANDOM)
        output = only_output(result, hidden)
        if output is None:
            return PruneRefusal(Reason.OUTPUTS)
        if escaped := watch.escaped(output):
            self.pruning._refuse(self.source.key, PruneRefusal(Reason.ESCAPES, escaped))
            raise UnsupportedError(
                f"{self.label}: a tensor from within the unit ({escaped}) was kept while the unit ran without grad; "
                "units of this class are pruned no more, run this update again"
            )
        self.inputs.tensors = []
        attached = self._attached(hidden, output, result)
        self._ran()
        return attached

    def _attached(self, hidden: Tensor, output: Tensor, result: Any) -> Any:
        self._output = output
        # Each parameter by a view of its own, the last delivered first: autograd runs the node that was made last, and
        # gradients reach the parameters one by one in the plain unit's order (P4).
        views = [parameter.expand_as(parameter) for parameter in reversed(self.source.parameters)]
        with torch.autograd.graph.saved_tensors_hooks(lambda _: _Hold(self), _unpack_hidden):
            attached: Tensor = _Pruned.apply(self, hidden, *views)
        leaves, spec = tree_flatten(result)
        return tree_unflatten([attached if leaf is output else leaf for leaf in leaves], spec)

    def take_output(self) -> Tensor:
        output, self._output = self._output, None
        assert output is not None
        return output

    def hidden(self) -> Tensor:
        hidden = self.inputs.tensor_at(self.source.assignment.hidden)
        assert hidden is not None
        return hidden

    # -- backward --------------------------------------------------------------------------------------------------

    def differentiate(self, gradient: Tensor | None, wants_hidden: bool) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients of the hidden states and of `source.parameters`, from the gradient at the output."""
        if not self.context.settled:
            self.context.settle()
        self.check_generation()
        self.check_state()
        hidden = self.hidden()
        gradient = torch.zeros_like(hidden) if gradient is None else gradient
        live = self.pruning.chain.read(gradient)
        cutting = live.cutting(self._borders(), self.source.proof.extent, self.context.lean_replay)
        self.pruning.live_share = cutting.positions / max(1, hidden.shape[:2].numel())
        given = GradientSums(len(self.source.parameters))
        before: Tensor | None = None
        for cut in cutting.cuts:
            part, parameters = self.persist(partial(self._replay_part, cut, gradient, wants_hidden))
            given.add(parameters)
            if part is not None and cut.whole:
                before = part
            elif part is not None:
                before = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if before is None else before
                cut.put(before, part)
        if wants_hidden:
            before = torch.zeros_like(hidden) if before is None else before
            self.pruning.chain.note(before, cutting.after)
        return before, given.complete(self.source.parameters)

    def _borders(self) -> Borders:
        source = self.source
        if source.borders.trivial or source.proof.starts:
            return source.borders
        self.pruning.seen_starts(source)
        return self.pruning.whole_rows(source.assignment)

    def _replay_part(self, cut: Cut, gradient: Tensor, wants_hidden: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        parameters, module = self.source.parameters, self.inputs.module
        assert module is not None
        with unit_scope(), skipped(module, self.context.dead_work.names(self.unit_class, module)):
            output, hidden = UnitPart(self.inputs, self.surroundings, self.source.assignment).run(cut)
            wanted = [hidden, *parameters] if wants_hidden else parameters
            found = torch.autograd.grad(output, wanted, cut.pick_gradient(gradient), allow_unused=True)
        return (found[0], list(found[1:])) if wants_hidden else (None, list(found))


class _Hold:
    """What autograd holds in place of the saved hidden states."""

    __slots__ = ("call",)

    def __init__(self, call: PrunedCall) -> None:
        self.call = call


def _unpack_hidden(hold: _Hold) -> Tensor:
    return hold.call.persist(hold.call.hidden)


class _Pruned(torch.autograd.Function):
    """(call, hidden states, views of parameters) -> the output that the call has computed already."""

    @staticmethod
    def forward(ctx: Any, call: PrunedCall, hidden: Tensor, *views: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        ctx.call = weakref.ref(call)
        return call.take_output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  torch's own error on a second backward without retain_graph
        call: PrunedCall = ctx.call()
        before, given = call.differentiate(gradient, ctx.needs_input_grad[1])
        return None, before, *reversed(given)


@contextmanager
def _casts_anew() -> Iterator[None]:
    """No autocast cache: a weight that was cast without grad must not serve a forward with grad."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
