"""The suite as tables of docs/reliability.md, made by `python -m docs.generate`.

tests/faults/test_faults.py holds every line of them to what happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.faults.elsewhere import ELSEWHERE
from tests.faults.endings import ENDINGS, Ending
from tests.faults.records import RIGHT, Fault, Place
from tests.faults.suite import FAULTS

#: Exceptions of the caller's own, which must reach it as they are.
OWN = {"Planted": "its own exception", "KeyboardInterrupt": "`KeyboardInterrupt`", "SystemExit": "`SystemExit`"}


def becomes(what: str) -> str:
    """An outcome in words."""
    if what == RIGHT:
        return "right result"
    return OWN.get(what, f"`{what}`")


def _where(fault: Fault) -> str:
    return "all" if len(fault.ranks) == 2 else "one"


def _outcome(fault: Fault) -> str:
    if fault.open:
        return f"open: {fault.open}"
    if len(fault.ranks) == 2 or fault.becomes == fault.others:
        return becomes(fault.becomes)
    return f"{becomes(fault.becomes)}; on the other rank {becomes(fault.others)}"


def _name(each: Fault | Ending) -> str:
    return f"{each.name} \\*" if each.thorough else each.name


def _stages(fault: Fault) -> str:
    return ", ".join(map(str, fault.stages))


def summary() -> str:
    """Figures of the whole suite, counted from its records."""
    tried = [fault for fault in FAULTS if not fault.open]
    right = sum(fault.becomes == fault.others == RIGHT for fault in tried)
    cases = sum(len(fault.stages) for fault in tried)
    rows: list[tuple[str, int]] = [
        ("kinds of faults, on two ranks", len(tried) + len(ENDINGS)),
        ("cases: a fault under one ZeRO stage", cases + len(ENDINGS)),
        ("kinds that CI tries", sum(not each.thorough for each in (*tried, *ENDINGS))),
        ("right result", right),
        ("an error on every rank, then a right next update", len(tried) - right),
        ("the process of a rank ends, and the other is told by an error", len(ENDINGS)),
        ("a hang", sum(fault.open.startswith("a hang") for fault in FAULTS)),
        ("a gradient that is silently wrong", sum(fault.open.startswith("a wrong gradient") for fault in FAULTS)),
        ("something else that is open", sum(bool(fault.open) and not fault.open.startswith("a ") for fault in FAULTS)),
        ("further kinds, proven by tests of their own", len(ELSEWHERE)),
    ]
    return _table(("", ""), [(name, str(count)) for name, count in rows])


def faults() -> str:
    """All faults by their places."""
    parts = []
    for place in Place:
        chosen = [fault for fault in FAULTS if fault.place is place]
        rows: list[tuple[str, ...]] = [(_name(f), _where(f), _stages(f), _outcome(f)) for f in chosen]
        if place is Place.PROCESSES:
            rows = [(_name(e), "one", str(e.stage), f"on the other rank {becomes(e.told)}") for e in ENDINGS]
        head = ("fault", "ranks", "ZeRO", "what becomes of the update")
        parts.append(f"### {place.value}\n\n{_table(head, rows)}")
    rows = [(name, f"`{test}`") for name, test in ELSEWHERE.items()]
    parts.append(f"### Proven by tests of their own\n\n{_table(('fault', 'test'), rows)}")
    return "\n\n".join(parts)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines: Iterable[tuple[str, ...]] = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
