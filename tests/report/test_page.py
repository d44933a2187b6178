"""The page: complete for any run, loads nothing, and cannot be written into by a log. In a real browser, too."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.report import publish as publishing
from ds_hilore.report.digest import Digest
from ds_hilore.report.drawing import Drawn
from ds_hilore.report.page import page as page_of
from ds_hilore.report.pictures import pictures
from ds_hilore.report.publish import publish
from ds_hilore.report.reading import read_run
from ds_hilore.report.records import UnitsRecord, UpdateRecord
from ds_hilore.report.summary import summarise
from ds_hilore.report.writing import LogFile
from tests.report.browser import chromium, opened
from tests.report.logs import GB, Story

ALL = ["memory", "units", "ranks", "units-and-ranks", "savings", "promises", "exposure", "audits", "shortages"]


class Parsed(HTMLParser):
    """Tags that are open at the end, tags and attributes that there were, text outside of styles."""

    EMPTY = frozenset({"meta", "img", "source", "br"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def published(folder: Path) -> tuple[Parsed, list[Path]]:
    run = read_run(folder)
    written = publish(run, summarise(run), folder / "report.html")
    return Parsed(written[0].read_text(encoding="utf-8")), written


def written_page(folder: Path) -> Parsed:
    """The page as it would be without any picture: what it says."""
    run = read_run(folder)
    return Parsed(page_of(run, summarise(run), [(picture, None) for picture in pictures(Digest(run))]))


def shown(folder: Path) -> dict[str, str]:
    """Every picture by name: what to look for, or why there is nothing."""
    found = pictures(Digest(read_run(folder)))
    return {each.name: each.look_for if each.draw else f"nothing: {each.instead}" for each in found}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parsed, list[Path]]:
    """Of 64 ranks: the folder, the page, all files."""
    folder = tmp_path_factory.mktemp("large")
    return folder, *published(Story(world=64, updates=300, units=36, shortages=5).write(folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parsed, list[Path]]:
    """Of one rank."""
    folder = tmp_path_factory.mktemp("small")
    return folder, *published(Story(updates=20, shortages=5).write(folder))


@pytest.mark.parametrize("size", ["small", "large"])
def test_every_picture_is_drawn_and_says_what_to_look_for(size: str, request: pytest.FixtureRequest) -> None:
    folder, page, written = request.getfixturevalue(size)
    names = [name for name in ALL if size == "large" or "ranks" not in name]
    assert [path.stem for path in written[1:]] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000 for path in written[1:])
    assert page.open == []
    assert [facts["id"] for tag, facts in page.tags if "id" in facts] == names
    for name, look_for in shown(folder).items():
        assert len(look_for) > 40 and look_for in page.text, name
    assert written[0].stat().st_size < 6 << 20


def test_the_page_loads_and_runs_nothing(large: tuple[Path, Parsed, list[Path]]) -> None:
    page = large[1]
    policy = next(facts["content"] for _, facts in page.tags if facts.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    for tag, facts in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name, value in facts.items():
            assert not name.startswith("on")
            if name in ("src", "srcset", "href"):
                assert value is not None and value.startswith("data:image/svg+xml;base64,")


def test_a_log_cannot_write_into_the_page(tmp_path: Path) -> None:
    evil = "</td></script><script>alert(1)</script>\"' onload=x $\\frac{$ ${ \x1b[31m \u202e é 層"
    story = Story(world=1, units=2, shortages=1)
    file = LogFile(tmp_path, 0)
    begin = story.begin(0)
    file.append([begin.model_copy(update={"units": evil, "device": evil[:32], "settings": {evil: {"a": evil}}})])
    for update in range(9):
        names = [UnitsRecord(first=0, names=(evil, evil + "2"))] if update == 0 else []
        shortage = next(each for lines in story.lines(0) for each in lines if each.kind == "shortage")  # type: ignore[attr-defined]
        more = [shortage.model_copy(update={"unit": evil, "defence": evil[:32]})] if update == 6 else []
        file.append([*names, *more, story.update(0, update).model_copy(update={"stage": evil[:32]})])
    page, written = published(tmp_path)
    assert page.open == [] and not [tag for tag, _ in page.tags if tag == "script"]
    assert "<script>alert(1)</script>" in page.text, "as text"
    assert "\x1b" not in page.text and "\u202e" not in page.text
    assert {path.parent.name for path in written[1:]} == {"report-pictures"}


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    Story(world=16, updates=12).write(tmp_path, ranks=range(3, 16))
    Story(world=16, updates=7).write(tmp_path, ranks=[2])
    with (tmp_path / "rank-00004.jsonl").open("ab") as file:
        file.write(b'{"kind": "upd')
    page = written_page(tmp_path)
    for said in (
        "2 ranks of 16 left no log here (rank 0, 1)",
        "logs end at different updates, from 6 to 11",
        "1 line could not be read",
    ):
        assert said in page.text, said


def test_a_run_that_ended_before_its_first_plan(tmp_path: Path) -> None:
    Story(updates=1, error=0.0).write(tmp_path)
    said = shown(tmp_path)
    assert (
        said["savings"] == "nothing: the run ended before plans were followed: the first updates only measure and try"
    )
    assert said["audits"] == said["exposure"] and said["audits"].startswith("nothing: gradients were exact")
    assert said["shortages"].startswith("nothing: it never did")
    page, written = published(tmp_path)
    assert "before plans were followed" in page.text and [path.stem for path in written[1:]] == ["memory", "units"]


def test_peaks_that_were_not_measured(tmp_path: Path) -> None:
    Story(measured=False).write(tmp_path)
    assert "Peaks were not measured" in shown(tmp_path)["memory"]
    assert "not measured" in written_page(tmp_path).text


def test_an_update_without_units(tmp_path: Path) -> None:
    file = LogFile(tmp_path, 0)
    file.append([Story().begin(0), UpdateRecord(update=0, stage="measure_r")])
    assert shown(tmp_path)["units"].startswith("nothing: no unit of a microbatch was seen")
    page, written = published(tmp_path)
    assert page.open == [] and [path.stem for path in written[1:]] == ["memory"]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    Story(updates=3).write(tmp_path)
    run = read_run(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with mock.patch.object(publishing, "drawn", lambda draw: Drawn(b"", b"", b"")):
        for out in ("file/report.html", "folder", "x\0y.html"):
            with pytest.raises(UsageError, match="--out"):
                publish(run, summarise(run), tmp_path / out)
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_figures_of_many_ranks(tmp_path: Path) -> None:
    """The rank that saves least, and the fullest one: ranks wait for each other."""
    story = Story(world=4, updates=20, units=8)
    summary = summarise(read_run(story.write(tmp_path)))
    saved = [sum(0.1 * story.letters(rank, update).count("H") for update in range(5, 20)) for rank in range(4)]
    assert summary.saved_seconds == pytest.approx(min(saved)) == pytest.approx(saved[0])
    assert summary.saved_share == pytest.approx(saved[0] / (saved[0] + 19 * 2.0))
    assert (summary.peak_bytes, summary.budget_bytes) == (10 * GB + 3, 12 * GB)
    assert (summary.audits, summary.error_mean, summary.shortages) == (1, 0.005, 4)


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here: apt-get install chromium")
def test_in_a_browser_at_desktop_and_phone_width(large: tuple[Path, Parsed, list[Path]], tmp_path: Path) -> None:
    written = large[2]
    with opened(tmp_path / "profile") as browser:
        for width, height in ((1280, 900), (390, 844)):
            seen = browser.visit(written[0], width, height)
            assert seen.complaints == []
            assert seen.requests == [written[0].as_uri()]
            assert seen.content_width == seen.width, "nothing sticks out to the side"
            assert width - 20 < seen.width <= width
            assert len(seen.pictures) == len(ALL)
            # a picture for narrow screens, shown at nearly its own size: letters stay legible
            for natural, across in seen.pictures:
                assert natural > 0 and across / natural > 0.75, (width, natural, across)
            assert re.match(rb"\x89PNG", seen.picture)
