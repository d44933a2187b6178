"""Recovery units: run one under saved-tensor hooks, and give its saved state back in backward.

NOTE [Recovery rules]
R1  A unit runs with grad under hooks, never under no_grad: side outputs (router losses) keep their gradients.
R2  What is saved is complete or nothing: a call is either stored (every slot has a value, large ones maybe encoded) or
    replayed as a whole; a replay may be handed outputs of operators (operators.py), never saved tensors.
R3  A value is freed at its last use: it hangs on the object that autograd holds, which autograd lets go when the
    node has run. With `retain_graph` it stays; a second backward without it raises torch's own error.
R4  From stored a call can become compressed or replayed after forward (`compress`, `drop`), from compressed replayed,
    never the other way round (the lattice).
R5  Parameters are never saved state: by reference, rebound at unpack. Their versions are compared, at a replay those
    of all parameters and floating-point buffers of the unit: a replay reads more than what was saved.
R6  Inputs are held as detached aliases; version and generation (optimizer steps, loaded weights) are compared.
R7  A unit inside a unit is part of the outer one: it runs plainly, the outer call owns everything.
R8  A replay takes RNG, autocast and routing of its forward and leaves the streams as it found them.
R9  Nothing here calls a collective: under ZeRO-3 the unit's parameters are gathered by its leaf module before.
R10 A decode or replay that fails for want of memory is done again for as long as other calls can give up state
    (`relieve`). A failed one leaves nothing behind: streams, slots and values are as before it.

Not covered: what a unit changes outside of its outputs (running statistics, caches) is changed again by a replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_hilore.codecs.base import Codec
from ds_hilore.codecs.registry import codec_named
from ds_hilore.core.errors import RecoveryError, StateChanged
from ds_hilore.core.treatment import REPLAYED, Treatment
from ds_hilore.core.types import Action, Place, UnitId
from ds_hilore.recovery.bundle import Handle, ParameterRef, SlotMeta, Value, kept_tensors, storages
from ds_hilore.recovery.deadwork import DeadWork, class_key
from ds_hilore.recovery.encoded import Encodable, Shelf, Statistic, encode, shelves
from ds_hilore.recovery.groups import groups_of, tensors_in
from ds_hilore.recovery.inputs import UnitInputs
from ds_hilore.recovery.lookup import Lookups
from ds_hilore.recovery.offload import Offload, Parcel, call_back
from ds_hilore.recovery.operators import OutputTape
from ds_hilore.recovery.recipes import BundleBuilder, RecipeProofs
from ds_hilore.recovery.replay import ReplaySource
from ds_hilore.recovery.routing import RoutingTape, has_router, tells_choices
from ds_hilore.recovery.surroundings import RngTracker, Surroundings

#: Kinds of calls whose state groups are looked up, over all classes of units.
MAX_KINDS_OF_CALLS = 64

Result = TypeVar("Result")

_inside_unit: ContextVar[bool] = ContextVar("ds_hilore_inside_unit", default=False)


def inside_unit() -> bool:
    """Whether this thread is running a unit's forward or replay (rule R7)."""
    return _inside_unit.get()


#: What a call of a unit is made from.
CallParts = tuple["RecoveryContext", UnitId, str, Treatment, UnitInputs]


@dataclass(frozen=True)
class ModuleFacts:
    """What is asked at each call of a unit. `state`: parameters and floating-point buffers, whose edits matter (R5)."""

    has_router: bool = False
    tells_choices: bool = False
    state: tuple[Tensor, ...] = ()

    def version(self) -> int:
        return sum([tensor._version for tensor in self.state])


@dataclass
class RecoveryContext:
    """What all unit calls of one controller share. `generation` rises whenever parameters change."""

    rank: int = 0
    proofs: RecipeProofs = field(default_factory=RecipeProofs)
    dead_work: DeadWork = field(default_factory=DeadWork)
    generation: int = 0
    lean_replay: bool = True  # see ReplaySource.lean
    settled: bool = True  # False between a forward and the moment its final plan is applied
    settle: Callable[[], None] = lambda: None
    timing: Callable[[UnitId], AbstractContextManager[None]] = lambda unit: nullcontext()  # around each replay
    relieve: Callable[[UnitCall, Exception], bool] = lambda call, error: False  # memory was freed: try again (R10)
    at_work: UnitId | None = None  # the unit that ran or was recovered last
    watch: Callable[[UnitCall], None] | None = None  # told whenever a call's saved tensor is wanted in backward
    sample: Callable[[UnitCall, list[Shelf]], None] | None = None  # shown what of a stored call can be encoded
    around_operator: Callable[[], AbstractContextManager[None]] = nullcontext  # around those whose outputs are kept
    encodable: Encodable = list  # picks of what can be encoded of a call; by default all
    rng_tracker: RngTracker | None = None
    lookups: Lookups = field(default_factory=Lookups)
    offload: Offload = field(default_factory=Offload)
    newest_away: weakref.ref[UnitCall] | None = None  # call that sent state to host memory last
    rereading: set[str] = field(default_factory=set)  # unit classes with nodes that unpack a slot more than once
    _facts: weakref.WeakKeyDictionary[torch.nn.Module, ModuleFacts] = field(default_factory=weakref.WeakKeyDictionary)
    _groups: dict[Hashable, dict[int, str]] = field(default_factory=dict)
    _codecs: dict[str, Codec] = field(default_factory=dict)

    def facts(self, module: torch.nn.Module | None) -> ModuleFacts:
        """Looked up once per module."""
        if module is None:
            return ModuleFacts()
        known = self._facts.get(module)
        if known is None:
            known = self._facts[module] = ModuleFacts(has_router(module), tells_choices(module), tuple(_state(module)))
        return known

    def codecs_of(self, treatment: Treatment) -> dict[str, Codec]:
        """The codecs of a treatment by state group."""
        for _, name in treatment.codecs:
            if name not in self._codecs:
                self._codecs[name] = codec_named(name)
        return {group: self._codecs[name] for group, name in treatment.codecs}

    def groups(self, kind: Hashable, find: Callable[[], dict[int, str]] | None) -> dict[int, str]:
        """State groups of a kind of call, found once. Empty where they are not known and cannot be found.

        Where the data decides what is saved (experts that are hit) there is no end of kinds; those are never encoded.
        """
        known = self._groups.get(kind)
        if known is None:
            if find is None or len(self._groups) >= MAX_KINDS_OF_CALLS:
                return {}
            known = self._groups[kind] = find()
        return known


class UnitCall:
    """One call of one unit, from its forward to the last use of its saved state.

    Held only by its handles, that is by the autograd graph: when the graph goes, all of it goes.
    """

    def __init__(
        self, context: RecoveryContext, unit: UnitId, unit_class: str, treatment: Treatment, inputs: UnitInputs
    ) -> None:
        self.context = context
        self.unit = unit
        self.unit_class = unit_class
        self.treatment = treatment
        self.inputs = inputs
        self.generation = context.generation
        self.shape = inputs.shape
        self.surroundings = Surroundings(inputs.device, context.rng_tracker)
        self._facts = context.facts(inputs.module)
        self._version = 0  # of the unit's own state, when its forward ended
        self.routing = RoutingTape() if self._facts.tells_choices else None
        self.outputs = OutputTape(treatment.keeps, context.around_operator) if treatment.keeps else None
        self.statistics: list[Statistic] = []  # of what was encoded
        self.used = False  # a saved tensor was asked for
        self.metas: list[SlotMeta | None] = []
        self.last_needed = -1
        self._builder: BundleBuilder | None = None
        self._kind: tuple[Hashable, ...] = ()
        if treatment.action is not Action.RECOMPUTE:
            self._builder = BundleBuilder(context.proofs, unit_class, inputs.tensors, self)
            self._kind = self._builder.kind
        self._handles: list[weakref.ref[Handle]] = []
        self._recovered: list[Value | None] | None = None
        self._recovered_for = -1
        self.parcels: weakref.WeakSet[Parcel] = weakref.WeakSet()  # what was sent, as long as it is held
        self._away_before = context.newest_away

    @property
    def action(self) -> Action:
        return self.treatment.action

    @property
    def label(self) -> str:
        return f"unit {self.unit} (rank {self.context.rank})"

    # -- forward ---------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's forward with the caller's own tensors: exact, with grad (R1)."""
        self.context.at_work = self.unit
        try:
            with ExitStack() as stack:
                stack.enter_context(unit_scope())
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
                for tape in (self.routing, self.outputs):
                    if tape is not None:
                        stack.enter_context(tape.recording())
                result = function(*args, **kwargs)
            if self._builder is not None:
                self._stored(result)
        finally:
            self._builder = None
            self._version = self._facts.version()
            self.inputs.tensors = []  # the originals carry the graph behind them
        self._ran()
        return result

    def _pack(self, tensor: Tensor) -> Handle | ParameterRef:
        parameter = self.inputs.parameter_of(tensor)
        if parameter is not None:
            self.metas.append(None)
            return ParameterRef(parameter, tensor)
        index = len(self.metas)
        self.metas.append(SlotMeta(tensor.shape, tensor.dtype))
        self.last_needed = index
        if self._builder is None:
            return Handle(self, index, None)
        handle = Handle(self, index, self._builder.hold(tensor, index))
        self._handles.append(weakref.ref(handle))
        return handle

    def _stored(self, result: Any) -> None:
        """The state is complete: encodes it where the treatment says so, shows it where somebody wants to see."""
        if not self.treatment.codecs and self.context.sample is None:
            return
        shelved = self._shelves(lambda: groups_of(tensors_in(result), self, self.inputs.tensors))
        if self.treatment.codecs:
            self._encode(shelved, self.treatment)
        elif self.context.sample is not None:
            self.context.sample(self, shelved)

    def _shelves(self, find: Callable[[], dict[int, str]] | None) -> list[Shelf]:
        groups = self.context.groups((*self._kind, class_key(self.unit_class, self.metas)), find)
        return self.context.encodable(shelves(self._alive(), groups)) if groups else []

    def _encode(self, shelved: list[Shelf], treatment: Treatment) -> None:
        self.statistics += encode(self._alive(), shelved, self.context.codecs_of(treatment))

    def _ran(self) -> None:
        """The forward is over: what can be looked up again is let go, what is to lie in host memory goes there (NOTE
        [Offload rules] in offload.py)."""
        self.context.lookups.replace(self._alive, self.inputs)
        if self.treatment.place is Place.HOST:
            sent = self.context.offload.send(self.surroundings.device, self._alive(), self.inputs)
            self.parcels = weakref.WeakSet(sent)
            self.context.newest_away = weakref.ref(self)

    def _alive(self) -> list[Handle]:
        return [handle for reference in self._handles if (handle := reference()) is not None]

    # -- between forward and backward ------------------------------------------------------------------------------

    def compress(self, treatment: Treatment) -> None:
        """Store becomes compress (R4): encodes what `treatment` names in place of the originals. Stays stored, and
        exact, where the groups of such a call are not known, or its state is not on the device."""
        shelved = [] if self.treatment.place is Place.HOST else self._shelves(None)
        if shelved:
            self._encode(shelved, treatment)
            self.treatment = treatment

    def drop(self) -> None:
        """Store or compress becomes recompute (R4): frees the state at once, what stays are the inputs. Recompute
        lets go of kept outputs."""
        for handle in self._alive():
            handle.value = None
        self._handles.clear()
        self.outputs = None
        self.treatment = REPLAYED

    def held_storages(self) -> dict[int, int]:
        """Bytes of all that is held by storage address: inputs, kept outputs, stored state."""
        values = [handle.value for handle in self._alive()]
        outputs = [] if self.outputs is None else self.outputs.held()
        return {**self.input_storages(), **storages(outputs), **storages(kept_tensors(values))}

    def input_storages(self) -> dict[int, int]:
        """Bytes of inputs and routing by storage address: what recompute holds."""
        routing = [] if self.routing is None else self.routing.choices
        return storages([*self.inputs.held(), *routing])

    def host_storages(self) -> dict[int, int]:
        """Bytes by storage address of what lies in host memory now, inputs included."""
        return storages([parcel.tensor for parcel in self.parcels if parcel.host_bytes])

    # -- backward --------------------------------------------------------------------------------------------------

    def come_to_use(self) -> None:
        """Backward has come to this call: its state is called back from host memory, and that which is wanted next
        (O5)."""
        self.used = True
        before = None if self._away_before is None else self._away_before()
        for call in (self, before):
            if call is not None and call.parcels:
                call_back(call.parcels)

    def recover(self, index: int) -> Value:
        """The value of a slot that was not kept; replays the unit at the first one."""
        graph = torch._C._current_graph_task_id()
        if self._recovered is None or self._recovered_for != graph:
            # Another graph task is another backward (retain_graph), whose own copy must be made anew.
            self._recovered, self._recovered_for = self._replay(), graph
        elif self._recovered[index] is None:
            # A custom Function that asks for ctx.saved_tensors again. From now on such units keep what they recover
            # until their last node has run, so that they are replayed once.
            self.context.rereading.add(self.unit_class)
            self._recovered = self._replay()
        value = self._recovered[index]
        if value is None:
            raise RecoveryError(f"{self.label}: the replay did not yield saved tensor {index}; please report this")
        if self.unit_class not in self.context.rereading:
            self._recovered[index] = None
        return value

    def persist(self, work: Callable[[], Result]) -> Result:
        """`work()` of this call's backward, again where it failed for want of memory and some was freed (R10)."""
        if not self.used:
            self.come_to_use()
        self.context.at_work = self.unit
        while True:
            try:
                return work()
            except Exception as error:
                if not self.context.relieve(self, error):
                    raise
            # Only here is what failed gone: the exception's traceback held it.

    def check_generation(self) -> None:
        """Raises `StateChanged` where an optimizer step or loaded weights came after the forward (R6)."""
        if self.generation != self.context.generation:
            raise StateChanged(
                f"{self.label}: parameters were stepped or loaded between this forward and its backward; run the "
                "forward again after a step"
            )

    def check_state(self) -> None:
        """Raises `StateChanged` where a replay would compute with other weights than the forward did (R5)."""
        if self._facts.version() != self._version:
            raise StateChanged(
                f"{self.label}: a parameter or buffer of the unit was changed in place between forward and backward; "
                "change it only after the backward pass"
            )

    def _replay(self) -> list[Value | None]:
        self.check_state()
        source = ReplaySource(
            self.label,
            self.unit_class,
            self.inputs,
            self.surroundings,
            self.metas,
            self.last_needed,
            self.context.proofs,
            self.routing,
            self.outputs,
            self.context.lean_replay,
        )
        with unit_scope(), self.context.timing(self.unit):
            return self.context.dead_work.replay(source)


def _state(module: torch.nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())


@contextmanager
def unit_scope() -> Iterator[None]:
    """A unit's forward or replay runs inside (rule R7)."""
    token = _inside_unit.set(True)
    try:
        yield
    finally:
        _inside_unit.reset(token)


def _unpack(held: Handle | ParameterRef) -> Tensor:
    if type(held) is ParameterRef:
        return held.get()
    assert isinstance(held, Handle)
    call: UnitCall = held.owner
    context = call.context
    if not context.settled:
        context.settle()
    if context.watch is not None:
        context.watch(call)
    call.check_generation()
    if not call.used:
        call.come_to_use()
    context.at_work = call.unit
    value = held.value
    while True:
        try:
            if value is None:
                value = call.recover(held.index)
            return value.get()
        except StateChanged as changed:
            if call.label in str(changed):
                raise
            raise StateChanged(f"{call.label}: {changed}") from changed
        except Exception as error:
            if not context.relieve(call, error):  # R10
                raise
        # as `persist` does it, without one call more for every saved tensor
