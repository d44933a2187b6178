"""matplotlib, without its global state: sheets of two widths, and pictures as SVG and PNG.

Names come from logs, so nothing that is written on a sheet is read as mathematics, and what its font does not have
becomes a question mark.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_hilore.core import deps
from ds_hilore.report.words import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of a legend.
LETTERS_PER_INCH = 11
INK, PALE, GRID = "#1f2933", "#52606d", "#d5dae1"
BLUE, ORANGE, PURPLE, GREEN, RED = "#2b6cb0", "#d9822b", "#6b46c1", "#2f855a", "#c53030"


class Sheet(Enum):
    """How wide a picture is drawn: its width and height in inches, at the same size of letters."""

    WIDE = (7.6, 3.5)
    NARROW = (4.1, 3.7)


Draw = Callable[["Figure"], None]
"""Fills an empty sheet."""


@dataclass(frozen=True)
class Drawn:
    """One picture: for wide and for narrow screens, and as a file to pass on."""

    wide_svg: bytes
    narrow_svg: bytes
    png: bytes


def drawn(draw: Draw) -> Drawn:
    """Draws a picture in all forms.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    deps.require("matplotlib")
    with _settings():
        wide, narrow = (_filled(draw, sheet) for sheet in (Sheet.WIDE, Sheet.NARROW))
        svg = _saved(wide, "svg")
        wide.set_layout_engine("none")  # everything has its place
        return Drawn(svg, _saved(narrow, "svg"), _saved(wide, "png"))


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own matplotlibrc says
        matplotlib.rcParams.update(
            {
                "font.size": 10,
                "text.parse_math": False,
                "text.color": INK,
                "axes.labelcolor": INK,
                "axes.edgecolor": PALE,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "grid.color": GRID,
                "grid.linewidth": 0.6,
                "xtick.color": PALE,
                "ytick.color": PALE,
                "legend.frameon": False,
                "legend.fontsize": 9,
                "lines.linewidth": 1.6,
                "svg.fonttype": "path",  # the reader's fonts are not known
                "svg.hashsalt": "hilore",
            }
        )
        yield


def _filled(draw: Draw, sheet: Sheet) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=sheet.value, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    draw(figure)
    return figure


def _saved(figure: Figure, kind: str) -> bytes:
    into = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(into, format=kind, dpi=144, metadata=metadata)
    return into.getvalue()


def data_address(content: bytes, kind: str) -> str:
    """The content as an address that a page can hold."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def label(text: object, most: int = 28) -> str:
    """Text from a log, for a sheet: printable ASCII, its end kept, which tells layers apart."""
    safe = plain(text, 512).encode("ascii", "replace").decode()
    return safe if len(safe) <= most else f"...{safe[3 - most :]}"


def legend_above(axes: Axes) -> None:
    """The legend over the picture, where it hides nothing."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        width = axes.get_figure(root=True).get_figwidth()  # type: ignore[union-attr]
        columns = max(1, int(width * LETTERS_PER_INCH / (6 + max(map(len, names)))))
        where = {"bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
        axes.legend(handles, names, loc="lower left", ncols=columns, handlelength=1.6, **where)


def show_updates(axes: Axes, span: tuple[int, int]) -> None:
    """The axis below shows a run's updates, all of them: the first, and the one after the last."""
    axes.set_xlim(span[0] - 0.5, span[1] - 0.5)
    whole_updates(axes)


def whole_updates(axes: Axes) -> None:
    """Updates are counted: no halves of them on the axis below."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("update")


def mixed(shares: Any, inks: tuple[str, ...], empty: str = "#eef1f4") -> Any:
    """[rows, columns, 3] colours: `inks` mixed in the proportions of `shares` [rows, columns, inks]; `empty`: none."""
    import numpy as np
    from matplotlib.colors import to_rgb

    whole = shares.sum(-1, keepdims=True)
    weights = np.divide(shares, whole, out=np.zeros_like(shares), where=whole > 0)
    colours = weights @ np.array([to_rgb(ink) for ink in inks])
    return np.where(whole > 0, colours, np.array(to_rgb(empty)))
