"""Links, anchors and figures of the README and docs/ lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.docs.pages import DOCS, Page, all_pages, docs_pages, slug
from tests.ranks import ROOT

PAGES = {page.path: page for page in all_pages()}


def broken(page: Page) -> list[str]:
    """What is wrong with each link of a page."""
    found = []
    for link in page.links:
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        if "://" in link:
            continue
        if not path.exists():
            found.append(f"{link}: there is no {target}")
        elif page.path.is_relative_to(DOCS) and not path.is_relative_to(DOCS):
            found.append(f"{link}: leaves docs/, so it would lead nowhere on the built pages")
        elif anchor and anchor not in PAGES[path].anchors:
            found.append(f"{link}: no heading has that anchor; known: {', '.join(PAGES[path].anchors)}")
    return found


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    assert not broken(page)


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.name)
def test_headings_have_anchors_of_their_own(page: Page) -> None:
    assert len(set(page.anchors)) == len(page.anchors)


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "page.md"
    wrong.write_text("[a](missing.md) [b](#nowhere) ![c](gone.svg)\n\n## Here\n\n[d](#here)\n")
    page = Page(wrong)
    PAGES[wrong] = page
    try:
        assert len(broken(page)) == 3
    finally:
        del PAGES[wrong]


def test_anchors_are_those_of_the_built_pages() -> None:
    assert slug("`planner.time_limit_s`") == "plannertime_limit_s"
    assert slug("Why it is exact") == "why-it-is-exact"


def test_every_page_is_in_the_menu() -> None:
    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [name for part in parts for name in files(part)]  # type: ignore[union-attr]

    menu = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(menu) == sorted(page.path.relative_to(DOCS).as_posix() for page in docs_pages())


def test_figures_are_shown_and_need_no_network() -> None:
    shown = {(page.path.parent / link).resolve() for page in docs_pages() for link in page.links}
    figures = sorted(DOCS.rglob("*.svg"))
    assert figures and set(figures) <= shown
    for figure in figures:
        root = ElementTree.parse(figure).getroot()
        kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert "title" in kinds and "desc" in kinds, f"{figure.name} says nothing to a screen reader"
        assert not {"image", "script", "style"} & set(kinds)


def test_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the docs extra is not installed: pip install 'ds_hilore[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert {page.path.relative_to(DOCS).as_posix() for page in docs_pages()} <= built
    assert not list(site.rglob("*.py"))
