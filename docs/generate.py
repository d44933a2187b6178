"""Writes the generated parts of these pages: python -m docs.generate (--check: only says what is out of date).

A part stands between two comments of its page, and its text comes from the one place that knows: the configuration
model, the error tree, the list of limits, the README's measurements. Figures are drawn by figures/draw.py.

    <!-- generated: NAME -->
    <!-- end of NAME -->
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from docs.figures import draw, tradeoff
from ds_hilore.core import config as settings
from ds_hilore.core import deps, errors
from ds_hilore.core.budget import ALLOWED as BUDGETS
from ds_hilore.core.host_rules import CHECKPOINTING_BLOCK, SUPERSEDED
from ds_hilore.core.limits import known_limits

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
COMMAND = "python -m docs.generate"

# ------------------------------------------------------------------------------------------------ configuration


def configuration() -> str:
    """Every key of the block: default, what is allowed, meaning."""
    block = settings.HiLoReConfig
    defaults = json.dumps({settings.BLOCK: block().fingerprint()}, indent=2)
    return "\n".join(["All keys with their defaults:", "", "```json", defaults, "```", "", *_keys(block)])


def _keys(block: type[settings.Block]) -> Iterator[str]:
    """The block's own keys, then its inner blocks under a heading each."""
    inner: list[tuple[str, type[settings.Block]]] = []
    for name, info in block.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, settings.Block):
            inner.append((name, kind))
            continue
        path = f"{block.where}.{name}".removeprefix(f"{settings.BLOCK}.")
        default = json.dumps(block().model_dump(mode="json")[name])
        yield f"### `{path}`\n"
        yield f"{info.description}\n"
        yield f"Default `{default}`. Allowed: {_allowed(block, name, info)}.\n"
    for _, kind in inner:
        yield f"## `{kind.where.removeprefix(f'{settings.BLOCK}.')}`\n"
        yield f"{(kind.__doc__ or '').strip()}\n"
        yield from _keys(kind)


def _allowed(block: type[settings.Block], name: str, info: FieldInfo) -> str:
    if info.annotation is settings.MemoryBudget:
        return 'bytes per node ("64GB", "512MB", 64000000000), "auto" or "free", or `0` for none'
    if name == "codecs":
        from ds_hilore.codecs.registry import codec_names

        return f"a list of {_quoted(codec_names())}"
    return _words(block, name, info.annotation, info)


def _words(block: type[settings.Block], name: str, kind: Any, info: FieldInfo) -> str:
    """A type with its bounds, in the words of JSON."""
    if settings.MemoryBudget in get_args(kind):
        return BUDGETS
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _quoted(member.value for member in kind if _accepts(block, name, member.value))
    if get_origin(kind) is Literal:
        return _quoted(get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {_words(block, name, get_args(kind)[0], info)}"
    if get_args(kind):
        return " or ".join(_words(block, name, each, info) for each in get_args(kind))
    plain = {bool: "`true`, `false`", int: "a whole number", float: "a number", str: "text", NoneType: "`null`"}
    return plain[kind] + (_bounds(info) if kind in (int, float) else "")


def _bounds(info: FieldInfo) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = [(words[key], getattr(bound, key)) for bound in info.metadata for key in words if hasattr(bound, key)]
    return "".join(f", {word} {value}" for word, value in found)


def _accepts(block: type[settings.Block], name: str, value: Any) -> bool:
    """Whether the model takes it: members of an enum may be for other purposes."""
    try:
        block(**{name: value})
    except errors.ConfigError:
        return False
    return True


def _quoted(values: Any) -> str:
    return ", ".join(f'`"{value}"`' for value in values)


# ------------------------------------------------------------------------------------------------ tables


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def error_tree() -> list[type[errors.HiLoReError]]:
    """Every error of the package, in the order in which core/errors.py has them."""
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    return [each for each in found if issubclass(each, errors.HiLoReError) and each is not errors.HiLoReError]


def error_table() -> str:
    """What each error means, and which built-in one catches it too."""

    def kind(error: type[errors.HiLoReError]) -> str:
        built_in = next(each for each in error.__mro__ if each.__module__ == "builtins")
        return f"`{built_in.__name__}`"

    rows = [(f"`{e.__name__}`", kind(e), " ".join((e.__doc__ or "").split())) for e in error_tree()]
    return _table(("error", "is also a", "meaning"), rows)


def limit_table() -> str:
    """What `hilore doctor` lists."""
    return _table(("not supported", "instead"), [(limit.what, limit.way_out) for limit in known_limits()])


def superseded_table() -> str:
    """What becomes of DeepSpeed's own block."""
    rows = [(f"`{CHECKPOINTING_BLOCK}.{key}`", effect) for key, effect in SUPERSEDED.items()]
    return _table(("key", "beside a `hilore` block"), rows)


def version_table() -> str:
    """Oldest supported versions, with reasons."""
    python = ("`python`", deps.PYTHON_FLOOR, "")
    rows = [(f"`{floor.package}`", floor.version or "any", floor.why) for floor in deps.REQUIRED]
    return _table(("package", "oldest", "because"), [python, *rows])


# ------------------------------------------------------------------------------------------------ measurements

_MEASURED = "## Measured\n"


def measured() -> str:
    """The README's section of measurements: figures are kept in one place.

    Raises:
        ValueError: the README has no such section.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, found, rest = readme.partition(f"\n{_MEASURED}")
    if not found:
        raise ValueError(f"README.md has no section {_MEASURED.strip()!r}: docs/results.md is made from it")
    section = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return section.strip().replace("](docs/", "](")


# ------------------------------------------------------------------------------------------------ reliability


def reliability() -> str:
    """Figures of the fault suite, which CI holds to what happens."""
    from tests.faults import table  # brings torch along

    return table.summary()


def fault_table() -> str:
    """Every fault of the suite, and what becomes of the update."""
    from tests.faults import table

    return table.faults()


PARTS: Mapping[str, Callable[[], str]] = {
    "configuration": configuration,
    "errors": error_table,
    "faults": fault_table,
    "limits": limit_table,
    "measured": measured,
    "reliability": reliability,
    "superseded": superseded_table,
    "versions": version_table,
}

_PART = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


# ------------------------------------------------------------------------------------------------ files


def pages() -> list[Path]:
    """Every page, in the order of their paths."""
    return sorted(DOCS.rglob("*.md"))


def renewed(text: str) -> str:
    """A page with its generated parts made again."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]()}\n\n{part[3]}", text)


def figures() -> dict[Path, str]:
    """Every figure as it should be."""
    drawn = draw.figures() | {"tradeoff.svg": tradeoff.tradeoff(measured())}
    return {DOCS / "figures" / name: svg for name, svg in drawn.items()}


def outdated() -> dict[Path, str]:
    """What the files that are out of date should hold."""
    wanted = {page: renewed(page.read_text(encoding="utf-8")) for page in pages()} | figures()
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text}


def main() -> int:
    """Exit code 1: `--check` found something."""
    parser = argparse.ArgumentParser(description="Writes the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a part is out of date")
    check = parser.parse_args().check
    found = outdated()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
