"""From a measured all-R update to plans: what the rest of the device holds, and a plan for any shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_hilore.core.budget import MemoryBudget
from ds_hilore.core.errors import UsageError
from ds_hilore.core.treatment import INPUT_OFFLOADED, Treatment
from ds_hilore.core.types import Action, Plan, Shape, Solver, UnitId, UnitProfile
from ds_hilore.memory.base import BaseBytes, BaseObservation
from ds_hilore.planning.away import first_with_host, leanest, moving_bytes
from ds_hilore.planning.background import BackgroundPlanner
from ds_hilore.planning.frontier import Frontier, Prepared, first_frontier, gap
from ds_hilore.planning.paper import PaperFrontier, PaperPrepared, paper_frontier
from ds_hilore.planning.problem import Infeasible, Problem, Row, evaluate
from ds_hilore.planning.program import SolverLimits
from ds_hilore.planning.refine import refine_apart
from ds_hilore.profiling.pruned import Pruned
from ds_hilore.runtime.outlived import or_replay
from ds_hilore.runtime.pressure import NOISE_BYTES, Levels, Pressure, held_bytes, pressure
from ds_hilore.runtime.risk import RiskNow

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhasePeaks:
    """Peak bytes of the device in one all-R microbatch, floor included, and the shape of its first unit."""

    shape: Shape
    forward: int
    loss: int
    backward: int
    floor: int = 0  # level before the forward
    settled: int = 0  # level when backward begins
    ran: int = 0  # level when the last unit has run; 0: not known


@dataclass(frozen=True)
class Baseline:
    """What an all-R update needs on this rank. `peak_bytes` is "1.0x": all microbatches and the optimizer step.

    `ceiling_bytes`: how high a peak may come beside what others hold on the device; None: as high as the device is.
    """

    peak_bytes: int
    phases: tuple[PhasePeaks, ...]
    device_bytes: int
    ceiling_bytes: int | None = None


#: What plans are made for: a budget in bytes, a shape class, how replays are pruned.
PlanKey = tuple[int, Shape, Pruned | None]
#: B / E where no unit may be approximate.
EXACT = 0.0


class RankPlanner:
    """Plans of one rank under its own budget. Greedy answers at once, the exact programme in the background.

    Args:
        solver: of the programme; GREEDY: none. DYNAMIC: the planner of `paper` mode, whose risks add up as they are.
        room_bytes: what plans leave free where they can, because one and the same plan's peak wanders by as much.

    Attributes:
        margin_bytes: what they leave free besides, since it was missing (guard.py).
        host_bytes: host memory that this rank's plans may use.
    """

    def __init__(self, budget: MemoryBudget, solver: Solver, limits: SolverLimits, room_bytes: int = 0) -> None:
        self._room = room_bytes
        self.margin_bytes = 0
        self.host_bytes = 0
        self.budget = budget
        self.budget_bytes = 0
        self.infeasible: Infeasible | None = None
        self.outlived: set[str] = set()
        self._background: BackgroundPlanner[Frontier, Frontier] | None = None
        self._paper = solver is Solver.DYNAMIC
        if solver in (Solver.HIGHS, Solver.CBC):
            self._background = BackgroundPlanner(partial(refine_apart, limits=limits))
        self._calibrations = 0
        self._relative_gap = limits.relative_gap
        self._largest: dict[Shape, Shape] = {}  # by shape class
        self._problems: dict[PlanKey, Problem] = {}
        self._frontiers: dict[PlanKey, Frontier | PaperFrontier | Plan] = {}  # a plan where nothing fits
        self._observed: list[BaseObservation] = []
        self._base = BaseBytes()
        self._in_flight = 1

    def calibrate(self, baseline: Baseline, profiles: dict[Shape, tuple[UnitProfile, ...]], in_flight: int = 1) -> None:
        """Splits the measured peaks into the units' part, which plans change, and the rest, which stays.

        Args:
            baseline: peaks of an all-R update.
            profiles: of every shape in `baseline.phases`.
            in_flight: microbatches whose state is held at once.
        """
        self._in_flight = in_flight
        self.budget_bytes = self.budget.bytes_on(baseline.device_bytes, baseline.peak_bytes, baseline.ceiling_bytes)
        self._observed = [_observation(phase, profiles[phase.shape], {}, in_flight) for phase in baseline.phases]
        self._refit()

    def note_peaks(self, peaks: PhasePeaks, profiles: tuple[UnitProfile, ...], choice: Mapping[UnitId, str]) -> None:
        """What a planned microbatch was seen to need; where that is more than foreseen, further plans leave the room.

        Args:
            peaks: 0 where a row's is not known.
            profiles: for the shape of `peaks`.
            choice: the variants that ran.
        """
        found = _observation(peaks, profiles, choice, self._in_flight)
        foreseen = dict(zip(("forward", "loss", "backward"), self._base.at(peaks.shape)))
        seen = {row: getattr(found, row) for row in foreseen if getattr(peaks, row)}
        risen = max((count - foreseen[row] for row, count in seen.items()), default=0)
        if risen > NOISE_BYTES:
            between = self._base.between_at(peaks.shape)
            self._observed = _most_telling([*self._observed, replace(found, **(foreseen | seen), between=between)])
            self._refit(risen)

    def note_floor(self, level_bytes: int) -> None:
        """What is held before the forward of a planned microbatch. Where that has grown since the first updates
        (caches, allocators, what others put there), everything is that much higher."""
        risen = level_bytes - self._base.floor
        if risen > NOISE_BYTES:
            self._observed = [found.raised(risen) for found in self._observed]
            self._refit(risen)

    def leave_room(self, margin_bytes: int) -> None:
        """Plans from now on leave so many bytes free, as far as replaying everything does."""
        margin_bytes = min(margin_bytes, self.budget_bytes)
        if margin_bytes != self.margin_bytes:
            self.margin_bytes = margin_bytes
            self.replan()

    def _refit(self, risen: int = 0) -> None:
        """`risen`: by how much a base was too low, which need no longer be left free besides."""
        self.margin_bytes = max(0, self.margin_bytes - risen)
        self._base = BaseBytes.fit(self._observed)
        self.replan()

    def replan(self) -> None:
        """Plans made so far are out of date: profiles or bases have changed."""
        self._calibrations += 1
        self._problems.clear()
        self._frontiers.clear()
        self.infeasible = None

    def plan_for(self, shape: Shape, profiles: tuple[UnitProfile, ...]) -> Plan:
        """What to prepare in a microbatch of this shape class; profiles are those of the same class.

        Never waits: the first answer is greedy's, a refined one takes its place when it is ready. Where not even all-R
        fits, all-R is the plan (nothing needs less) and `infeasible` says what is missing.
        """
        found = self.prepare(shape, profiles)
        return found if isinstance(found, Plan) else found.plan

    def prepare(
        self,
        shape: Shape,
        profiles: tuple[UnitProfile, ...],
        reach: float = EXACT,
        ratios: Sequence[float] = (1.0,),
        pruning: Pruned | None = None,
    ) -> Prepared | PaperPrepared | Plan:
        """The same with what it may still become after forward; a bare plan where nothing fits.

        Args:
            reach: predicted B / E of the microbatch; 0: exact actions only.
            ratios: equally likely values of true over predicted exposure.
            pruning: the one that the profiles are for.
        """
        found = self._frontier(shape, profiles, pruning)
        return found if isinstance(found, Plan) else found.prepare(reach, ratios)

    def breakpoints(self, shape: Shape, profiles: tuple[UnitProfile, ...]) -> tuple[tuple[float, float], ...]:
        """(risk cost at exposure 1, seconds) of every plan of this shape class, for the price of risk."""
        found = self._frontier(shape, profiles)
        return found.breakpoints if isinstance(found, Frontier) else ()

    def planning_shape(self, shape: Shape) -> Shape:
        """The shape to plan for: the largest seen of the shape's class, so that one plan serves all of it so far."""
        size = shape_class(shape)
        known = self._largest.get(size, shape)
        largest = Shape(max(known.segments, shape.segments), max(known.length, shape.length))
        self._largest[size] = largest
        return largest

    @or_replay
    def decide(
        self,
        shape: Shape,
        row: Prepared | PaperPrepared,
        level_bytes: int | None = None,
        risk: RiskNow | None = None,
        free_bytes: int | None = None,
    ) -> Plan:
        """The final plan from what `prepare` gave, once forward and loss are over.

        Args:
            level_bytes: what the device holds now; None where that cannot be read.
            risk: what may be approximate; None: nothing may.
            free_bytes: what can still be had from the device now; None where that cannot be read.

        Returns:
            The prepared plan itself where all of it is exact and no more is held than was foreseen, or the plan leaves
            room for it; else what risk allows, with units replayed, as many as it takes (all, if need be).
        """
        known = self._pressure(shape, row, level_bytes, free_bytes)
        if known is None and row.plan.risk == 0:
            return row.plan
        decided = row.decide_in(
            row.problem.now(
                risk_budget=0.0 if risk is None else risk.budget,
                exposures=None if risk is None else risk.exposures,
                budget_bytes=None if known is None else known.budget_bytes,
                base_backward_bytes=None if known is None else known.base_backward_bytes,
            )
        )
        if isinstance(decided, Infeasible):
            return all_units([unit.unit for unit in row.problem.units], Action.RECOMPUTE)
        return decided

    def shortage(
        self, shape: Shape, row: Prepared | PaperPrepared, level_bytes: int | None, free_bytes: int | None
    ) -> int:
        """Bytes by which the backward of the prepared plan would need more than there is; arguments of `decide`."""
        known = self._pressure(shape, row, level_bytes, free_bytes)
        return 0 if known is None else known.shortage(row.problem, row.plan)

    def _pressure(
        self, shape: Shape, row: Prepared | PaperPrepared, level_bytes: int | None, free_bytes: int | None
    ) -> Pressure | None:
        foreseen = self._base.settled_at(shape) + held_bytes(row.problem, row.plan)
        levels = Levels(foreseen, level_bytes, free_bytes)
        return pressure(row.problem, row.plan, levels, self.free_budget_bytes)

    @property
    def free_budget_bytes(self) -> int:
        """What an update may use once it runs: the margin of plans is for this."""
        return self.budget_bytes - self._room

    def level_between(self, shape: Shape) -> int:
        """What is to be there between two units of a forward, units' part aside."""
        return self._base.between_at(shape)

    @or_replay
    def _frontier(
        self, shape: Shape, profiles: tuple[UnitProfile, ...], pruning: Pruned | None = None
    ) -> Frontier | PaperFrontier | Plan:
        key = (self.budget_bytes, shape, pruning)
        if self._background is not None:
            refined = self._background.best((self._calibrations, *key))
            if refined is not None:
                return refined
        found = self._frontiers.get(key)
        if found is None:
            found = self._frontiers[key] = self._first_frontier(key, profiles)
        return found

    def set_budget(self, budget_bytes: int) -> None:
        """Plans from now on are for this many bytes. Those of other budgets are kept for when one comes back.

        Raises:
            UsageError: before `calibrate`, which sets the budget itself.
        """
        if self._calibrations == 0:
            raise UsageError("the budget can be changed once the first updates have been measured")
        self.budget_bytes = budget_bytes
        self.infeasible = None

    def _first_frontier(self, key: PlanKey, profiles: tuple[UnitProfile, ...]) -> Frontier | PaperFrontier | Plan:
        base = self._base.at(key[1])
        whole = _problem(
            profiles, max(0, self.budget_bytes - self._room - self.margin_bytes), base, self._in_flight, self._paper
        )
        whole = replace(whole, host_budget_bytes=self.host_bytes)
        problem, found = self._answer(whole)
        if isinstance(found, Infeasible):
            # without that room; where it was missed before, with as much of it as there can be
            least = min(self.budget_bytes, found.min_bytes) if self.margin_bytes else self.budget_bytes
            problem, found = self._answer(replace(whole, budget_bytes=least))
        self._problems[key] = problem
        if isinstance(found, Infeasible):
            if self.infeasible is None:
                _log.warning("hilore: %s; every unit is replayed", found)
            self.infeasible = found
            choice = leanest(whole, INPUT_OFFLOADED.name)
            return Plan(choice, dict.fromkeys(choice, Action.RECOMPUTE), peak_bytes=evaluate(whole, choice).peak_bytes)
        if isinstance(found, PaperFrontier):
            return found
        plans = [plan for row in found.rows for plan in (row.plan, *row.points)]
        if self._background is not None and any(gap(plan) > self._relative_gap for plan in plans):
            self._background.submit((self._calibrations, *key), found)
        return found

    def _answer(self, problem: Problem) -> tuple[Problem, Frontier | PaperFrontier | Infeasible]:
        """A first answer, and the problem that it answers."""
        return (problem, paper_frontier(problem)) if self._paper else first_with_host(problem, first_frontier)

    def problem_for(self, shape: Shape) -> Problem | None:
        """The problem behind the plans of a shape class, for reports and tests."""
        return self._problems.get((self.budget_bytes, shape, None))

    def wait(self, timeout_s: float) -> bool:
        """Waits for the background programme. For tests and benchmarks, never in an update."""
        return self._background is None or self._background.wait(timeout_s)

    def close(self) -> None:
        if self._background is not None:
            self._background.close(timeout_s=0.1)


#: Observations that a base is fitted to.
MAX_OBSERVED = 16


def _observation(
    peaks: PhasePeaks, profiles: tuple[UnitProfile, ...], choice: Mapping[UnitId, str], in_flight: int
) -> BaseObservation:
    """The measured peaks without what the planner's rows say that the units need."""
    moving = moving_bytes(profiles, choice)
    rows = evaluate(_problem(profiles, 0, (moving, 0, moving), in_flight), choice).peaks
    units = {peak.row: peak.bytes for peak in rows}
    return BaseObservation(
        peaks.shape.tokens,
        max(0, peaks.floor - units[Row.LOSS] * (in_flight - 1) // in_flight),  # without what the others hold
        peaks.forward - units[Row.FORWARD],
        peaks.loss - units[Row.LOSS],
        peaks.backward - units[Row.BACKWARD],
        peaks.settled - units[Row.LOSS],
        # at most: what is there at the loss is more
        (peaks.ran or max(peaks.forward, peaks.settled)) - units[Row.LOSS],
    )


def _most_telling(observed: list[BaseObservation]) -> list[BaseObservation]:
    """The highest of each number of tokens, the newest of those."""
    highest: dict[int, BaseObservation] = {}
    for found in observed:
        known = highest.pop(found.tokens, found)
        rows = (
            max(getattr(known, row), getattr(found, row))
            for row in ("floor", "forward", "loss", "backward", "settled", "between")
        )
        highest[found.tokens] = BaseObservation(found.tokens, *rows)
    return list(highest.values())[-MAX_OBSERVED:]


#: What a lean replay saves at the peak of a unit's backward, in unit inputs: the outputs of its norms, and some more.
LEAN_SAVES = 4


def loss_leads(baseline: Baseline, profiles: dict[Shape, tuple[UnitProfile, ...]]) -> bool:
    """Whether the loss (whole logits, or a large chunk of them) needs so much more than any unit's backward that a
    replay may hold all it saves: lean replays would cost time and lower no peak. Plans add to both rows alike."""
    return all(
        phase.loss - phase.backward >= LEAN_SAVES * max(unit.variant("R").held_bytes for unit in profiles[phase.shape])
        for phase in baseline.phases
    )


def shape_class(shape: Shape) -> Shape:
    """Rounds segments and length up to 1/8 of their power of two: a plan for the class fits every shape in it."""
    return Shape(round_up(shape.segments), round_up(shape.length))


def round_up(count: int) -> int:
    """To the next of 8 steps between two powers of two; up to 16 nothing is rounded."""
    step = max(1, (1 << max(0, count - 1).bit_length()) >> 4)
    return -(-count // step) * step


def all_units(units: list[UnitId], wanted: Treatment | Action) -> Plan:
    """The same for every unit."""
    treatment = wanted if isinstance(wanted, Treatment) else Treatment(wanted)
    return Plan(choice=dict.fromkeys(units, treatment.name), actions=dict.fromkeys(units, treatment.action))


def _problem(
    profiles: tuple[UnitProfile, ...],
    budget_bytes: int,
    base: tuple[int, int, int],
    in_flight: int,
    linear_risk: bool = False,
) -> Problem:
    forward, loss, backward = base
    return Problem(
        profiles,
        budget_bytes,
        base_forward_bytes=forward,
        base_loss_bytes=loss,
        base_backward_bytes=backward,
        in_flight=in_flight,
        linear_risk=linear_risk,
    )
