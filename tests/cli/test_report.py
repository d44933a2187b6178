"""`hilore report`: what it writes, its exit codes, and what it says where there is nothing to read."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from ds_hilore.cli.main import main
from ds_hilore.core import deps
from ds_hilore.report import publish as publishing
from ds_hilore.report.drawing import Drawn
from tests.report.logs import GB, Story


@pytest.fixture(autouse=True)
def _quick() -> object:
    """Drawing itself is for tests/report."""
    with mock.patch.object(publishing, "drawn", lambda draw: Drawn(b"<svg/>", b"<svg/>", b"png")) as patched:
        yield patched


def test_the_page_and_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Story(world=2).write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "less than with every layer replayed" in said and f"{tmp_path / 'report.html'} and 9 pictures" in said
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert len(list((tmp_path / "report-pictures").iterdir())) == 9
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists() and (tmp_path / "new" / "page-pictures").is_dir()


def test_figures_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(world=64, updates=30)
    story.write(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world"], found["updates"], found["budget_bytes"]) == (64, 30, 12 * GB)
    assert not list(tmp_path.glob("*.html")), "no page was asked for"


@pytest.mark.parametrize("arguments", [["report", "missing"], ["report", "empty"], ["report"]])
def test_nothing_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if len(arguments) == 1:
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 2
        return
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and '"report": {"path": FOLDER}' in said.err and "Traceback" not in said.err


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Story().write(tmp_path)
    monkeypatch.setattr(deps, "has", lambda module: module != "matplotlib")
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'ds_hilore[report]'" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--json"]) == 0, "figures need no drawing"
