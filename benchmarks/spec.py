"""What one run of the update-step benchmark measures, as handed to its processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.methods import LOSSY, Suffix, base_of, is_hilore, needs_paper_engine, suffixes


@dataclass(frozen=True)
class Spec:
    """One run. The first fields say what an update is of; `methods` and `budgets` what is measured.

    Args:
        loss: of methods without a suffix: "chunked" or "logits".
        dead_rows: share of the rows with advantage 0.
        turns: updates per case.
    """

    preset: str
    full_finetuning: bool = False
    loss: str = "chunked"
    model: str | None = None
    layers: int | None = None
    rows: int | None = None
    dead_rows: float = 0.0
    max_gradient_error: float = 0.0
    threads: int = 1
    methods: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    turns: int = 1

    @property
    def error(self) -> float:
        """Of the gradient, that plans may cost: none where no method compresses, so that nothing is calibrated."""
        return self.max_gradient_error if {base_of(method) for method in self.methods} & set(LOSSY) else 0.0

    @property
    def paper(self) -> bool:
        """Whether the engine is one in mode paper; then all its planned methods are."""
        return any(map(needs_paper_engine, self.methods))

    @property
    def learns_whole_logits(self) -> bool:
        """Whether the engine's own updates, from which it learns what memory the loss takes, make whole logits; then
        those of all its planned methods do."""
        return self.loss == "logits" or any(map(needs_logits_engine, self.methods))


def needs_logits_engine(method: str) -> bool:
    """Whether the method is another engine's: plans count on the loss that their engine has learnt with."""
    return is_hilore(method) and Suffix.LOGITS in suffixes(method)


def engine_of(method: str) -> tuple[bool, bool]:
    """Methods that plan can share an engine where these are alike. All others run in any."""
    return needs_paper_engine(method), needs_logits_engine(method)


def read_spec(path: Path) -> Spec:
    data: dict[str, Any] = json.loads(path.read_text())
    return Spec(**{**data, "methods": tuple(data["methods"]), "budgets": tuple(data["budgets"])})
