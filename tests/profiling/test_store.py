"""The profile on disk against every kind of damage."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hilore.core.types import Shape, UnitId
from ds_hilore.profiling.fit import Rate
from ds_hilore.profiling.layout import (
    Fingerprint,
    StoredBaseline,
    StoredClass,
    StoredCodec,
    StoredFingerprint,
    StoredFit,
    StoredObservation,
    StoredOperator,
    StoredParts,
    StoredPhase,
    StoredProfile,
    StoredSeconds,
    StoredUnit,
)
from ds_hilore.profiling.measure import Measurements, UnitFootprint, UnitRates
from ds_hilore.profiling.store import MAX_BYTES, ProfileStore, Refused, folder_of

HERE = Fingerprint(
    model="m1",
    trained="lora16",
    dtypes="bfloat16",
    attention="sdpa",
    loss_path="chunked",
    state="bf16, int8",
    zero_stage=2,
    world_size=4,
    device="H200",
    torch="2.13.0",
    deepspeed="0.19.8",
    transformers="5.24",
    ds_hilore="0.1",
)
RATES = {"Layer": UnitRates(state_bytes=Rate(40.0, 1.0), replay_s=Rate(1.0, 1e-3))}
ASKED = (Shape(2, 100), Shape(7, 31), Shape(1, 4096))


def measured() -> Measurements:
    seen = Measurements(RATES)
    seen.risk = lambda unit, treatment: 0.5
    for length in (100, 160, 900):
        shape = Shape(2, length)
        state = 45 * shape.tokens + 2 * shape.tokens * length
        seen.note_forward(
            [
                UnitFootprint(UnitId("layers.0"), "Layer", shape, 8 * shape.tokens, 8 * shape.tokens + state),
                UnitFootprint(UnitId("layers.1"), "Layer", shape, 8 * shape.tokens),
                UnitFootprint(UnitId("vision", 1), "Block", Shape(4, 50), 999),
            ]
        )
        seen.replay_receiver(UnitId("layers.1"))(1e-5 * shape.tokens)
        seen.note_seconds(UnitId("layers.0"), "H", shape, 1e-5 * shape.tokens, 2e-5 * shape.tokens)
        seen.note_seconds(UnitId("layers.1"), "R", shape, 1e-5 * shape.tokens, 4e-5 * shape.tokens)
        parts = seen.fits_of("Layer").parts
        parts.operator("attention").held.note(shape, 4 * shape.tokens)
        parts.operator("attention").seconds.note(shape, 1e-9 * shape.tokens * length)
        parts.group("mlp").note(shape, 24 * shape.tokens)
        for codec, held in (("bf16", 12), ("int8", 7)):
            fits = parts.codec("mlp", codec)
            fits.held.note(shape, held * shape.tokens)
            fits.encode.note(shape, 1e-8 * shape.tokens)
            fits.decode.note(shape, 1e-8 * shape.tokens)
            fits.note_error(0.01)
    seen.risk = lambda unit, treatment: 0.5
    seen.strike("Block", "H", "slower than R")
    return seen


BASELINE = StoredBaseline(
    peak_bytes=10**9, device_bytes=10**11, phases=[StoredPhase(segments=2, length=100, forward=5, loss=6, backward=7)]
)


def store(folder: Path, fingerprint: Fingerprint = HERE, rank_class: str = "all") -> ProfileStore:
    return ProfileStore(str(folder), fingerprint, rank_class)


def path_of(made: ProfileStore) -> Path:
    assert made.path is not None
    return made.path


@pytest.fixture
def saved(tmp_path: Path) -> ProfileStore:
    made = store(tmp_path)
    assert made.save(measured(), BASELINE) is None
    return made


def refused(made: ProfileStore) -> str:
    """The reason, which must stand in exactly one line."""
    found = made.load()
    assert isinstance(found, Refused) and "\n" not in str(found)
    return found.reason


# -- there and back ------------------------------------------------------------------------------------------------


def test_what_was_measured_comes_back(saved: ProfileStore) -> None:
    before, after = measured(), Measurements(RATES)
    after.risk = before.risk
    found = saved.restore(after)
    assert isinstance(found, StoredProfile) and found.baseline == BASELINE
    for shape in ASKED:
        for old, new in zip(before.profiles(shape), after.profiles(shape), strict=True):
            assert (old.unit, old.unit_class, len(old.variants)) == (new.unit, new.unit_class, len(new.variants))
            for one, other in zip(old.variants, new.variants, strict=True):
                assert (one.held_bytes, one.workspace_bytes) == (other.held_bytes, other.workspace_bytes)
                assert one.saved_seconds == pytest.approx(other.saved_seconds)
    assert after.struck == before.struck and after.relations == before.relations
    assert after.unmeasured_classes() == before.unmeasured_classes() == {"Block"}


def test_a_restored_profile_goes_on_learning(saved: ProfileStore) -> None:
    after = Measurements(RATES)
    saved.restore(after)
    shape = Shape(2, 100)
    more = 10**7
    after.note_forward([UnitFootprint(UnitId("layers.0"), "Layer", shape, 8 * shape.tokens, 8 * shape.tokens + more)])
    assert after.profiles(shape)[0].variant("R").workspace_bytes >= more
    assert [unit for unit, _ in after.roster] == [UnitId("layers.0")]


def test_no_file_is_nothing_to_speak_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert store(tmp_path).load() is None and store(tmp_path / "not" / "there").load() is None
    assert not caplog.records


def test_nothing_is_stored_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = ProfileStore(None, HERE)
    assert made.path is None and made.save(measured()) is None and made.load() is None
    assert not list(tmp_path.iterdir())


def test_a_file_is_json_and_private(saved: ProfileStore) -> None:
    content = json.loads(path_of(saved).read_text())
    assert content["format"] == 3 and content["fingerprint"]["zero_stage"] == 2
    assert stat.S_IMODE(path_of(saved).stat().st_mode) == 0o600


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of("auto") == tmp_path / "ds_hilore" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder_of("auto") == tmp_path / "home" / ".cache" / "ds_hilore" / "profiles"
    assert folder_of("~/profiles") == tmp_path / "home" / "profiles"
    assert folder_of(None) is None


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a/b\\c", "x" * 500, "", "a\0b", "\u202eabc"]
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    made = store(tmp_path, replace(HERE, model=name, trained=name), name)
    assert path_of(made).parent == tmp_path and len(path_of(made).name) < 255
    assert made.save(measured()) is None and isinstance(made.load(), StoredProfile)
    assert {found.parent for found in tmp_path.rglob("*")} <= {tmp_path}


def test_classes_of_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    one, other = store(tmp_path, rank_class="stage0"), store(tmp_path, rank_class="stage1")
    assert one.save(measured()) is None
    assert other.load() is None and isinstance(one.load(), StoredProfile)


# -- stale ---------------------------------------------------------------------------------------------------------

IN_THE_NAME = {"model", "trained", "state"}  # other ones are other files


@pytest.mark.parametrize("name", [item.name for item in fields(Fingerprint) if item.name not in IN_THE_NAME])
def test_another_setting_is_named_by_its_field(saved: ProfileStore, tmp_path: Path, name: str) -> None:
    other = replace(HERE, **{name: 99 if isinstance(getattr(HERE, name), int) else "other"})
    reason = refused(store(tmp_path, other))
    assert f"{name}: {getattr(HERE, name)} then, {getattr(other, name)} now" in reason
    assert sum(f"{item.name}: " in reason for item in fields(Fingerprint)) == 1
    assert store(tmp_path, other).save(measured()) is None, "it is rebuilt"
    assert isinstance(store(tmp_path, other).load(), StoredProfile)


def test_the_stored_fingerprint_has_every_field() -> None:
    assert set(StoredFingerprint.model_fields) == {item.name for item in fields(Fingerprint)}


# -- damaged, foreign, malicious -----------------------------------------------------------------------------------


def edited(saved: ProfileStore, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path_of(saved).read_text())
    change(content)
    path_of(saved).write_text(json.dumps(content))


def first_class(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["classes"]["Layer"]
    return found


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format": lambda c: c.update(format=2),
    "unknown key": lambda c: c.update(extra=1),
    "missing key": lambda c: c.pop("units"),
    "negative": lambda c: first_class(c)["state"]["observations"][0].update(value=-1.0),
    "infinite": lambda c: first_class(c)["state"]["observations"][0].update(value=float("inf")),
    "nan": lambda c: first_class(c)["replay"]["observations"][0].update(value=float("nan")),
    "huge": lambda c: first_class(c)["state"]["observations"][0].update(value=1e300),
    "huge integer": lambda c: first_class(c)["state"].update(count=10**400),
    "no tokens": lambda c: first_class(c)["state"]["observations"][0].update(tokens=0),
    "text for a number": lambda c: first_class(c)["state"]["observations"][0].update(value="7"),
    "count without observations": lambda c: first_class(c)["state"].update(observations=[]),
    "observations without count": lambda c: first_class(c)["state"].update(count=0),
    "long list": lambda c: first_class(c)["state"].update(observations=first_class(c)["state"]["observations"] * 1000),
    "long text": lambda c: c["units"][0].update(name="x" * 10_000),
    "unknown class": lambda c: c["units"][0].update(unit_class="Other"),
    "a unit twice": lambda c: c["units"].append(c["units"][0]),
    "share": lambda c: c["units"][0].update(share=0),
    "baseline": lambda c: c["baseline"].update(peak_bytes=1.5),
    "no phases": lambda c: c["baseline"].update(phases=[]),
    "a list for an object": lambda c: c.update(classes=[]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_damaged_field_is_refused(saved: ProfileStore, kind: str) -> None:
    edited(saved, CHANGES[kind])
    assert "is damaged or of another version" in refused(saved)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\x00\xff\xfe",
        b"\x80\x04\x95\x00.",  # a pickle
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"format": 3, "format": 3}',
        b'{"format": ' + b"9" * 100_000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_profile_is_refused(saved: ProfileStore, content: bytes) -> None:
    path_of(saved).write_bytes(content)
    assert refused(saved).startswith("is ")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 0.9999])
def test_a_file_that_was_cut_short_is_refused(saved: ProfileStore, share: float) -> None:
    content = path_of(saved).read_bytes()
    path_of(saved).write_bytes(content[: int(share * len(content))])
    assert "damaged" in refused(saved)


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_byte_raises(saved: ProfileStore, place: int, byte: int) -> None:
    before = path_of(saved).read_bytes()
    content = bytearray(before)
    content[place % len(content)] = byte
    path_of(saved).write_bytes(content)
    seen = Measurements(RATES)
    seen.risk = lambda unit, treatment: 0.5
    found = saved.restore(seen)
    assert isinstance(found, Refused | StoredProfile)
    for shape in ASKED:
        seen.profiles(shape)
    path_of(saved).write_bytes(before)


def test_a_large_file_is_not_read(saved: ProfileStore) -> None:
    with path_of(saved).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert f"more than {MAX_BYTES}" in refused(saved)


def test_what_is_no_plain_file_is_not_read(saved: ProfileStore, tmp_path: Path) -> None:
    path = path_of(saved)
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    assert "cannot be read" in refused(saved)
    path.unlink()
    os.mkfifo(path)  # a reader of which would wait for ever
    assert refused(saved) == "is no plain file"
    path.unlink()
    path.mkdir()
    assert refused(saved) == "is no plain file"


def test_another_users_file_is_not_read(saved: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*real(fd)[:4], 12345, *real(fd)[5:]]))
    assert refused(saved) == "belongs to another user"


def test_a_file_cannot_write_into_the_log(
    saved: ProfileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evil = "x\nERROR all is lost\r\x1b[2J" + "y" * 300
    edited(saved, lambda content: content["fingerprint"].update(device=evil))
    with caplog.at_level(logging.WARNING):
        reason = refused(saved)
    (record,) = caplog.records
    assert all(sign.isprintable() for sign in record.getMessage())
    assert "device" in reason and len(reason) < 400 and "not used" in record.getMessage()
    edited(saved, lambda content: content.update({evil: 1}))
    assert all(sign.isprintable() for sign in refused(saved))


NUMBER = st.floats(0, 1e18) | st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e18])
POINTS = st.lists(
    st.builds(
        StoredObservation,
        tokens=st.floats(1, 1e15),
        token_lengths=st.floats(1, 1e15),
        value=NUMBER,
    ),
    min_size=1,
    max_size=30,
)
FITS = st.builds(StoredFit, count=st.integers(1, 1 << 60), observations=POINTS, floor=st.tuples(NUMBER, NUMBER, NUMBER))
SECONDS = st.builds(StoredSeconds, forward=FITS, backward=FITS)
CLASSES = st.builds(
    StoredClass,
    inputs=FITS,
    state=FITS,
    replay=FITS,
    variants=st.dictionaries(st.sampled_from(["R", "H", "R:attention", "L:mlp=bf16"]), SECONDS, max_size=3),
    parts=st.builds(
        StoredParts,
        operators=st.dictionaries(st.just("attention"), st.builds(StoredOperator, held=FITS, seconds=FITS), max_size=1),
        groups=st.dictionaries(st.sampled_from(["mlp", "residual"]), FITS, max_size=2),
        codecs=st.lists(
            st.builds(
                StoredCodec,
                group=st.sampled_from(["mlp", "residual", "no such group"]),
                codec=st.sampled_from(["bf16", "int8"]),
                held=FITS,
                encode=FITS,
                decode=FITS,
                squares=st.floats(0, 1e18),
                count=st.integers(0, 1 << 40),
            ),
            max_size=3,
        ),
    ),
)


@given(CLASSES, st.floats(1e-9, 1e9), st.none() | st.integers(1, 1 << 40))
@settings(max_examples=100, deadline=None)
def test_any_file_that_passes_gives_profiles_that_a_planner_can_read(
    stored: StoredClass, share: float, length: int | None
) -> None:
    """Nonsense within bounds is nonsense, but finite, whole and not negative."""
    unit = StoredUnit(name="u", call=0, unit_class="Layer", share=share, length=length)
    profile = StoredProfile(
        format=3, fingerprint=StoredProfile.of(measured(), HERE).fingerprint, units=[unit], classes={"Layer": stored}
    )
    again = StoredProfile.model_validate_json(profile.model_dump_json())
    seen = Measurements(RATES)
    seen.risk = lambda unit, treatment: 0.5
    again.into(seen)
    for shape in ASKED:
        for variant in seen.profiles(shape)[0].variants:
            assert variant.held_bytes >= 0 and variant.workspace_bytes >= 0
            assert abs(variant.saved_seconds) < float("inf")


# -- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("step", ["mkstemp", "fsync", "replace"])
def test_a_folder_that_cannot_be_written_is_a_warning(
    saved: ProfileStore, code: int, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = path_of(saved).read_bytes()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile if step == "mkstemp" else os, step, fail)
    with caplog.at_level(logging.WARNING):
        found = saved.save(measured())
    monkeypatch.undo()
    assert isinstance(found, Refused) and os.strerror(code) in found.reason
    (record,) = caplog.records
    assert "not stored" in record.getMessage()
    assert path_of(saved).read_bytes() == before, "the old file stays whole"
    assert [item.name for item in path_of(saved).parent.iterdir()] == [path_of(saved).name], "nothing is left behind"


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = store(tmp_path / "file")
    assert isinstance(made.save(measured()), Refused)
    assert "cannot be read" in refused(made)


@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert isinstance(store(tmp_path).save(measured()), Refused)
    finally:
        tmp_path.chmod(0o700)


def test_a_path_that_is_none(tmp_path: Path) -> None:
    made = ProfileStore("a\0b", HERE)
    assert isinstance(made.save(measured()), Refused)
    assert isinstance(made.load(), Refused)


def test_a_reader_never_sees_half_a_file(saved: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content is complete, under another name, before it takes the old one's place."""
    seen = []
    real = os.replace

    def watch(source: str, target: Path) -> None:
        seen.append(StoredProfile.model_validate_json(Path(source).read_bytes()).format)
        assert isinstance(saved.load(), StoredProfile)
        real(source, target)

    monkeypatch.setattr(os, "replace", watch)
    assert saved.save(measured()) is None and seen == [3]
