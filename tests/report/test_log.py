"""The log of a run, written and read again: cut short, damaged, of several runs, with ranks missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.report import writing
from ds_hilore.report.reading import read_run
from ds_hilore.report.records import AuditRecord, UnitsRecord, UpdateRecord, file_of, line_of, parse, rank_of
from ds_hilore.report.writing import LogFile
from tests.report.logs import GB, Story


def test_what_is_written_is_read(tmp_path: Path) -> None:
    story = Story(world=3, updates=12)
    run = read_run(story.write(tmp_path))
    assert [log.rank for log in run.ranks] == [0, 1, 2] and run.missing == ()
    assert (run.damaged, run.earlier) == (0, 0)
    for log in run.ranks:
        assert log.run == story.begin(log.rank)
        assert log.numbers().tolist() == list(range(12))
        assert log.units == [f"model.layers.{place}" for place in range(6)]
        assert log.actions == [((story.letters(log.rank, update), 2),) for update in range(12)]
        assert np.isnan(log.column("seconds")[0]) and log.column("seconds")[1:].tolist() == [2.0] * 11
        assert np.isnan(log.column("budget_bytes")[:2]).all() and log.column("budget_bytes")[2] == 12 * GB
        assert log.totals.updates == 12 and log.totals.peak_bytes == 10 * GB + log.rank
        assert [event.unit for event in log.shortages] == ["model.layers.3"]
        assert log.prospect is not None and len(log.trials) == 1
    assert [(audit.update, audit.measured) for audit in run.audits] == [(10, 0.005)], "once, not once per rank"


def test_a_last_line_that_is_cut_short(tmp_path: Path) -> None:
    path = file_of(Story(updates=8).write(tmp_path), 0)
    whole = path.read_bytes()
    for cut in (1, 2, 30, 200):
        path.write_bytes(whole[:-cut])
        run = read_run(tmp_path)
        # without its end alone, a line is whole
        assert (len(run.first.updates), run.damaged) == ((8, 0) if cut == 1 else (7, 1)), cut


def test_a_run_that_follows_one_that_was_killed(tmp_path: Path) -> None:
    path = file_of(Story(updates=8).write(tmp_path), 0)
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(Story(run="second", started_s=2_000_000.0, updates=3).write(tmp_path))
    assert (run.first.run.run, len(run.first.updates)) == ("second", 3)
    assert (run.damaged, run.earlier) == (0, 1), "what the first lost is not the second's"


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b"null",
        b"{}",
        b'{"kind": "update"}',
        b'{"kind": "update", "update": -1, "stage": "planned"}',
        b'{"kind": "update", "update": 3, "stage": "planned", "seconds": NaN}',
        b'{"kind": "update", "update": 3, "stage": "planned", "seconds": "2"}',
        b'{"kind": "update", "update": 3, "stage": "planned", "budget_bytes": 1e300}',
        b'{"kind": "update", "update": 2, "stage": "planned"}',  # a number that was there already
        b'{"kind": "nothing", "update": 3}',
        b"[" * 100_000,
        b'{"kind": "update", "stage": "' + b"x" * (2 << 20) + b'"}',  # longer than any line
        b"\xff\xfe\x00",
    ],
    ids=lambda line: repr(line[:60]),
)
def test_a_damaged_line_is_counted_and_passed_over(tmp_path: Path, line: bytes) -> None:
    path = file_of(Story(updates=3).write(tmp_path), 0)
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.write(line_of(UpdateRecord(update=5, stage="planned")))
    run = read_run(tmp_path)
    assert run.first.numbers().tolist() == [0, 1, 2, 5] and run.damaged == 1


def test_what_a_later_version_adds_is_passed_over() -> None:
    line = b'{"kind": "audit", "update": 3, "predicted": 0.1, "measured": 0.2, "mood": "good"}'
    assert parse(line) == AuditRecord(update=3, predicted=0.1, measured=0.2)


def test_logs_of_another_version_are_not_read(tmp_path: Path) -> None:
    path = file_of(Story().write(tmp_path), 0)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(UsageError, match="another version"):
        read_run(tmp_path)


def test_ranks_that_left_no_log(tmp_path: Path) -> None:
    run = read_run(Story(world=8).write(tmp_path, ranks=[1, 2, 7]))
    assert [log.rank for log in run.ranks] == [1, 2, 7] and run.missing == (0, 3, 4, 5, 6)


def test_a_rank_whose_log_is_of_an_earlier_run_is_missing(tmp_path: Path) -> None:
    Story(world=2).write(tmp_path)
    run = read_run(Story(run="second", world=2, started_s=2_000_000.0).write(tmp_path, ranks=[0]))
    assert [log.rank for log in run.ranks] == [0] and run.missing == (1,) and run.earlier == 1


def test_a_log_under_another_ranks_name_is_not_believed(tmp_path: Path) -> None:
    Story(world=2).write(tmp_path, ranks=[0])
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 0).read_bytes())
    assert read_run(tmp_path).missing == (1,)


def test_names_of_units_that_were_lost(tmp_path: Path) -> None:
    Story(updates=2).write(tmp_path)
    with file_of(tmp_path, 0).open("ab") as file:
        file.write(line_of(UnitsRecord(first=8, names=("late",))))
    assert read_run(tmp_path).first.units[5:] == ["model.layers.5", "", "", "late"]


# ------------------------------------------------------------------------------------------------ nothing to read


def test_folders_with_nothing_in_them(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "rank-0.jsonl").write_text("{}")
    (tmp_path / "file").write_text("")
    for name, said in {
        "none": "is no folder",
        "file": "is no folder",
        "empty": "holds no log",
        "foreign": "holds no log",
    }.items():
        with pytest.raises(UsageError, match=said) as caught:
            read_run(tmp_path / name)
        assert '"report": {"path": FOLDER}' in str(caught.value)


def test_a_run_without_updates(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="first update"):
        read_run(Story(updates=0).write(tmp_path))


def test_something_else_than_a_file_does_not_hold_the_reader_up(tmp_path: Path) -> None:
    os.mkfifo(file_of(tmp_path, 0))
    with pytest.raises(UsageError, match="no plain file"):
        read_run(tmp_path)
    run = read_run(Story(world=2).write(tmp_path, ranks=[1]))
    assert run.missing == (0,) and len(run.unreadable) == 1 and "no plain file" in run.unreadable[0]


@pytest.mark.parametrize("name", ["rank-1.jsonl", "rank-00001.json", "rank-00001.jsonl.tmp", "xrank-00001.jsonl"])
def test_names_that_are_no_logs(name: str) -> None:
    assert rank_of(Path(name)) is None
    assert rank_of(file_of(Path("x"), 12)) == 12


# ------------------------------------------------------------------------------------------------ writing


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    file_of(tmp_path, 0).symlink_to(target)
    with pytest.raises(OSError):
        LogFile(tmp_path, 0)
    assert target.read_text() == "mine"


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(file_of(tmp_path, 0))
    with pytest.raises(OSError):
        LogFile(tmp_path, 0)


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    file = LogFile(tmp_path, 0)
    story = Story()
    half_written = mock.patch.object(os, "write", lambda descriptor, content: len(content) // 2)
    with half_written, pytest.raises(OSError) as caught:
        file.append([story.begin(0)])
    assert caught.value.errno == errno.ENOSPC


def test_a_file_grows_no_further_than_its_limit(tmp_path: Path) -> None:
    story = Story()
    with mock.patch.object(writing, "MOST_BYTES", 2_000):
        file = LogFile(tmp_path, 0)
        file.append([story.begin(0)])
        with pytest.raises(OSError) as caught:
            for update in range(50):
                file.append([story.update(0, update)])
    assert caught.value.errno == errno.EFBIG
    assert file.path.stat().st_size <= 2_000
    assert len(read_run(tmp_path).first.updates) >= 1


def test_a_line_is_a_few_hundred_bytes() -> None:
    """As the configuration page says."""
    assert len(line_of(Story(units=36, world=64).update(10, 10))) < 600
