"""Profile and calibration on disk: read again by the next run of the same setting, which need not measure then.

JSON, in a folder: one file per model, trained set, what of it was measured and class of ranks; for calibration, one per
rank. A file is an input like any other: it may be
stale, damaged, cut short, someone else's, or made to do harm. So it is read with a limit on its size, only if it is a
plain file of this user's, checked field by field (layout.py, calibration_layout.py), and compared with the fingerprint
of the run. Whatever does not fit is `Refused` with a reason, said in one log line, and what it held is measured anew;
no error leaves this module, neither on reading nor on writing.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ds_hilore.core.files import write_whole
from ds_hilore.profiling.calibration_layout import Progress, StoredProgress
from ds_hilore.profiling.layout import Fingerprint, StoredBaseline, StoredProfile, plain
from ds_hilore.profiling.measure import Measurements

_log = logging.getLogger(__name__)

#: Larger files are not read: a profile of 1,000 units and 20 classes takes a few hundred kilobytes.
MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Refused:
    """Why a stored file is not used, or could not be written."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def folder_of(path: str | None) -> Path | None:
    """The folder that the config's `profile.path` means; None: nothing is stored."""
    if path is None:
        return None
    if path != "auto":
        return Path(os.path.expanduser(path))
    cache = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")
    if not cache and home == "~":
        return None
    return Path(cache or os.path.join(home, ".cache")) / "ds_hilore" / "profiles"


Layout = TypeVar("Layout", StoredProfile, StoredProgress)


class _File:
    """One file of one setting."""

    def __init__(self, path: str | None, fingerprint: Fingerprint, *parts: str) -> None:
        self.fingerprint = fingerprint
        folder = folder_of(path)
        parts = (fingerprint.model, fingerprint.trained, fingerprint.state, *parts)
        self.path = None if folder is None else folder / f"{'-'.join(_safe(part) for part in parts)}.json"

    def _read(self, layout: type[Layout]) -> Layout | Refused | None:
        """What is there, if it is of this setting; None where there is nothing."""
        if self.path is None:
            return None
        try:
            text = _content(self.path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return Refused(self.path, f"cannot be read ({_said(error)})")
        if isinstance(text, Refused):
            return text
        try:
            found = layout.model_validate_json(text)
        except ValidationError as error:
            return Refused(self.path, f"is damaged or of another version ({_said(error)})")
        except (ValueError, RecursionError, MemoryError) as error:
            return Refused(self.path, f"holds nothing of ours ({type(error).__name__})")
        different = self.fingerprint.differences(found.fingerprint.read())
        return Refused(self.path, f"is of another setting; {'; '.join(different)}") if different else found

    def _write(self, content: Callable[[], StoredProfile | StoredProgress]) -> Refused | None:
        """Puts `content` in the place of the old file, whole or not at all. None: written, or there is no path."""
        if self.path is None:
            return None
        try:
            text = content().model_dump_json().encode()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, text)
        except (OSError, ValueError) as error:
            return Refused(self.path, f"cannot be written ({_said(error)})")
        return None


class ProfileStore(_File):
    """Reads and writes the profile of one class of ranks.

    Args:
        path: the config's `profile.path`: "auto" (the user's cache), a folder, or None for none.
        fingerprint: of this run.
        rank_class: ranks that measure the same share a file: all of one device, or those of one pipeline stage.
    """

    def __init__(self, path: str | None, fingerprint: Fingerprint, rank_class: str = "all") -> None:
        super().__init__(path, fingerprint, rank_class)

    def load(self) -> StoredProfile | Refused | None:
        """The stored profile of this setting; None where there is no file. Never raises."""
        found = self._read(StoredProfile)
        if isinstance(found, Refused):
            _log.warning("hilore: the stored profile is not used, units are measured anew: %s", found)
        return found

    def restore(self, measurements: Measurements) -> StoredProfile | Refused | None:
        """As `load`, and puts what is there into measurements that have seen nothing yet."""
        found = self.load()
        if isinstance(found, StoredProfile):
            found.into(measurements)
            _log.info("hilore: units as measured before: %s", self.path)
        return found

    def save(self, measurements: Measurements, baseline: StoredBaseline | None = None) -> Refused | None:
        """Writes what was measured in the place of the old file, whole or not at all. Never raises; None: written."""
        refused = self._write(lambda: StoredProfile.of(measurements, self.fingerprint, baseline))
        if refused is not None:
            _log.warning("hilore: the profile is not stored, the next run measures anew: %s", refused)
        return refused


def survey(folder: Path) -> list[tuple[Path, Fingerprint | str]]:
    """Every file of a folder of profiles: the setting that it was made for, or why it cannot be read. Never raises."""
    try:
        files = sorted(folder.glob("*.json"))
    except OSError:
        return []
    return [(path, _setting_of(path)) for path in files]


def _setting_of(path: Path) -> Fingerprint | str:
    layout = StoredProgress if "-calibration-" in path.name else StoredProfile
    try:
        text = _content(path)
        return text.reason if isinstance(text, Refused) else layout.model_validate_json(text).fingerprint.read()
    except (OSError, ValueError) as error:
        return f"cannot be used ({_said(error)})"
    except (RecursionError, MemoryError) as error:
        return f"holds nothing of ours ({type(error).__name__})"


class CalibrationStore(_File):
    """Reads and writes the calibration of one rank, beside the profile: every rank fits its own microbatches.

    Args:
        path, fingerprint: as of `ProfileStore`.
    """

    def __init__(self, path: str | None, fingerprint: Fingerprint, rank: int) -> None:
        super().__init__(path, fingerprint, "calibration", f"rank{rank}")

    def load(self) -> Progress | Refused | None:
        """Where the calibration of this setting is; None where none was begun. Never raises."""
        found = self._read(StoredProgress)
        if isinstance(found, Refused):
            _log.warning("hilore: the stored calibration is not used, it is made anew: %s", found)
        return found.read() if isinstance(found, StoredProgress) else found

    def save(self, progress: Progress) -> Refused | None:
        """Writes where it is in the place of the old file, whole or not at all. Never raises; None: written."""
        refused = self._write(lambda: StoredProgress.of(progress, self.fingerprint))
        if refused is not None:
            _log.warning("hilore: the calibration is not stored, the next run makes it anew: %s", refused)
        return refused


def _content(path: Path) -> bytes | Refused:
    """A plain file of this user's, whole. Neither links nor devices nor pipes, which could hold a reader up."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return Refused(path, "is no plain file")
        if hasattr(os, "getuid") and facts.st_uid not in (os.getuid(), 0):
            return Refused(path, "belongs to another user")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    return content if len(content) <= MAX_BYTES else Refused(path, f"has more than {MAX_BYTES} bytes")


def _safe(text: str) -> str:
    """A part of a file name: letters, digits, dots and underscores, and never a way out of the folder."""
    return re.sub(r"[^A-Za-z0-9._]", "_", text).strip(".")[:48] or "none"


def _said(error: OSError | ValueError) -> str:
    """What went wrong, in one line of a log that no file can write into."""
    if isinstance(error, ValidationError):
        item = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in item["loc"][:8])
        return f"{plain(where or 'the whole file')}: {plain(item['msg'])}"
    return plain(getattr(error, "strerror", None) or error)
