"""Files, commands, options, settings, functions, errors and messages that the README and docs/ name exist."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

import ds_hilore
from ds_hilore.core import errors
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.runtime.controller import Controller
from tests.docs.pages import DOCS, Page, all_pages
from tests.docs.sources import module_file, names_in, options, says
from tests.ranks import ROOT
from tests.test_layering import LEVEL

#: Folders of the checkout, and rooms of the package, under which a page may name a file.
FOLDERS = ("launch", "configs", "docs", "tests", "benchmarks", "examples", "ds_hilore", *LEVEL)
_PATH = re.compile(rf"(?<![\w./~<-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")

#: Options of programs that are not ours.
FOREIGN = {
    "accelerate": {"--use_deepspeed", "--deepspeed_config_file", "--num_processes", "--num_machines"},
    "deepspeed": {"--num_gpus", "--module", "--hostfile"},
    "sbatch": {"--nodes", "--ntasks-per-node", "--gpus-per-node"},
    "srun": {"--mpi"},
    "pip": {"--no-deps"},
    "transformers": {"--output_dir", "--use_cpu", "--bf16", "--max_steps"},
    "any script of a user": {"--deepspeed", "--deepspeed_config"},
}

everywhere = pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.name)


# ------------------------------------------------------------------------------------------------ files


@everywhere
def test_files_exist(page: Page) -> None:
    named = [path for line in page.code for path in _PATH.findall(line)]
    missing = [path for path in named if not (ROOT / path).exists() and not (ROOT / "ds_hilore" / path).exists()]
    assert not missing


@everywhere
def test_launch_scripts_can_be_started(page: Page) -> None:
    scripts = [path for line in page.code for path in re.findall(r"launch/\w+\.sh", line)]
    assert not [path for path in scripts if not os.access(ROOT / path, os.X_OK)]


@everywhere
def test_variables_of_launch_scripts_exist(page: Page) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "launch").glob("*.sh"))
    named = {span.split("=")[0] for span in page.spans if re.fullmatch(r"[A-Z]+_?[A-Z]+(=\S*)?", span)}
    assert not {name for name in named if not re.search(rf"\b{name}\b", sources)}


# ------------------------------------------------------------------------------------------------ commands


def hilore_help(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    from ds_hilore.cli.main import main

    with pytest.raises(SystemExit) as done:
        main([*command.split(), "--help"])
    assert done.value.code == 0, f"there is no `hilore {command}`"
    return capsys.readouterr().out


def flags(command: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", command))


@everywhere
def test_hilore_commands_exist(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    for command in page.commands:
        found = re.match(r"hilore ([a-z]+)\b", command)
        if found:
            known = flags(hilore_help(found[1], capsys))
            assert flags(command) <= known, command


@everywhere
def test_modules_that_are_run_exist_with_their_options(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    for command in page.commands:
        found = re.search(r"(?:python|deepspeed .*?) (?:-m|--module) ([\w.]+)(.*)", command)
        if found:
            file = module_file(found[1])
            assert file is not None, f"{command}: there is no module {found[1]}"
            ours = found[1] == "ds_hilore.cli.main"  # `hilore` under a launcher
            known = flags(hilore_help(found[2].split()[0], capsys)) if ours else options(file)
            assert flags(found[2]) <= known | FOREIGN["any script of a user"], command


@everywhere
def test_every_option_is_known(page: Page) -> None:
    folders = (ROOT / "ds_hilore" / "cli", ROOT / "benchmarks", ROOT / "examples", DOCS)
    known = {option for folder in folders for path in folder.rglob("*.py") for option in options(path)}
    named = {flag for line in page.code if not line.lstrip().startswith("//") for flag in flags(line)}
    assert not named - known - {option for program in FOREIGN.values() for option in program} - {"--help"}


# ------------------------------------------------------------------------------------------------ settings


def json_blocks(page: Page) -> Iterator[dict[str, Any]]:
    for block in page.blocks:
        if block.language == "json":
            yield json.loads(block.text)


@everywhere
def test_settings_are_accepted(page: Page) -> None:
    for settings in json_blocks(page):
        assert HiLoReConfig.from_ds_json(settings) is not None


@everywhere
def test_keys_in_sentences_exist(page: Page) -> None:
    """`"key": value` as a span: of our block, or of one that the page shows around it."""
    known = set(HiLoReConfig.model_fields) | {"hilore"}
    for span in page.spans:
        found = re.match(r'"(\w+)":', span)
        if found:
            assert found[1] in known, span
            block = json.loads("{" + span + "}")
            HiLoReConfig.from_ds_json(block if found[1] == "hilore" else {"hilore": block})


# ------------------------------------------------------------------------------------------------ code


def python_blocks(page: Page) -> list[ast.Module]:
    return [ast.parse(block.text) for block in page.blocks if block.language == "python"]


@everywhere
def test_imports_of_ours_exist(page: Page) -> None:
    for code in python_blocks(page):
        for node in ast.walk(code):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ds_hilore":
                file = module_file(node.module or "")
                assert file is not None, f"there is no module {node.module}"
                for alias in node.names:  # lazy ones are strings of their module: hasattr would import their host
                    assert alias.name in names_in(file), f"{node.module} has no {alias.name}"


@everywhere
def test_calls_of_ours_fit(page: Page) -> None:
    """Arguments of every `ds_hilore.NAME(...)` bind to its parameters."""
    for code in python_blocks(page):
        for node in ast.walk(code):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "ds_hilore":
                    function = getattr(ds_hilore, node.func.attr)
                    keywords = {keyword.arg or "": None for keyword in node.keywords}
                    inspect.signature(function).bind(*[None] * len(node.args), **keywords)


@everywhere
def test_names_of_ours_exist(page: Page) -> None:
    for line in page.spans:
        for name in re.findall(r"\bds_hilore((?:\.\w+)+)", line):
            owner: Any = ds_hilore
            path = "ds_hilore"
            for part in name[1:].split("."):
                path += f".{part}"
                # a public name, or a module that was not imported yet
                owner = getattr(owner, part) if hasattr(owner, part) else importlib.import_module(path)
        for name in re.findall(r"\bengine\.hilore\.(\w+)", line):
            assert hasattr(Controller, name) or f"self.{name}" in inspect.getsource(Controller), line


@everywhere
def test_errors_exist(page: Page) -> None:
    """Every span that looks like a class of errors is one."""
    for span in page.spans:
        if re.fullmatch(r"[A-Z]\w+(Error|Mismatch|Missing|Exhausted|Changed)", span):
            assert hasattr(errors, span) or hasattr(builtins, span), span


# ------------------------------------------------------------------------------------------------ messages


def quoted_messages(page: Page) -> Iterator[str]:
    """Lines of the log, first cells of tables of what a log or a warning says, and quotes with a gap in them."""
    for block in page.blocks:
        if not block.language and block.text.startswith("hilore: "):
            yield block.text
    for table in re.findall(r"^\| (?:the log|warning) says .*\n\|.*\n((?:\|.*\n)+)", page.text, re.MULTILINE):
        for row in table.splitlines():
            yield row.split("|")[1].strip()
    yield from re.findall(r'(?<!`)"([^"`]*\.\.\.[^"`]*)"', page.text)


@everywhere
def test_messages_are_those_of_the_code(page: Page) -> None:
    assert not [message for message in quoted_messages(page) if not says(message)]


def test_troubleshooting_and_mpi_quote_messages() -> None:
    quoted = {page.name: len(list(quoted_messages(page))) for page in all_pages()}
    assert quoted["docs/troubleshooting.md"] >= 6 and quoted["docs/start/mpi.md"] == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("recomputation is ... of the update", True),
        ("recomputation was ... of the update", False),
        (
            "hilore: gradient accumulation is 2 in the DeepSpeed JSON and 4 in the script; the script's is in force",
            True,
        ),
        ("hilore: gradient accumulation is 2 in the DeepSpeed JSON", False),
    ],
)
def test_what_counts_as_said(line: str, said: bool) -> None:
    assert says(line) == said
