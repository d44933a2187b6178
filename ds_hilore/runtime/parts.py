"""What a controller is made from, and the states that it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import nn

from ds_hilore.core.errors import UsageError
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.treatment import Treatment, UniformPlan
from ds_hilore.core.types import Action, Plan, UnitId
from ds_hilore.memory.meter import PeakMeter
from ds_hilore.objective.reach import Reach
from ds_hilore.profiling.clock import Clock
from ds_hilore.recovery.encoded import Encodable
from ds_hilore.recovery.prune import RolesOf
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.risk import RiskRules
from ds_hilore.runtime.update import GradientScale

Checkpoint = Callable[..., Any]


class Stage(Enum):
    """How far the run is in learning what its units cost."""

    MEASURE_R = "measure_r"
    MEASURE_H = "measure_h"
    TRIAL = "trial"
    PLANNED = "planned"


class Bypass(Enum):
    """Ways to run units without us, for comparisons."""

    NONE = "none"
    PLAIN = "plain"  # no checkpointing at all
    HOST = "host"  # the host's own checkpoint function


@dataclass(frozen=True)
class Techniques:
    """What there is beside storing, compressing and recomputing whole units; mode `paper` has none of it.

    Args:
        derived_state: tensors that can be derived from held ones are not held.
        dead_work: replays leave out what nothing recovered depends on.
        kept_outputs: plans may keep the attention kernel's outputs for a replay.
        encodable: what is encoded of a call, of all that could be.
        least_encoded_bytes: plans offer no compression of state groups below.
    """

    derived_state: bool = True
    dead_work: bool = True
    kept_outputs: bool = True
    encodable: Encodable = list
    least_encoded_bytes: int = 0


class ReplayAgreement(Protocol):
    """With the ranks that communicate inside units: a unit is replayed by all of them or by none (design fact 16)."""

    def stored(self, plan: Plan, calls: Iterable[UnitId]) -> frozenset[UnitId]:
        """Calls of units that no rank's plan replays. Asked once per microbatch, by all of those ranks in step.

        Args:
            plan: this rank's.
            calls: those of a microbatch, as far as they are known. All others are replayed.

        Raises:
            RankMismatch: a rank did not answer.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ControllerParts:
    """What a controller is built from.

    Args:
        unit_names: path and class label of every unit module.
        scale: what a gradient carries on top of omega right now; told whether it has passed the engine's outputs.
        replay_only: function-style units (their module, or None) that may not be stored.
        trial_microbatches: how many run all-R and as planned in turn before plans are followed for good.
        codecs: names of the codecs that plans may use; () for exact actions only.
        risk: what gradient error is allowed.
        roles: what the arguments of a unit mean, for pruning; None where nothing is to be pruned.
        reaches: by unit path, of units whose state does not reach all positions that follow.
        techniques: what else may be used; all of ours by default.
        agreement: with ranks whose collectives a replay repeats; None: replays communicate with nobody.
        plane: to the other ranks of the job, with which gradient error is shared; None: there are none.
    """

    rank: int
    unit_names: Mapping[nn.Module, tuple[str, str]]
    planner: RankPlanner
    meter: PeakMeter
    clock: Clock
    scale: Callable[[bool], GradientScale]
    replay_only: Callable[[nn.Module | None], bool] = lambda module: False
    trial_microbatches: int = 0
    codecs: tuple[str, ...] = ()
    risk: RiskRules = field(default_factory=RiskRules)
    roles: RolesOf | None = None
    techniques: Techniques = field(default_factory=Techniques)
    agreement: ReplayAgreement | None = None
    plane: ControlPlane | None = None
    reaches: Mapping[str, Reach] = field(default_factory=dict)

    def unit_name(self, module: nn.Module | None, function: Callable[..., Any]) -> tuple[str, str]:
        """Path and class label of a unit; a function of the host's own is named after itself."""
        known = self.unit_names.get(module) if module is not None else None
        if known is not None:
            return known
        while hasattr(function, "func"):  # functools.partial
            function = function.func
        name = getattr(function, "__qualname__", type(function).__name__)
        return name, name

    def close(self) -> None:
        """Ends the background planner, and gives back the group that agrees."""
        self.planner.close()
        if self.agreement is not None:
            self.agreement.close()


def forced_plan(wanted: Plan | Treatment | Action | None) -> Plan | None:
    """The plan that a caller of `Controller.force` means.

    Raises:
        UsageError: neither a plan nor a treatment nor an action that says all.
    """
    if wanted is Action.COMPRESS:
        raise UsageError('force: compress needs codecs; give a treatment, as Treatment.parse("L:mlp=bf16")')
    if isinstance(wanted, Action):
        wanted = Treatment(wanted)
    if isinstance(wanted, Treatment):
        wanted = UniformPlan(treatment=wanted)
    if wanted is not None and not isinstance(wanted, Plan):
        raise UsageError(f"force: {wanted!r} is no plan; give an Action, a Treatment, a Plan, or None to end it")
    return wanted
