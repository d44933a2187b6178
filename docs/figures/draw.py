"""Draws the figures of how-it-works.md, with the standard library alone. docs/generate.py calls it.

The timeline is a drawing of the rules, not a measurement: eight equal layers, times and bytes in made-up units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

LAYERS = 8
FORWARD = REPLAY = 1.0  # time of one layer
BACKWARD = 1.1
LOSS = 0.8
INPUT, STATE = 1.0, 6.0  # memory: a layer's input, and all that its backward reads
BUDGET = 19.0

INK, PALE, GRID = "#1f2933", "#52606d", "#cbd2d9"
RUN, REPLAYED, STORED, COMPRESSED, LOSS_INK = "#7b8794", "#d9822b", "#2b6cb0", "#6b46c1", "#a0aec0"


@dataclass
class Svg:
    """A drawing on a white ground, so that it reads on dark pages too."""

    width: int
    height: int
    title: str
    description: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, more: str = "") -> None:
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {box} fill="{fill}"{more}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str, more: str = "") -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {ends} stroke="{ink}"{more}/>')

    def text(self, x: float, y: float, words: str, size: int = 13, ink: str = INK, more: str = "") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{ink}"'
        self.parts.append(f"<text {place}{more}>{escape(words)}</text>")

    def area(self, points: list[tuple[float, float]], ink: str) -> None:
        ends = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{ends}" fill="{ink}" fill-opacity="0.25" stroke="{ink}"/>')

    def done(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img"'
            ' font-family="Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{PALE}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="6" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


# ------------------------------------------------------------------------------------------------ timeline


@dataclass(frozen=True)
class Span:
    """Something that runs, and the memory when it begins and when it ends."""

    begin: float
    end: float
    label: str
    ink: str
    level: tuple[float, float]


def update(stored: frozenset[int]) -> Iterator[Span]:
    """One microbatch in which the layers `stored` keep their state and the others are replayed."""
    now = level = 0.0

    def span(seconds: float, label: str, ink: str, after: float) -> Span:
        nonlocal now, level
        made = Span(now, now + seconds, label, ink, (level, after))
        now, level = now + seconds, after
        return made

    for layer in range(LAYERS):
        held = STATE if layer in stored else INPUT
        yield span(FORWARD, str(layer + 1), STORED if layer in stored else RUN, level + held)
    yield span(LOSS, "", LOSS_INK, level)
    for layer in reversed(range(LAYERS)):
        if layer not in stored:
            yield span(REPLAY, str(layer + 1), REPLAYED, level - INPUT + STATE)
        yield span(BACKWARD, str(layer + 1), STORED if layer in stored else RUN, level - STATE)


def peak(stored: frozenset[int]) -> float:
    return max(max(span.level) for span in update(stored))


def planned() -> frozenset[int]:
    """The most layers that the budget has room for, the last ones: their state is gone before earlier ones replay."""
    plans = [frozenset(range(LAYERS - count, LAYERS)) for count in range(LAYERS + 1)]
    return [plan for plan in plans if peak(plan) <= BUDGET][-1]


def timeline() -> str:
    """Three ways to run the same microbatch, with the memory of each."""
    plan = planned()
    ways = (
        ("Activation checkpointing: every layer is replayed", frozenset[int]()),
        (f"A plan under a budget: {len(plan)} of {LAYERS} layers stored, the others replayed", plan),
        ("No checkpointing: every layer is stored", frozenset(range(LAYERS))),
    )
    longest = max(span.end for span in update(frozenset()))
    left, across, each = 20.0, 760.0, 168.0
    svg = Svg(
        800,
        int(3 * each) + 56,
        "One microbatch, three ways",
        "Time runs to the right. Orange boxes are layers that run a second time in backward; below them, the memory "
        "that saved state takes, with the budget as a dashed line.",
    )
    for place, (name, stored) in enumerate(ways):
        top = 12 + place * each
        svg.text(left, top + 14, name, 14, more=' font-weight="bold"')
        spans = list(update(stored))
        for span in spans:
            x, width = left + across * span.begin / longest, across * (span.end - span.begin) / longest
            svg.rect(x, top + 24, width - 1.5, 22, span.ink, ' rx="2"')
            svg.text(x + width / 2, top + 39, span.label, 11, "#ffffff", ' text-anchor="middle"')
        floor, scale = top + 142, 80 / peak(ways[2][1])
        points = [(left, floor)]
        for span in spans:
            for when, level in zip((span.begin, span.end), span.level):
                points.append((left + across * when / longest, floor - scale * level))
        svg.area(points, STORED if stored else REPLAYED)
        svg.line(left, floor, left + across, floor, GRID)
        if place < 2:
            height = floor - scale * BUDGET
            svg.line(left, height, left + across, height, INK, ' stroke-dasharray="5 4"')
            svg.text(left + across, height - 4, "memory budget", 11, PALE, ' text-anchor="end"')
    _legend(svg, int(3 * each) + 26)
    return svg.done()


def _legend(svg: Svg, y: float) -> None:
    kinds = ((RUN, "forward, backward"), (REPLAYED, "forward again"), (STORED, "stored layer"), (LOSS_INK, "loss"))
    x = 20.0
    for ink, name in kinds:
        svg.rect(x, y - 10, 12, 12, ink, ' rx="2"')
        svg.text(x + 18, y, name, 12, PALE)
        x += 42 + 7 * len(name)
    svg.text(20, y + 20, "Shaded: the memory of saved state. Times and bytes are in made-up units.", 12, PALE)


# ------------------------------------------------------------------------------------------------ choices


@dataclass(frozen=True)
class Choice:
    """One way to treat a layer: what each of the three columns says of it."""

    letter: str
    name: str
    ink: str
    kept: str
    used: str
    gradient: str


CHOICES = (
    Choice("H", "store", STORED, "all that backward will read", "handed out as it is", "exact"),
    Choice("L", "compress", COMPRESSED, "the same, some of it in low precision", "decoded", "small error"),
    Choice("R", "recompute", REPLAYED, "the layer's input only", "the layer runs again", "exact"),
)


def choices() -> str:
    """When the two decisions are made, and which way each can still turn."""
    svg = Svg(
        800,
        300,
        "What is prepared in forward, and what it may still become after the loss",
        "Stored state may be used, compressed or dropped for a replay; compressed state may be used or dropped for a "
        "replay; a layer of which only the input was kept is replayed.",
    )
    columns = (20.0, 430.0)
    svg.text(columns[0], 30, "Before the forward pass: what is kept", 14, more=' font-weight="bold"')
    svg.text(columns[1], 30, "After the loss: what backward uses", 14, more=' font-weight="bold"')
    for row, choice in enumerate(CHOICES):
        y = 50.0 + 78 * row
        for x, words in zip(columns, (choice.kept, f"{choice.used}; gradient: {choice.gradient}")):
            svg.rect(x, y, 300, 54, "#ffffff", f' rx="5" stroke="{choice.ink}" stroke-width="2"')
            svg.text(x + 14, y + 22, f"{choice.letter}  {choice.name}", 14, choice.ink, ' font-weight="bold"')
            svg.text(x + 14, y + 42, words, 13)
        for target in range(row, len(CHOICES)):
            end = 50 + 78 * target + 27 - 9 * (target - row)
            svg.line(columns[0] + 302, y + 27, columns[1] - 3, end, PALE, ' stroke-width="1.5" marker-end="url(#tip)"')
    svg.text(20, 290, "L is used only where max_gradient_error allows an error; the default is 0.", 12, PALE)
    return svg.done()


def figures() -> dict[str, str]:
    """File name and text of every figure."""
    return {"timeline.svg": timeline(), "choices.svg": choices()}
