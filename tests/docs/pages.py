"""The README and the pages of docs/, taken apart: links, headings, code."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.ranks import ROOT

DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Block:
    """A block of code. `language` is empty where none is named."""

    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Its lines as a shell would see them: continued lines joined, comments left out."""
        joined = self.text.replace("\\\n", " ")
        return [line.split(" #")[0].strip() for line in joined.splitlines() if line.split("#")[0].strip()]


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    def _inline(self, kind: str) -> Iterator[Token]:
        for token in self._tokens:
            yield from (child for child in token.children or [] if child.type == kind)

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and images, as they are written."""
        links = [str(token.attrs["href"]) for token in self._inline("link_open")]
        return links + [str(token.attrs["src"]) for token in self._inline("image")]

    @cached_property
    def anchors(self) -> list[str]:
        """Of the headings, in order."""
        found = []
        for before, token in zip(self._tokens, self._tokens[1:]):
            if before.type == "heading_open":
                words = "".join(child.content for child in token.children or [])
                found.append(slug(words))
        return found

    @cached_property
    def spans(self) -> list[str]:
        """Code within sentences and cells."""
        return [token.content for token in self._inline("code_inline")]

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(token.info.strip(), token.content) for token in self._tokens if token.type in ("fence", "code_block")
        ]

    @cached_property
    def code(self) -> list[str]:
        """All code there is, line by line."""
        return self.spans + [line for block in self.blocks for line in block.text.splitlines()]

    @cached_property
    def commands(self) -> list[str]:
        """What could be typed: spans, and lines of blocks that are of no other language."""
        return self.spans + [line for block in self.blocks if not block.language for line in block.commands]


def slug(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading (and, for headings like ours, Git hosts too)."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def docs_pages() -> list[Page]:
    return [Page(path) for path in sorted(DOCS.rglob("*.md"))]


def all_pages() -> list[Page]:
    return [Page(ROOT / "README.md"), *docs_pages()]
