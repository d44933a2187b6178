"""Stored profiles that are damaged, foreign or malicious, and folders that take none: units are measured anew.

A good profile of the very setting is written first, then spoilt; the next engine of that setting must not mind.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hilore.profiling.store import MAX_BYTES
from tests.faults.bench import Bench
from tests.faults.kinds.planning import own, until_planned
from tests.faults.records import Fault, Pair, Place, update
from tests.faults.sites import replaced, shared_folder

Spoil = Callable[[Path], object]


class Executed:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (open, (os.fspath(self.trace), "w"))


def spoilt(spoil: Spoil, restores: bool = False) -> Callable[[Bench], Pair]:
    """A run stores its profile, something happens to the file, another run of the same setting starts."""

    def run(bench: Bench) -> Pair:
        folder = shared_folder()
        profile = {"path": os.fspath(folder)}
        own(bench, profile=profile)
        until_planned(bench)
        dist.barrier()
        (file,) = folder.glob("*.json")
        dist.barrier()
        if dist.get_rank() == 0:
            spoil(file)
        dist.barrier()
        bench.end()
        made = own(bench, profile=profile)
        assert made.hilore.learning.known is restores
        until_planned(bench)
        found = update(bench)
        assert not list(folder.glob("trace")), "something in the file was executed"
        return found

    return run


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def junk(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 8)


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Executed(file.parent / "trace")))


def nested(file: Path) -> None:
    file.write_text("[" * 200_000 + "]" * 200_000)


def endless(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(MAX_BYTES + 1)


def removed(file: Path) -> None:
    file.unlink()


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_link(file: Path) -> None:
    target = file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(target)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def changed(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return spoil


def foreign(content: dict[str, Any]) -> None:
    content["fingerprint"]["device"] = "another device"


def of_another_version(content: dict[str, Any]) -> None:
    content["fingerprint"]["ds_hilore"] = "9.9.9"


def unknown_keys(content: dict[str, Any]) -> None:
    content["__class__"] = "os.system"


def _first_fit(content: dict[str, Any]) -> dict[str, Any]:
    fit: dict[str, Any] = next(iter(content["classes"].values()))["inputs"]
    return fit


def not_a_number(content: dict[str, Any]) -> None:
    _first_fit(content)["observations"][0]["value"] = float("nan")


def beyond_all_bounds(content: dict[str, Any]) -> None:
    _first_fit(content)["observations"][0]["value"] = 1e300


def negative(content: dict[str, Any]) -> None:
    _first_fit(content)["observations"][0]["value"] = -1.0


def words_for_numbers(content: dict[str, Any]) -> None:
    _first_fit(content)["count"] = "$(touch trace)"


def lies(content: dict[str, Any]) -> None:
    """Bytes and seconds that are possible and not true."""
    for each in content["classes"].values():
        for fit in (each["inputs"], each["state"]):
            for seen in fit["observations"]:
                seen["value"] = seen["value"] / 1000


def unwritable(bench: Bench) -> Pair:
    """A file lies where the folder should be; permissions would not stop root."""
    folder = shared_folder()
    if dist.get_rank() == 0:
        (folder / "file").write_text("in the way")
    dist.barrier()
    own(bench, profile={"path": os.fspath(folder / "file")})
    until_planned(bench)
    return update(bench)


def failing(path: str, number: int) -> Callable[[Bench], Pair]:
    """A call of the operating system fails while the profile is written; nothing is left half done."""

    def run(bench: Bench) -> Pair:
        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        folder = shared_folder()
        with replaced({path: fail})():
            own(bench, profile={"path": os.fspath(folder)})
            until_planned(bench)
            found = update(bench)
        assert not list(folder.iterdir())
        return found

    return run


def _fault(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(name, Place.FILES, run=run, **{"stages": (2,), **more})


FAULTS: tuple[Fault, ...] = (
    _fault("a profile that was cut short", spoilt(cut)),
    _fault("a profile that is empty", spoilt(emptied), thorough=True),
    _fault("a profile of random bytes", spoilt(junk), thorough=True),
    _fault("a profile that is a pickle", spoilt(pickled)),
    _fault("a profile nested 200,000 deep", spoilt(nested), thorough=True),
    _fault("a profile of more than 4 MiB", spoilt(endless), thorough=True),
    _fault("a profile that is gone", spoilt(removed), thorough=True),
    _fault("a folder in the place of the profile", spoilt(a_folder), thorough=True),
    _fault("a link in the place of the profile", spoilt(a_link), thorough=True),
    _fault("a pipe in the place of the profile", spoilt(a_pipe)),
    _fault("a profile of another device", spoilt(changed(foreign))),
    _fault("a profile of another version", spoilt(changed(of_another_version)), thorough=True),
    _fault("a profile with keys that nobody knows", spoilt(changed(unknown_keys)), thorough=True),
    _fault("a profile with NaN", spoilt(changed(not_a_number)), thorough=True),
    _fault("a profile with numbers beyond all bounds", spoilt(changed(beyond_all_bounds)), thorough=True),
    _fault("a profile with negative bytes", spoilt(changed(negative)), thorough=True),
    _fault("a profile with a shell command for a number", spoilt(changed(words_for_numbers)), thorough=True),
    _fault("a profile that understates bytes a thousandfold", spoilt(changed(lies), restores=True)),
    _fault("a folder that cannot be made", unwritable, thorough=True),
    _fault("a disk that is full", failing("ds_hilore.core.files:os.fsync", errno.ENOSPC)),
    _fault("a folder that is read-only", failing("ds_hilore.core.files:tempfile.mkstemp", errno.EROFS)),
    _fault(
        "a profile that cannot be put in place",
        failing("ds_hilore.core.files:os.replace", errno.EACCES),
        thorough=True,
    ),
)
