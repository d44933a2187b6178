"""Files that readers find whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int | None = None) -> None:
    """Puts `content` in the place of the file at `path`: written under another name first, on disk before it is seen.

    Args:
        mode: permissions; None: this user's alone.

    Raises:
        OSError: nothing has changed then, and nothing is left behind.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem[:60]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
