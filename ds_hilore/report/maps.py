"""Pictures of what was done: a row for each unit or rank, a column for each update, a colour for each action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_hilore.report.digest import Digest
from ds_hilore.report.drawing import BLUE, ORANGE, PURPLE, label, legend_above, mixed, whole_updates
from ds_hilore.report.picture import Picture
from ds_hilore.report.reading import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of the actions in `digest.KINDS`.
INKS = (BLUE, PURPLE, ORANGE)
KIND_NAMES = ("stored", "compressed", "replayed")


def action_maps(digest: Digest) -> Iterator[Picture]:
    """By unit over updates and, where there are several ranks, by rank over updates and by unit and rank."""
    if not digest.units:
        why = "no unit of a microbatch was seen: no forward with gradients went through the engine's units"
        yield Picture("units", "What was done with each layer", "", None, why)
        return
    used = [bool(digest.by_unit[..., kind].any()) for kind in range(len(INKS))]
    key = "Blue: stored. Orange: run again in backward." + (" Purple: compressed." if used[1] else "")
    which = "microbatches or ranks" if len(digest.ranks) > 1 else "microbatches"
    yield Picture(
        "units",
        "What was done with each layer, update by update",
        f"{key} After the first updates, which measure, blue should fill as much as memory allows. Mixed colours: "
        f"{which} that differ.",
        lambda figure: _map(figure, digest, digest.by_unit, _unit_labels(digest), "unit"),
    )
    if len(digest.ranks) == 1:
        return
    yield Picture(
        "ranks",
        "How much of its layers each rank stores",
        f"{key} Each row is a rank. Rows may differ where budgets or microbatches do; one that stays orange is short "
        "of memory.",
        lambda figure: _map(figure, digest, digest.by_rank, [str(rank.rank) for rank in digest.ranks], "rank"),
    )
    if digest.settled.any():
        yield Picture(
            "units-and-ranks",
            "Each layer on each rank",
            f"{key} All updates that followed plans, together: columns that differ are ranks that plan differently.",
            lambda figure: _unit_rank_map(figure, digest),
        )


def _unit_labels(digest: Digest) -> list[str]:
    names = [label(name, 512) for name in digest.units]
    common = 0
    if len(names) > 1:
        parts = [name.split(".") for name in names]
        while all(len(each) > common + 1 for each in parts) and len({each[common] for each in parts}) == 1:
            common += 1
        names = [".".join(each[common:]) for each in parts]
    return [label(name, 14) for name in names]


def _map(figure: Figure, digest: Digest, shares: Floats, names: list[str], what: str) -> None:
    axes = figure.subplots()
    first, end = digest.span
    extent = (first - 0.5, end - 0.5, len(names) - 0.5, -0.5)
    axes.imshow(mixed(shares, INKS), aspect="auto", interpolation="nearest", extent=extent)
    _name_rows(axes, names)
    axes.set_ylabel(what)
    whole_updates(axes)
    _key(axes, shares)


def _unit_rank_map(figure: Figure, digest: Digest) -> None:
    axes = figure.subplots()
    axes.imshow(mixed(digest.settled, INKS), aspect="auto", interpolation="nearest")
    _name_rows(axes, _unit_labels(digest))
    step = -(-len(digest.ranks) // 8)
    axes.set_xticks(range(0, len(digest.ranks), step), [str(rank.rank) for rank in digest.ranks[::step]])
    axes.set_xlabel("rank")
    axes.set_ylabel("unit")
    _key(axes, digest.settled)


def _name_rows(axes: Axes, names: list[str]) -> None:
    step = -(-len(names) // 12)
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.grid(False)


def _key(axes: Axes, shares: Floats) -> None:
    for kind, (name, ink) in enumerate(zip(KIND_NAMES, INKS)):
        if shares[..., kind].any():
            axes.plot([], [], "s", color=ink, label=name)
    legend_above(axes)
