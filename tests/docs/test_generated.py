"""Generated parts of the pages are up to date, and the configuration reference says what the model does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from docs import generate
from docs.figures import tradeoff
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import ConfigError
from tests.docs.pages import DOCS, Page

REFERENCE = Page(DOCS / "configuration.md")


def test_nothing_is_out_of_date() -> None:
    names = [path.relative_to(DOCS).as_posix() for path in generate.outdated()]
    assert not names, f"run `{generate.COMMAND}` and commit {', '.join(names)}"


def test_an_edit_in_a_generated_part_would_be_seen() -> None:
    changed = REFERENCE.text.replace("Default `0.01`", "Default `0.02`")
    assert changed != REFERENCE.text
    assert generate.renewed(changed) == generate.renewed(REFERENCE.text) != changed


def test_every_part_stands_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in generate.pages())
    assert {name for name in generate.PARTS if f"<!-- generated: {name} -->" in text} == set(generate.PARTS)


def keys(block: Any, prefix: str = "") -> Iterator[str]:
    """Of the block as a user would write it, inner ones with their path."""
    for key, value in block.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def reference() -> dict[str, tuple[Any, str]]:
    """Key -> default and what is allowed, as the page says them."""
    parts = re.findall(r"^### `([\w.]+)`\n(.*?)(?=^#|<!--)", REFERENCE.text, re.MULTILINE | re.DOTALL)
    found = {}
    for key, text in parts:
        said = re.search(r"^Default `(.*?)`\. Allowed: (.*)\.$", text, re.MULTILINE)
        assert said is not None, f"{key} has no default on the page"
        found[key] = json.loads(said[1]), said[2]
    return found


def parsed(key: str, value: Any) -> HiLoReConfig:
    """The block with one key set."""
    *outer, last = key.split(".")
    block: Any = {last: value}
    for name in reversed(outer):
        block = {name: block}
    config = HiLoReConfig.from_ds_json({"hilore": block})
    assert config is not None
    return config


def test_every_key_is_there() -> None:
    assert list(reference()) and set(reference()) == set(keys(HiLoReConfig().fingerprint()))


@pytest.mark.parametrize("key", reference())
def test_defaults_can_be_written_as_they_stand(key: str) -> None:
    assert parsed(key, reference()[key][0]) == HiLoReConfig()


@pytest.mark.parametrize("key", [key for key, (_, allowed) in reference().items() if "number" in allowed])
def test_bounds_are_those_of_the_model(key: str) -> None:
    default, allowed = reference()[key]
    bounds = re.findall(r"(above|at least|below|at most) ([\d.]+)", allowed)
    assert bounds or key == "memory_budget"
    step = 1 if isinstance(default, int) else 1e-6
    for word, text in bounds if key != "memory_budget" else []:
        bound = type(default)(float(text))
        outside = {"above": bound, "below": bound, "at least": bound - step, "at most": bound + step}[word]
        inside = {"above": bound + step, "below": bound - step, "at least": bound, "at most": bound}[word]
        parsed(key, inside)
        with pytest.raises(ConfigError):
            parsed(key, outside)


def test_the_figure_of_budgets_reads_the_readme() -> None:
    found = tradeoff.read(generate.measured())
    assert found.checkpointing.peak_mb < found.planned[0].peak_mb < found.none.peak_mb
    assert len(found.planned) == len(found.best_k) >= 3
    for point in found.planned:
        row = next(line for line in generate.measured().splitlines() if line.startswith(f"| {point.name} = "))
        assert f"{point.peak_mb:,.0f} MB | {point.time:.3f} " in row


def test_a_readme_without_the_table_is_named() -> None:
    with pytest.raises(ValueError, match="has no table"):
        tradeoff.read("nothing is measured")
