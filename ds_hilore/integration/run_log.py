"""A rank's run, update by update: for the log that `hilore report` reads, and for the line that ends a run.

Nothing here waits for the device or for another rank: what is written down is what the controller knows anyway, and
the time that has passed. Nothing here ends a run either: where the log cannot be written, that is said once and no more
is written.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_hilore import __version__
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.types import UnitId
from ds_hilore.report.records import (
    ABSENT,
    AuditRecord,
    ProspectRecord,
    Record,
    RunRecord,
    ShortageRecord,
    TrialRecord,
    UnitsRecord,
    UpdateRecord,
)
from ds_hilore.report.totals import Totals
from ds_hilore.report.writing import LogFile
from ds_hilore.runtime.microbatch import Microbatch

if TYPE_CHECKING:
    from ds_hilore.integration.gradient_checks import GradientChecks
    from ds_hilore.runtime.controller import Controller
    from ds_hilore.runtime.trial import Verdict

_log = logging.getLogger(__name__)


@dataclass
class _Pending:
    """The update that runs, so far."""

    stage: str | None = None
    microbatches: int = 0
    tokens: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    variants: Counter[str] = field(default_factory=Counter)
    saved_seconds: float = 0.0
    predicted_peak_bytes: int = 0
    exposures: list[float] = field(default_factory=list)
    foreseen: list[float] = field(default_factory=list)
    risk: float | None = None
    allowed: float | None = None


class RunLog:
    """One rank's. Holds no engine and no controller, so that it may outlive both.

    Args:
        rank: of the job; rank 0 says the line at the end.
        error_limit: the block's `max_gradient_error`.
        file: where updates are written; None: nowhere.
    """

    def __init__(self, rank: int, error_limit: float, file: LogFile | None = None) -> None:
        self.totals = Totals()
        self._rank = rank
        self._error_limit = error_limit
        self._file = file
        self._process = os.getpid()
        self._over = False
        self._pending = _Pending()
        self._newest: weakref.ref[Microbatch] | None = None  # that was noted
        self._places: dict[UnitId, int] = {}
        self._named = 0  # units whose names are written
        self._ended: float | None = None  # the update before
        self._shortages = self._audits = 0  # that were seen
        self._verdict: Verdict | None = None
        self._promised: float | None = None  # seconds per token, of the newest microbatch of a trial
        self._has_prospect = False
        self._check_seconds = 0.0

    # -- what the host tells ---------------------------------------------------------------------------------------

    def microbatch_done(self, controller: Controller) -> None:
        """The backward of the microbatch in hand is over."""
        if not self._over:
            with self._harmless():
                self._note(controller)

    def update_done(self, controller: Controller, checks: GradientChecks | None) -> None:
        """The optimizer has stepped, and the controller knows."""
        if not self._over:
            with self._harmless():
                self._note(controller)  # its backward may not have come through the engine
                self._write(list(self._records(controller, checks)))

    def restart(self) -> None:
        """The update begins again."""
        self._pending = _Pending()

    def close(self) -> None:
        """The run is over: at `detach`, when the engine is gone, or when the process ends."""
        if self._over or os.getpid() != self._process:  # a forked child's end is not the run's
            return
        self._over = True
        self._leave_file()
        if self._rank == 0 and self.totals.updates:
            _log.info("hilore: %s", self.totals.line(self._error_limit))

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Whatever goes wrong inside is not worth a run: it is said once, and no more is noted."""
        try:
            yield
        except Exception as error:
            self._over = True
            self._leave_file()
            _log.warning(
                "hilore (rank %d): the run is not logged any more, by a fault of ours; please report it: %s: %s",
                self._rank,
                type(error).__name__,
                error,
                exc_info=True,
            )

    # -- microbatches ----------------------------------------------------------------------------------------------

    def _note(self, controller: Controller) -> None:
        batch, learning = controller.microbatch, controller.learning
        if batch.shape is None or (self._newest is not None and self._newest() is batch):
            return
        self._newest = weakref.ref(batch)
        pending = self._pending
        pending.stage = pending.stage or controller.stage.value
        pending.microbatches += 1
        pending.tokens += batch.shape.tokens
        pending.actions[self._letters(batch)] += 1
        pending.variants.update(treatment.name for treatment in batch.treated.values())
        pending.saved_seconds += batch.promised_seconds
        pending.predicted_peak_bytes = max(pending.predicted_peak_bytes, batch.plan.peak_bytes)
        if batch.promised_seconds:
            self._promised = batch.promised_seconds / max(1, batch.shape.tokens)
        risk = learning.risk
        if learning.exposed is not None and math.isfinite(learning.exposed.exposure):
            pending.exposures.append(learning.exposed.exposure)
            if risk.foreseen > 0:
                pending.foreseen.append(risk.foreseen)
        if risk.active:
            pending.risk = risk.rules.risk(math.fsum(map(risk.rules.cost, risk.spent))) / risk.norm
            pending.allowed = risk.budget / risk.norm

    def _letters(self, batch: Microbatch) -> str:
        for unit in batch.treated:
            self._places.setdefault(unit, len(self._places))
        letters = [ABSENT] * len(self._places)
        for unit, treatment in batch.treated.items():
            letters[self._places[unit]] = treatment.action.letter
        return "".join(letters)

    # -- updates ---------------------------------------------------------------------------------------------------

    def _records(self, controller: Controller, checks: GradientChecks | None) -> Iterator[Record]:
        number = controller.update - 1
        if len(self._places) > self._named:
            names = [str(unit)[:512] for unit in self._places]
            yield UnitsRecord(first=self._named, names=tuple(names[self._named :]))
            self._named = len(names)
        yield from self._learnt(controller, number)
        yield from self._newest_shortages(controller)
        for audit in [] if checks is None else checks.audits[self._audits :]:
            self._audits += 1
            record = AuditRecord(update=audit.update, predicted=audit.predicted, measured=audit.measured)
            self.totals.add_audit(record)
            yield record
        update = self._update(controller, number, 0.0 if checks is None else checks.seconds)
        self.totals.add(update)
        yield update

    def _learnt(self, controller: Controller, number: int) -> Iterator[Record]:
        learning = controller.learning
        prize, verdict = learning.prize, learning.verdict
        if prize is not None and not self._has_prospect:
            self._has_prospect = True
            yield ProspectRecord(
                replayed_peak_bytes=prize.replayed_peak_bytes,
                microbatch_seconds=prize.update_seconds,
                replay_seconds=prize.replay_seconds,
            )
        if verdict is not None and verdict is not self._verdict:
            self._verdict = verdict
            yield TrialRecord(
                update=number,
                replayed_s=verdict.replayed_s,
                planned_s=verdict.planned_s,
                compressed_s=verdict.compressed_s,
                promised_s=self._promised,
            )

    def _newest_shortages(self, controller: Controller) -> Iterator[Record]:
        total = sum(controller.guard.counts.values())
        events = list(controller.events)
        new, self._shortages = total - self._shortages, total
        for event in events[max(0, len(events) - new) :] if new else []:  # of very many, the oldest are gone
            yield ShortageRecord(
                update=event.update,
                defence=event.defence.value,
                unit="" if event.unit is None else str(event.unit)[:512],
                short_bytes=event.short_bytes,
                replayed=len(event.dropped),
            )

    def _update(self, controller: Controller, number: int, check_seconds: float) -> UpdateRecord:
        pending, self._pending = self._pending, _Pending()
        before, self._ended = self._ended, time.perf_counter()
        checked, self._check_seconds = check_seconds - self._check_seconds, check_seconds
        meter = controller.parts.meter
        return UpdateRecord(
            update=number,
            stage=pending.stage or controller.stage.value,
            seconds=None if before is None else self._ended - before,
            microbatches=pending.microbatches,
            tokens=pending.tokens,
            actions=dict(pending.actions),
            variants=dict(pending.variants),
            saved_seconds=pending.saved_seconds,
            predicted_peak_bytes=pending.predicted_peak_bytes,
            budget_bytes=controller.budget_bytes,
            peak_bytes=meter.peak_bytes() if meter.exact else None,
            level_bytes=meter.level_bytes(),
            exposure=_mean(pending.exposures),
            foreseen_exposure=_mean(pending.foreseen),
            risk=pending.risk,
            allowed_risk=pending.allowed,
            check_seconds=checked,
            shortages=self._shortages,
        )

    # -- the file --------------------------------------------------------------------------------------------------

    def _write(self, records: list[Record]) -> None:
        if self._file is None:
            return
        try:
            self._file.append(records)
        except OSError as error:
            path = self._file.path
            self._leave_file()
            _say_ended(self._rank, path, error)

    def _leave_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def run_log(engine: Any, config: HiLoReConfig, controller: Controller, plane: ControlPlane, units: str) -> RunLog:
    """The log of an engine's run on this rank. Where the block names a folder, every rank is here.

    Args:
        units: what they are, as the start line says it.

    Raises:
        RankMismatch: another rank is elsewhere.
    """
    rank, limit = plane.rank, config.max_gradient_error if config.compresses else 0.0
    if config.report.path is None:
        return RunLog(rank, limit)
    started_s, run = plane.exchange("run log", [time.time(), os.urandom(8).hex()])[0]
    folder = Path(os.path.expanduser(config.report.path))
    begin = RunRecord(
        run=run,
        rank=rank,
        world=plane.world_size,
        started_s=started_s,
        package=f"ds_hilore {__version__}, torch {torch.__version__}",
        device=str(torch.device(engine.device).type),
        zero_stage=engine.zero_optimization_stage(),
        microbatches=engine.gradient_accumulation_steps(),
        settings=config.fingerprint(),
        units=units[:512],
        exact_peaks=controller.parts.meter.exact,
    )
    try:
        file = LogFile(folder, rank)
    except OSError as error:
        _say_ended(rank, folder, error)
        return RunLog(rank, limit)
    log = RunLog(rank, limit, file)
    log._write([begin])
    return log


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _say_ended(rank: int, path: Path, error: OSError) -> None:
    _log.warning(
        "hilore (rank %d): no more of this run is logged, and `hilore report` will not see it: %s: %s. Training goes "
        "on; make room there, or name another folder in hilore.report.path",
        rank,
        path,
        error.strerror or error,
    )
