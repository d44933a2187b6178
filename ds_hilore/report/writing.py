"""One rank's file of a run's log: lines are appended, never changed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ds_hilore.report.records import Record, file_of, line_of

#: A file grows to this size and no further: at 500 bytes a line, half a million updates.
MOST_BYTES = 256 << 20


class LogFile:
    """Opened for one run; what earlier ones wrote stays.

    Lines that belong together are one write at the end of the file, so a run that is killed leaves at most its last
    line cut short, and readers never see half of one that is followed by others.

    Raises:
        OSError: the folder cannot be made or written to, or something else than a plain file has the name.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = file_of(folder, rank)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):  # no link, no pipe that nobody reads, no child's
            flags |= getattr(os, name, 0)
        self._descriptor: int | None = os.open(self.path, flags, 0o644)
        facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "is no plain file", str(self.path))
        self._bytes = facts.st_size
        self._open_line = self._bytes > 0  # an earlier run may have left its last line without an end

    def append(self, records: Iterable[Record]) -> None:
        """Writes lines.

        Raises:
            OSError: not all of it could be written, or the file is as large as it may be.
        """
        assert self._descriptor is not None, "closed"
        content = b"".join(map(line_of, records))
        if self._open_line:
            content = b"\n" + content
        if self._bytes + len(content) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"has reached {MOST_BYTES >> 20} MiB", str(self.path))
        written = os.write(self._descriptor, content)
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._open_line = False
        self._bytes += written

    def close(self) -> None:
        """The run is over."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
