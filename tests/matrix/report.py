"""docs/compatibility.md: the result of each cell, and which pairs of settings are proven by none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.matrix.cell import BITWISE, CLOSE, HOST, REFUSED
from tests.matrix.settings import AXES, IMPOSSIBLE, Cell, Pair, all_pairs, cells, pairs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

_HEAD = """# Compatibility

Every pair of the settings below occurs in some row, as far as the host has it. In each row two ranks of a tiny model
train three updates with plans that differ between ranks (replay everything; one rank stores and the other replays; in
turns), and their reduced gradients are compared with those of DeepSpeed without any checkpointing. Written by

    python -m tests.matrix --write docs/compatibility.md

* **same bits**: all gradients are. **within 1e-6**: of each parameter's gradient, relative, in float32.
* **refused**: by ds_hilore, with a typed error. **not the host's**: DeepSpeed, transformers or peft refuse it.
* quantised: 4-bit layers of bitsandbytes under LoRA. autocast: DeepSpeed's `torch_autocast`. compiled:
  `module.compile()` of each layer's MLP. In the vision-language model (`qwen2_5_vl`) the second rank sees no image, but
  under ZeRO-3, where the host itself would hang.
* fp16 is not among them: DeepSpeed's loss scaling does not run on CPU.
"""


def is_sound(result: str) -> bool:
    """Whether a result is one that may be: of all ranks the same, right gradients or a clear refusal."""
    return " / " not in result and result.startswith((BITWISE, CLOSE, REFUSED, HOST))


def is_right(result: str) -> bool:
    """Whether gradients were compared, and right."""
    return is_sound(result) and result.startswith((BITWISE, CLOSE))


def page(found: Mapping[int, str]) -> str:
    """The page, from the results of all cells."""
    known = cells()
    rows = [[known[number][axis] for axis in AXES] + [_cut(result)] for number, result in sorted(found.items())]
    columns = [*AXES, "result"]
    table = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    table += [f"| {' | '.join(row)} |" for row in rows]
    right = sum(map(is_right, found.values()))
    return "\n".join(
        [_HEAD, f"{right} of {len(found)} rows were compared and are right.", "", *table, "", *_open(found)]
    )


def _cut(result: str) -> str:
    return result.replace("|", "/").replace("\n", " ")[:160]


def _open(found: Mapping[int, str]) -> list[str]:
    """Pairs that no row proves, with the reason."""
    known = cells()
    proven = {pair for number, result in found.items() if is_right(result) for pair in pairs(known[number])}
    said = ["## Pairs that no row proves", ""]
    said += [f"* {_text(pair)}: {reason}" for pair, reason in IMPOSSIBLE.items()]
    for pair in all_pairs():
        if pair not in proven:
            numbers = [number for number in found if pair in pairs(known[number])]
            said.append(f"* {_text(pair)}: {'; '.join(dict.fromkeys(_cut(found[number]) for number in numbers))}")
    return [*said, ""]


def _text(pair: Pair) -> str:
    return " with ".join(f"{axis} {value}" for axis, value in pair)


def recorded(text: str) -> list[tuple[Cell, str]]:
    """The rows of a page: cell and result."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(dict(zip(AXES, row[:-1])), row[-1]) for row in lines[1:]]
