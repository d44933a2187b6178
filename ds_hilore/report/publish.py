"""Writes a report: the page, and its pictures as files beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_hilore.core.errors import UsageError
from ds_hilore.core.files import write_whole
from ds_hilore.report.digest import Digest
from ds_hilore.report.drawing import Drawn, drawn
from ds_hilore.report.page import page
from ds_hilore.report.picture import Picture
from ds_hilore.report.pictures import pictures
from ds_hilore.report.reading import Run
from ds_hilore.report.summary import Summary


def publish(run: Run, summary: Summary, out: Path, progress: Callable[[str], object] = lambda name: None) -> list[Path]:
    """Draws and writes everything. Files are put in the place of old ones whole.

    Args:
        out: the page. Pictures go to a folder beside it: "report.html" has "report-pictures/".
        progress: told of each picture before it is drawn.

    Returns:
        What was written, the page first.

    Raises:
        DependencyMissing: matplotlib is not installed.
        UsageError: `out` cannot be written.
    """
    drawings: list[tuple[Picture, Drawn | None]] = []
    for picture in pictures(Digest(run)):
        progress(picture.title)
        drawings.append((picture, None if picture.draw is None else drawn(picture.draw)))
    try:
        folder = out.with_name(f"{out.stem}-pictures")
        files = {folder / f"{picture.name}.png": each.png for picture, each in drawings if each is not None}
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_whole(path, content, 0o644)
        write_whole(out, page(run, summary, drawings).encode(), 0o644)
    except (OSError, ValueError) as error:  # the latter: a path without a name, or with a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{out} cannot be written ({reason}); name another file with --out") from None
    return [out, *files]
