"""Logs of runs that never were, written as a run writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_hilore.core.config import HiLoReConfig
from ds_hilore.report.records import (
    AuditRecord,
    ProspectRecord,
    Record,
    RunRecord,
    ShortageRecord,
    TrialRecord,
    UnitsRecord,
    UpdateRecord,
)
from ds_hilore.report.writing import LogFile

GB = 10**9


@dataclass(frozen=True)
class Story:
    """A run: measures for two updates, tries plans in three, and follows them."""

    run: str = "first"
    world: int = 1
    updates: int = 20
    units: int = 6
    started_s: float = 1_000_000.0
    error: float = 0.01
    measured: bool = True
    shortages: int = 1

    def stage(self, update: int) -> str:
        return "measure_r" if update < 2 else "trial" if update < 5 else "planned"

    def stored(self, rank: int, update: int) -> int:
        """Units that a rank stores, the last ones: more on higher ranks."""
        return 0 if self.stage(update) == "measure_r" else min(self.units, 1 + rank * self.units // self.world)

    def letters(self, rank: int, update: int) -> str:
        stored = self.stored(rank, update)
        compressed = 1 if self.error and self.stage(update) == "planned" and stored < self.units else 0
        return "R" * (self.units - stored - compressed) + "L" * compressed + "H" * stored

    def begin(self, rank: int) -> RunRecord:
        config = HiLoReConfig(max_gradient_error=self.error, report={"path": "runs"})
        return RunRecord(
            run=self.run,
            rank=rank,
            world=self.world,
            started_s=self.started_s,
            package="ds_hilore 0, torch 0",
            device="cuda",
            zero_stage=2,
            microbatches=2,
            settings=config.fingerprint(),
            units=f"{self.units} LlamaDecoderLayer",
            exact_peaks=self.measured,
        )

    def update(self, rank: int, update: int) -> UpdateRecord:
        planned, letters = self.stage(update) != "measure_r", self.letters(rank, update)
        errs = self.error > 0 and planned
        return UpdateRecord(
            update=update,
            stage=self.stage(update),
            seconds=None if update == 0 else 2.0,
            microbatches=2,
            tokens=4096,
            actions={letters: 2},
            variants={kind: 2 * letters.count(kind) for kind in sorted(set(letters))},
            saved_seconds=0.1 * letters.count("H"),
            predicted_peak_bytes=11 * GB if planned else 0,
            budget_bytes=12 * GB if planned else 0,
            peak_bytes=10 * GB + rank if self.measured else None,
            level_bytes=5 * GB,
            exposure=3.0 + rank if errs else None,
            foreseen_exposure=2.5 if errs else None,
            risk=0.004 if errs else None,
            allowed_risk=0.01 if errs else None,
            shortages=min(self.shortages, max(0, update - 5)),
        )

    def lines(self, rank: int) -> Iterator[list[Record]]:
        """What is written at once."""
        yield [self.begin(rank)]
        for update in range(self.updates):
            found: list[Record] = []
            if update == 0:
                names = tuple(f"model.layers.{place}" for place in range(self.units))
                found.append(UnitsRecord(first=0, names=names))
            if update == 2:
                found.append(ProspectRecord(replayed_peak_bytes=10 * GB, microbatch_seconds=1.0, replay_seconds=0.3))
            if update == 5:
                found.append(TrialRecord(update=5, replayed_s=2e-4, planned_s=1.8e-4, promised_s=2.5e-5))
            if 5 < update <= 5 + self.shortages:
                found.append(
                    ShortageRecord(
                        update=update, defence="backward", unit="model.layers.3", short_bytes=GB // 10, replayed=2
                    )
                )
            if self.error and update and update % 10 == 0:
                found.append(AuditRecord(update=update, predicted=0.004, measured=0.005))
            yield [*found, self.update(rank, update)]

    def write(self, folder: Path, ranks: Iterable[int] | None = None) -> Path:
        """Writes the logs of some ranks, of all by default."""
        for rank in range(self.world) if ranks is None else ranks:
            file = LogFile(folder, rank)
            for records in self.lines(rank):
                file.append(records)
            file.close()
        return folder
