"""The report as one HTML file: it loads nothing, runs nothing, and holds nothing from a log but as escaped text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from html import escape

from ds_hilore.report import words
from ds_hilore.report.drawing import Drawn, data_address
from ds_hilore.report.picture import Picture
from ds_hilore.report.reading import Run
from ds_hilore.report.summary import Summary

#: Shortages that the page lists; the picture has all.
LISTED = 20

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 58rem; padding: 1rem; background: #f6f7f9; color: #1f2933;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; }
.pale { color: #52606d; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1rem 0;
  padding: 0; list-style: none; }
.tiles li, section { background: #fff; border: 1px solid #d5dae1; border-radius: 8px; padding: .75rem 1rem; }
.tiles b { display: block; font-size: 1.35rem; line-height: 1.25; }
section { margin: 0 0 1rem; }
img { display: block; width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
pre { margin: 0; overflow-x: auto; font-size: .85rem; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""

_WORDS = {
    "layer, or unit": "the piece of the model that is stored or run again as a whole; by default one decoder layer.",
    "stored": "what backward needs of the layer stayed in memory. Costs memory, saves time; exact.",
    "replayed": "the layer ran a second time in backward, as activation checkpointing does it; exact.",
    "compressed": "kept in low precision, which adds a small error to the gradient. Only where the JSON allows one.",
    "budget": "memory that a rank may use. The largest peak should stay below it.",
}


def page(run: Run, summary: Summary, drawings: Iterable[tuple[Picture, Drawn | None]]) -> str:
    """The whole file.

    Args:
        drawings: pictures in their order; None for those that have nothing to show.
    """
    title = f"ds_hilore: a run of {words.count_of(summary.updates, 'update')}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="pale">{escape(_about(run))}</p>',
        f"<p>{escape(summary.sentence)}</p>",
        _tiles(summary.tiles()),
        *(_notes(run)),
        *(_section(picture, drawing) for picture, drawing in drawings),
        _list_of_shortages(run),
        _dictionary(),
        f"<section><h2>Settings</h2><pre>{escape(json.dumps({'hilore': run.block}, indent=2))}</pre></section>",
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(part for part in body if part) + "\n</body>\n</html>\n"


def _about(run: Run) -> str:
    first = run.first.run
    began = datetime.datetime.fromtimestamp(min(first.started_s, 2**32), datetime.timezone.utc)
    parts = [
        words.plain(run.folder, 400),
        f"begun {began:%Y-%m-%d %H:%M} UTC",
        words.count_of(first.world, "rank"),
        f"units: {words.plain(first.units)}",
        f"ZeRO-{first.zero_stage} on {words.plain(first.device, 32)}",
        words.plain(first.package),
    ]
    return " · ".join(parts)


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    cells = (f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in tiles)
    return f'<ul class="tiles">{"".join(cells)}</ul>'


def _notes(run: Run) -> list[str]:
    """What of the run this page does not know."""
    found = []
    if run.missing:
        some = ", ".join(map(str, run.missing[:10])) + (" and more" if len(run.missing) > 10 else "")
        found.append(
            f"{words.count_of(len(run.missing), 'rank')} of {run.first.run.world} left no log here (rank {some}): what "
            "is drawn is of the others. Do all ranks write to one folder?"
        )
    ends = {rank.updates[-1] for rank in run.ranks}
    if len(ends) > 1:
        found.append(f"logs end at different updates, from {min(ends)} to {max(ends)}: some ranks stopped writing.")
    if run.damaged:
        found.append(
            f"{words.count_of(run.damaged, 'line')} could not be read, as when a run is killed while it writes."
        )
    found += [words.plain(reason, 400) for reason in run.unreadable[:10]]
    if run.earlier:
        found.append(f"the folder holds {words.count_of(run.earlier, 'earlier run')}, not shown: this is the newest.")
    return [f'<p class="pale">Note: {escape(note)}</p>' for note in found]


def _section(picture: Picture, drawing: Drawn | None) -> str:
    head = f'<section id="{escape(picture.name)}"><h2>{escape(picture.title)}</h2>'
    if drawing is None:
        return f'{head}<p class="pale">Nothing to show: {escape(picture.instead)}.</p></section>'
    wide, narrow = (data_address(svg, "image/svg+xml") for svg in (drawing.wide_svg, drawing.narrow_svg))
    alternative = escape(f"{picture.title}. {picture.look_for}")
    return (
        f"{head}<p>{escape(picture.look_for)}</p>\n"
        f'<picture><source media="(max-width: 40rem)" srcset="{narrow}">'
        f'<img src="{wide}" alt="{alternative}"></picture></section>'
    )


def _list_of_shortages(run: Run) -> str:
    events = sorted(
        ((event.update, rank.rank, event) for rank in run.ranks for event in rank.shortages), key=lambda each: each[:2]
    )
    if not events:
        return ""
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(words.plain(cell))}</td>"
            for cell in (update, rank, event.unit or "-", words.size(event.short_bytes), event.replayed, event.defence)
        )
        + "</tr>"
        for update, rank, event in events[-LISTED:]
    )
    names = ("update", "rank", "at unit", "short by", "units replayed for it", "defence")
    head = "".join(f"<th>{name}</th>" for name in names)
    said = "All shortages" if len(events) <= LISTED else f"The last {LISTED} of {len(events)} shortages"
    return f'<section><h2>{said}</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div></section>'


def _dictionary() -> str:
    entries = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in _WORDS.items())
    return f"<section><h2>Words</h2><dl>{entries}</dl></section>"
