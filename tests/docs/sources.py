"""What the code has that a page may name: options, strings, names. Read from the sources, nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.ranks import ROOT

PACKAGE = ROOT / "ds_hilore"

#: What stands for a value in a string that is filled in when it is used.
VALUE = "\x00"

#: Characters that a message has beside its values, for a line to be recognised as this one.
LEAST_TELLING = 20


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def options(path: Path) -> set[str]:
    """Options that a file gives to its argument parsers."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {name for name in names if str(name).startswith("-")}
    return found


def module_file(name: str) -> Path | None:
    """The file that `python -m NAME` runs, if NAME is a module of this checkout."""
    path = ROOT.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py")
    return next((each for each in candidates if each.exists()), None)


@cache
def messages() -> tuple[str, ...]:
    """Every string of the package, joined where the source joins it; `VALUE` where one is filled in."""
    return tuple(text for path in sorted(PACKAGE.rglob("*.py")) for text in _strings(tree(path)))


def _strings(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in child.values)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield re.sub(r"%(?:\.\d)?[sdgf]", VALUE, child.value)


def says(line: str) -> bool:
    """Whether the package can say a line. `...` in it stands for anything; figures in it for a value."""
    words = " ".join(line.split()).removeprefix("hilore: ")  # the log's prefix, which a message may have of its own
    if "..." in words:
        parts = [part.strip(" :();,") for part in words.split("...") if part.strip(" :();,")]
        return all(any(part in text for text in messages()) for part in parts)
    return any(words in text for text in messages()) or any(pattern.fullmatch(words) for pattern in _patterns())


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    """Of messages that say something of their own around their values."""
    texts = (" ".join(text.removeprefix("hilore: ").split()) for text in messages() if VALUE in text)
    telling = (text for text in texts if len(text.replace(VALUE, "")) >= LEAST_TELLING)
    return tuple(re.compile(".+?".join(map(re.escape, text.split(VALUE)))) for text in telling)


def names_in(file: Path) -> set[str]:
    """Names that a module defines, imports, or gives out by their string (`__getattr__`)."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found
