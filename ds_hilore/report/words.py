"""Figures as people read them."""

from __future__ import annotations

_MINUTE, _HOUR = 60, 3600


def size(count: float) -> str:
    """Bytes."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.1f} MB"


def span(seconds: float) -> str:
    """A time: three digits, or hours and minutes."""
    if abs(seconds) < _MINUTE * 10:
        return f"{seconds:.3g} s"
    if abs(seconds) < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h {seconds % _HOUR / _MINUTE:.0f} min"


def share(part: float) -> str:
    """A part of 1, in per cent: three digits where it is small."""
    return f"{part:.1%}" if abs(part) >= 0.01 or part == 0 else f"{part * 100:.2g} %".replace(" %", "%")


def count_of(count: int, thing: str) -> str:
    """ "1 update", "2 updates"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def plain(value: object, most: int = 120) -> str:
    """One line of printable text, of at most so many characters."""
    text = "".join(sign if sign.isprintable() else "?" for sign in str(value)[: 4 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."
