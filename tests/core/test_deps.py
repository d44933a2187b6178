"""What is installed: floors, their agreement with setup.py, and the words for what is missing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hilore.core import deps
from ds_hilore.core.deps import Floor
from ds_hilore.core.errors import DependencyMissing

SETUP = Path(__file__).resolve().parents[2] / "setup.py"


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    deps.installed_version.cache_clear()
    deps.has.cache_clear()
    yield
    deps.installed_version.cache_clear()
    deps.has.cache_clear()


def setup_argument(name: str) -> object:
    calls = [node for node in ast.walk(ast.parse(SETUP.read_text("utf-8"))) if isinstance(node, ast.Call)]
    (setup_call,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "setup"]
    (value,) = [keyword.value for keyword in setup_call.keywords if keyword.arg == name]
    if isinstance(value, ast.Dict):
        return [key.value for key in value.keys if isinstance(key, ast.Constant)]
    return ast.literal_eval(value)


def test_setup_says_the_same_floors() -> None:
    assert setup_argument("install_requires") == [floor.requirement for floor in deps.REQUIRED]
    assert setup_argument("python_requires") == f">={deps.PYTHON_FLOOR}"


def test_every_extra_that_is_named_exists() -> None:
    extras = setup_argument("extras_require")
    assert isinstance(extras, list)
    assert {extra for extra, _ in deps.OPTIONAL.values()} <= set(extras)
    assert {"dev", "mpi", "demo", "docs", "megatron", "report", "triton", "trl"} == set(extras)


def test_this_machine_is_new_enough() -> None:
    deps.check_versions()


@pytest.mark.parametrize(
    ("package", "found", "words"),
    [
        ("deepspeed", "0.18.2", "wrong ZeRO-2 gradients"),
        ("torch", "2.8.0+cu128", "older than 2.9"),
        ("transformers", "5.22.1", "hooks fire again"),
        ("peft", "0.18.1", "older than 0.19"),
        ("pydantic", "1.10.2", "pydantic 2"),
    ],
)
def test_an_older_package_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str, words: str
) -> None:
    real = deps.installed_version
    monkeypatch.setattr(deps, "installed_version", lambda name: found if name == package else real(name))
    with pytest.raises(DependencyMissing) as caught:
        deps.check_versions()
    monkeypatch.undo()
    message = str(caught.value)
    assert f"{package} {found} is older than" in message and words in message
    assert f"pip install -U '{package}>=" in message
    assert message.count("\n") == 1, "nothing else is wrong"


def test_all_problems_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(DependencyMissing) as caught:
        deps.check_versions([Floor("no-such-package"), Floor("torch", "99")])
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines[:2]] == [
        "Python 3.9.2 is older than 3.10",
        "no-such-package is not installed",
    ]
    assert lines[1].endswith("pip install -U 'no-such-package'")
    assert "is older than 99" in lines[2]


@pytest.mark.parametrize(
    ("version", "floor", "enough"),
    [
        ("2.9.0a0+nv25.10", "2.9", True),  # a vendor's build of the release
        ("2.13.0+cpu", "2.9", True),  # numbers, not text
        ("0.18.3", "0.18.3", True),
        ("0.18.2.post1", "0.18.3", False),
        ("5.23.0.dev0", "5.23", True),
        ("5.3", "5.23", False),
    ],
)
def test_versions_are_compared_as_releases(version: str, floor: str, enough: bool) -> None:
    assert deps.is_at_least(version, floor) is enough


def test_a_missing_optional_part_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DependencyMissing, match=r"mpi4py is not installed \(needed for start by mpirun\)") as caught:
        deps.require("mpi4py")
    assert "pip install 'ds_hilore[mpi]'" in str(caught.value)
    with pytest.raises(DependencyMissing, match="pip install no_such_module"):
        deps.require("no_such_module")
    with pytest.raises(DependencyMissing, match=r"pip install 'ds_hilore\[trl\]'"):
        deps.require("no_such_module", extra="trl")


def test_what_is_there_is_required_in_silence_and_not_imported() -> None:
    sys.modules.pop("wave", None)
    deps.require("wave")
    assert "wave" not in sys.modules
