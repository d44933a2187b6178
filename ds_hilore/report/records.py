"""The lines of a run's log: one JSON object each, with a bound on every number, text and list.

A folder holds one file per rank, to which each run appends. Its first line says which run it is (`RunRecord`, the same
`run` on all ranks); names of units come once, updates then say a letter for each. A file is an input like any other: it
may be cut short, damaged, or made to do harm.

Bytes are integers, seconds floats, errors shares of the whole update's gradient norm.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

#: Longer lines are not read: 2,000 units of one microbatch after the other take a tenth of that.
MOST_LINE_BYTES = 1 << 20
MOST_RANKS = 1 << 20

#: Letters of the actions as logs and pictures have them, and of a unit that did not run.
STORED, COMPRESSED, REPLAYED, ABSENT = "H", "L", "R", "."

#: The stage in which plans are followed for good.
FOLLOWED = "planned"

Text = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, le=1 << 60)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Seconds = Annotated[float, Field(ge=-1e12, le=1e12)]


class Record(BaseModel):
    """One line. Keys that a later version adds are passed over; values that are no numbers are refused."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class RunRecord(Record):
    """A run begins. A log of another version is not read.

    Attributes:
        run: the same on all ranks, and on no other run.
        started_s: by rank 0's clock, since 1970.
        settings: the block.
        units: what they are, as the start line says it.
        exact_peaks: peaks are measured in the ordinary course of this run.
    """

    kind: Literal["run"] = "run"
    version: Literal[1] = 1
    run: Annotated[str, Field(min_length=1, max_length=64)]
    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    world: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    started_s: Amount
    package: Text
    device: Text
    zero_stage: Count
    microbatches: Count
    settings: dict[str, Any]
    units: Text
    exact_peaks: bool


class UnitsRecord(Record):
    """Units that were seen for the first time: their places in the letters that follow are `first` and on."""

    kind: Literal["units"] = "units"
    first: Annotated[int, Field(ge=0, le=100_000)]
    names: Annotated[tuple[Text, ...], Field(max_length=100_000)]


class UpdateRecord(Record):
    """One update on one rank.

    Attributes:
        update: from 0.
        stage: of learning, in its first microbatch.
        seconds: from the end of the update before, sampling and all else included; None for the first.
        microbatches: that are known; what follows is of these.
        tokens: positions, padding included.
        actions: letters in order of units, and how many microbatches ran so.
        variants: names of what was done with units, and how often.
        saved_seconds: that final plans promise against replaying everything.
        predicted_peak_bytes: the highest that a plan promised; 0 where none did.
        budget_bytes: 0 until the peak of replaying everything is known.
        peak_bytes: the highest since peaks were last reset; None where they are not measured.
        level_bytes: held after the step.
        exposure, foreseen_exposure: mean of microbatches; None where no loss told, or nothing was foreseen.
        risk, allowed_risk: this rank's part of the update's error, planned and allowed.
        check_seconds: of calibration and audits, in this update.
        shortages: events of the guard so far.
    """

    kind: Literal["update"] = "update"
    update: Count
    stage: Annotated[str, Field(max_length=32)]
    seconds: Amount | None = None
    microbatches: Count = 0
    tokens: Count = 0
    actions: Annotated[dict[Annotated[str, Field(max_length=100_000)], Count], Field(max_length=4096)] = {}
    variants: Annotated[dict[Text, Count], Field(max_length=4096)] = {}
    saved_seconds: Seconds = 0.0
    predicted_peak_bytes: Count = 0
    budget_bytes: Count = 0
    peak_bytes: Count | None = None
    level_bytes: Count = 0
    exposure: Amount | None = None
    foreseen_exposure: Amount | None = None
    risk: Amount | None = None
    allowed_risk: Amount | None = None
    check_seconds: Amount = 0.0
    shortages: Count = 0

    @property
    def kept_seconds(self) -> float:
        """What was promised by plans that are followed for good: a trial may show that others do not pay."""
        return self.saved_seconds if self.stage == FOLLOWED else 0.0


class ProspectRecord(Record):
    """What there was to win on a rank when its first plan was made; seconds of one microbatch that replayed all."""

    kind: Literal["prospect"] = "prospect"
    replayed_peak_bytes: Count
    microbatch_seconds: Amount
    replay_seconds: Amount


class TrialRecord(Record):
    """What a rank's trial has shown: seconds per token of microbatches that ran all-R, as planned, and compressing."""

    kind: Literal["trial"] = "trial"
    update: Count
    replayed_s: Amount
    planned_s: Amount
    compressed_s: Amount | None = None
    promised_s: Seconds | None = None


class ShortageRecord(Record):
    """An event of the guard. `unit` is "" where it was noticed outside of any; `replayed`: units that were, for it."""

    kind: Literal["shortage"] = "shortage"
    update: Count
    defence: Annotated[str, Field(max_length=32)]
    unit: Text = ""
    short_bytes: Count
    replayed: Count = 0


class AuditRecord(Record):
    """Relative error of one update's gradient, by all ranks: as planned and as measured. Equal on all of them."""

    kind: Literal["audit"] = "audit"
    update: Count
    predicted: Amount
    measured: Amount


AnyRecord = RunRecord | UnitsRecord | UpdateRecord | ProspectRecord | TrialRecord | ShortageRecord | AuditRecord

_ANY: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="kind")])
_NAME = re.compile(r"rank-(\d{5,7})\.jsonl")


def parse(line: bytes) -> AnyRecord:
    """The record of a line.

    Raises:
        ValueError: it is none (pydantic's `ValidationError` is a kind of it).
    """
    return _ANY.validate_json(line)


def line_of(record: Record) -> bytes:
    """The record as a line, its end included."""
    return record.model_dump_json(exclude_none=True).encode() + b"\n"


def file_of(folder: Path, rank: int) -> Path:
    """The log of a rank."""
    return folder / f"rank-{rank:05d}.jsonl"


def rank_of(path: Path) -> int | None:
    """The rank whose log has this name; None: it is no log's."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None
