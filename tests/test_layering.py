"""The cut of the package (design section 7) as a test: imports point down, hosts stay in their files."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_hilore"

#: Level of each room. A room may import itself and rooms of lower levels.
LEVEL = {
    "core": 0,
    "codecs": 1,
    "objective": 1,
    "memory": 1,
    "report": 1,
    "planning": 1,
    "recovery": 2,
    "profiling": 3,
    "runtime": 4,
    "integration": 5,
    "cli": 6,
}

#: Files at the top of the package: public names and `python -m ds_hilore`. They may import any room; no room may import
#: them, but for the version.
TOP_LEVEL = 7

#: Third-party package -> the only files that may import it.
KEPT_IN = {
    "triton": ("codecs/*/kernel.py", "objective/*kernel*.py"),
    "deepspeed": ("integration/*.py",),
    "transformers": ("integration/*.py",),
    "peft": ("integration/*.py",),
    "trl": ("integration/*.py",),
    "megatron": ("integration/*.py",),
    "mpi4py": ("integration/*.py",),
    "pulp": ("planning/program.py",),
    "highspy": ("planning/program.py",),
    "matplotlib": ("report/drawing.py", "report/picture*.py", "report/maps.py"),
}

LONGEST_FILE = 400


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Full names that a module imports, inside functions too; for `from a import b`, "a.b"."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = ".".join(package.split(".")[: len(package.split(".")) - (node.level - 1)])
                base = f"{parent}.{base}" if base else parent
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of_file(path: Path) -> Iterator[str]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return imports_of(path.read_text(encoding="utf-8"), ".".join(parts[:-1] if is_package else parts), is_package)


def room_of(path: Path) -> str | None:
    """Name of the room a file lies in. None for files at the top of the package."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def breach(room: str | None, imported: str) -> str | None:
    """Why a file of `room` may not import `imported`, a full name. None if it may."""
    package, _, rest = imported.partition(".")
    if package != "ds_hilore":
        return None
    target = rest.split(".")[0]
    if target not in LEVEL:
        return None if room is None or target == "__version__" else f"imports the top of the package ({imported})"
    level = TOP_LEVEL if room is None else LEVEL[room]
    if target == room or LEVEL[target] < level:
        return None
    return f"{room} (L{level}) may not import {target} (L{LEVEL[target]})"


def test_every_folder_is_a_room_with_a_level() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(LEVEL), "give a new room its level here and in design section 7"


def test_imports_point_down() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {reason}"
        for path in source_files()
        for imported in imports_of_file(path)
        if (reason := breach(room_of(path), imported))
    ]
    assert not breaches


def test_hosts_and_solvers_stay_in_their_files() -> None:
    breaches = []
    for path in source_files():
        inside = path.relative_to(PACKAGE).as_posix()
        for imported in imports_of_file(path):
            allowed = KEPT_IN.get(imported.split(".")[0])
            if allowed is not None and not any(fnmatch.fnmatch(inside, pattern) for pattern in allowed):
                breaches.append(f"{inside} imports {imported}; allowed in {', '.join(allowed)}")
    assert not breaches


@pytest.mark.parametrize(
    ("room", "imported", "allowed"),
    [
        ("planning", "ds_hilore.core.types.Plan", True),
        ("planning", "ds_hilore.planning.problem", True),
        ("planning", "ds_hilore.memory.ledger", False),  # a room of the same level
        ("core", "ds_hilore.planning", False),
        ("recovery", "ds_hilore.runtime.controller", False),
        ("integration", "ds_hilore.runtime", True),
        ("integration", "ds_hilore.initialize", False),
        ("integration", "ds_hilore.__version__", True),
        (None, "ds_hilore.cli.main", True),
        ("core", "pydantic.BaseModel", True),
    ],
)
def test_the_rule_itself(room: str | None, imported: str, allowed: bool) -> None:
    assert (breach(room, imported) is None) == allowed


def test_imports_are_found_in_every_form() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from ..memory import meter\n    from . import greedy\n"
    found = list(imports_of(source, "ds_hilore.planning.program", is_package=False))
    assert found == ["a.b", "c.d", "ds_hilore.memory.meter", "ds_hilore.planning.greedy"]
    assert list(imports_of("from . import x", "ds_hilore.planning", is_package=True)) == ["ds_hilore.planning.x"]


def test_files_stay_short() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in source_files()}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


BLOCKED_IMPORT = """
import sys
for name in ("deepspeed", "transformers", "peft", "trl", "triton", "mpi4py"):
    sys.modules[name] = None  # import raises ImportError
import ds_hilore, ds_hilore.planning, ds_hilore.core.config, ds_hilore.core.deps
from ds_hilore.core.config import HiLoReConfig
assert HiLoReConfig.from_ds_json({"hilore": {"memory_budget": "2GiB"}}).memory_budget.value == 2 << 30
print("imported", "torch" in sys.modules)
"""


def test_import_needs_no_host() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported")


def test_import_of_the_package_alone_is_light() -> None:
    """The public names are lazy: `import ds_hilore` must not pull in torch."""
    code = "import sys, ds_hilore; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
