"""The calibration of a rank on disk: there and back, against damage, another setting, and beside the profile."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_hilore.core.types import UnitId
from ds_hilore.profiling.calibrate import Calibration, Observation
from ds_hilore.profiling.calibration_layout import Progress, as_dict
from ds_hilore.profiling.store import CalibrationStore, ProfileStore, Refused
from tests.profiling.test_store import BASELINE, HERE, measured, path_of
from tests.profiling.test_store import store as profile_store

UNITS = [(UnitId(f"layers.{k}"), k, "Layer") for k in range(4)]
CODECS = {"Layer": (("mlp", "int8"), ("rest", "bf16"))}


def begun(microbatches: int = 3) -> Progress:
    """A calibration in the middle of its way."""
    calibration = Calibration()
    for microbatch in range(microbatches):
        for wanted in calibration.interventions(microbatch, UNITS, CODECS):
            calibration.note(
                Observation(wanted.place, wanted.unit, microbatch, 1.0 + microbatch, 0.01, 0.02 + 0.02 * microbatch)
            )
    calibration.note_judged(None, microbatches, 0.1, math.inf)  # several units together
    calibration.raised = 1.5
    return Progress(calibration, microbatches)


def store(folder: Path, rank: int = 0, **changed: Any) -> CalibrationStore:
    return CalibrationStore(str(folder), replace(HERE, **changed), rank)


def file_of(made: CalibrationStore) -> Path:
    assert made.path is not None
    return made.path


@pytest.fixture
def saved(tmp_path: Path) -> CalibrationStore:
    made = store(tmp_path)
    assert made.save(begun()) is None
    return made


@pytest.mark.parametrize("fitted, accepted", [(False, False), (True, False), (True, True)])
def test_it_goes_on_where_it_was(tmp_path: Path, fitted: bool, accepted: bool) -> None:
    before = replace(begun(), fitted=fitted, accepted=accepted)
    assert store(tmp_path).save(before) is None
    after = store(tmp_path).load()
    assert isinstance(after, Progress)
    assert (after.microbatches, after.fitted, after.accepted) == (3, fitted, accepted)
    assert as_dict(after.calibration) == as_dict(before.calibration)
    errors = {("mlp", "int8"): 0.01, ("rest", "bf16"): 0.001}
    assert after.calibration.risk(1, 4, errors) == before.calibration.risk(1, 4, errors) is not None
    ours, theirs = (each.calibration.interventions(4, UNITS, CODECS) for each in (before, after))
    assert ours == theirs


def test_nothing_was_begun(tmp_path: Path) -> None:
    assert store(tmp_path).load() is None


def test_every_rank_has_its_own(saved: CalibrationStore, tmp_path: Path) -> None:
    assert store(tmp_path, rank=1).load() is None
    assert store(tmp_path, rank=1).save(begun(2)) is None
    found = [store(tmp_path, rank).load() for rank in (0, 1)]
    assert [each.microbatches for each in found if isinstance(each, Progress)] == [3, 2]


def refused(made: CalibrationStore, caplog: pytest.LogCaptureFixture) -> str:
    """The reason; one log line names the file."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = made.load()
    (line,) = [record.getMessage() for record in caplog.records]
    assert isinstance(found, Refused) and str(file_of(made)) in line and "\n" not in line
    return found.reason


DAMAGE: dict[str, Any] = {
    "calibration": lambda content: content.pop("calibration"),
    "accepted before it was fitted": lambda content: content.update(accepted=True),
    "more microbatches have fitted": lambda content: content.update(microbatches=2),
    "microbatches": lambda content: content.update(microbatches=-1),
    "format": lambda content: content.update(format=99),
    "raised": lambda content: content["calibration"].update(raised=0.5),
    "observations.0.exposure": lambda content: content["calibration"]["observations"][0].update(exposure="1"),
    "surprise": lambda content: content.update(surprise=1),
    "fingerprint.state": lambda content: content["fingerprint"].pop("state"),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_damage_is_named(saved: CalibrationStore, says: str, caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads(file_of(saved).read_text())
    DAMAGE[says](content)
    file_of(saved).write_text(json.dumps(content))
    assert says in refused(saved, caplog)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": ' + b"9" * 100_000 + b"}"])
def test_what_is_none_is_named(saved: CalibrationStore, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file_of(saved).write_bytes(text)
    assert refused(saved, caplog)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_named(
    saved: CalibrationStore, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    whole = file_of(saved).read_bytes()
    file_of(saved).write_bytes(whole[: int(share * len(whole))])
    assert refused(saved, caplog)


def test_that_of_another_setting_is_named(saved: CalibrationStore, caplog: pytest.LogCaptureFixture) -> None:
    """A file of the same name that was made elsewhere: the name does not say everything."""
    other = store(file_of(saved).parent, device="B200")
    assert other.path == saved.path
    assert "H200 then, B200 now" in refused(other, caplog)


def test_what_was_tried_is_part_of_the_name(saved: CalibrationStore) -> None:
    assert store(file_of(saved).parent, state="bf16").load() is None


def test_damage_to_it_leaves_the_profile_alone(saved: CalibrationStore) -> None:
    folder = file_of(saved).parent
    profile: ProfileStore = profile_store(folder)
    assert profile.save(measured(), BASELINE) is None
    assert path_of(profile) != file_of(saved)
    file_of(saved).write_text("{")
    assert not isinstance(profile.load(), Refused)
    path_of(profile).write_text("{")
    assert saved.save(begun()) is None and isinstance(saved.load(), Progress)


def test_what_cannot_be_stored_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = begun()
    progress.calibration.raised = 1e19  # no measurement
    with caplog.at_level(logging.WARNING):
        found = store(tmp_path).save(progress)
    assert isinstance(found, Refused) and "raised" in found.reason and "\n" not in caplog.text.strip()
    assert store(tmp_path).load() is None
