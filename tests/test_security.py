"""What the package never does, read from its source: run text as code, read pickles, use a network or a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layering import PACKAGE, source_files

#: Modules that read code out of data, or talk to other machines.
FORBIDDEN = {
    *("code", "codeop", "cloudpickle", "dill", "joblib", "marshal", "pickle", "pty", "shelve", "yaml"),
    *("asyncio", "ftplib", "http", "imaplib", "multiprocessing", "nntplib", "poplib", "requests", "smtplib", "socket"),
    *("socketserver", "ssl", "telnetlib", "urllib", "webbrowser", "xmlrpc"),
}
#: File -> module of those, and what for.
ALLOWED = {
    ("planning/apart.py", "pickle"): "pipes of its own child process; can hold records of the planner only",
    ("integration/control_plane.py", "socket"): "the name of this machine",
    ("integration/rehearsal.py", "socket"): "a free port of this machine, for a run of one process",
}
#: Names of `socket` that those use: no connection to another machine is among them.
SOCKET_NAMES = frozenset({"gethostname", "socket"})

#: Calls that run text, or read pickles. `torch.load` and `torch.save` are both.
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("torch.load", "torch.save", "torch.hub.load", "numpy.load", "np.load", "pickle.load", "pickle.loads"),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
}
#: The only places that start processes, all of this interpreter with a list of arguments.
STARTS = frozenset({"cli/bench.py", "cli/checked_run.py", "planning/apart.py"})
#: The only place that runs a file of the user's: `python -m ds_hilore script.py`.
RUNS_SCRIPTS = "__main__.py"
#: What writes files without `core.files.write_whole`: lines of a log, and answers within a folder of its own.
WRITES = {
    "report/writing.py": "lines are appended",
    "cli/bench.py": "a temporary folder",
    "cli/bench_process.py": "that folder",
    "cli/checked_run.py": "a temporary folder",
    "memory/meter.py": "/proc/self/clear_refs",
    "core/files.py": "write_whole itself",
}


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in source_files():
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """First parts of the names of modules that are imported, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_module_that_reads_code_or_talks_to_others() -> None:
    found = {(name, module) for name, tree in parsed() for module in imported(tree) & FORBIDDEN}
    assert found == ALLOWED.keys()


def test_sockets_go_nowhere() -> None:
    used = {
        node.attr
        for name, tree in parsed()
        if (name, "socket") in ALLOWED
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "socket"
    }
    assert used and used <= SOCKET_NAMES


def test_nothing_runs_text_or_reads_a_pickle() -> None:
    found = [
        f"{name}:{call.lineno} {called}" for name, tree in parsed() for called, call in calls(tree) if called in CALLS
    ]
    assert not found


def test_no_shell_is_ever_started() -> None:
    starting = {name for name, tree in parsed() if "subprocess" in imported(tree)}
    assert starting == STARTS
    for name, tree in parsed():
        for called, call in calls(tree):
            assert not any(word.arg == "shell" for word in call.keywords), f"{name}:{call.lineno}"
            assert not called.startswith(("os.exec", "os.spawn", "os.posix_spawn")), f"{name}:{call.lineno}"
            if called.startswith("subprocess."):  # a list, never one text that a shell would take apart
                first = call.args[0]
                lists = _names_of_lists(tree)
                assert isinstance(first, ast.List) or (isinstance(first, ast.Name) and first.id in lists), name


def _names_of_lists(tree: ast.Module) -> set[str]:
    """Names that are given lists that begin with this interpreter."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        for target in node.targets
        if isinstance(target, ast.Name) and list(map(ast.unparse, node.value.elts[:1])) == ["sys.executable"]
    }


def test_scripts_are_run_in_one_place() -> None:
    assert {name for name, tree in parsed() if "runpy" in imported(tree)} == {RUNS_SCRIPTS}


def test_files_are_written_whole() -> None:
    """Every other file goes through `write_whole`: a reader never finds half of one."""
    found = {
        name
        for name, tree in parsed()
        for called, call in calls(tree)
        if called.endswith((".write_text", ".write_bytes", "os.write", "os.fdopen")) or _opens_for_writing(called, call)
    }
    assert found - {"planning/apart.py", "profiling/store.py", "report/reading.py"} == WRITES.keys()


def _opens_for_writing(called: str, call: ast.Call) -> bool:
    given = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    letters = [set(mode) for mode in modes if set(mode) <= set("rwaxbt+")]
    return called in ("open", "path.open") and any(each & set("wax+") for each in letters)


@pytest.mark.parametrize(
    "source", ["import pickle", "from socket import create_connection", "def f():\n    import urllib.request"]
)
def test_the_reader_of_imports_reads_all_of_them(source: str) -> None:
    assert imported(ast.parse(source)) & FORBIDDEN


def test_every_file_of_the_package_is_read() -> None:
    assert len(list(parsed())) == len(list(Path(PACKAGE).rglob("*.py"))) > 100
