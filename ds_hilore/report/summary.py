"""A run of all its ranks in a few figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ds_hilore.report import words
from ds_hilore.report.reading import RankLog, Run


@dataclass(frozen=True)
class Summary:
    """The whole run. Ranks wait for each other, so the one that saves least counts, and the fullest.

    Attributes:
        followed: updates that followed plans for good.
        seconds: of all updates but the first, sampling and all else included.
        saved_seconds: promised in those by plans that are followed for good.
        saved_share: of what they would have taken without plans.
        peak_bytes, budget_bytes: of the rank that came closest to its budget; None where peaks were not measured, or
            no budget was known yet.
        error_mean, error_most: of audits; None where there was none.
        error_limit: the block's `max_gradient_error`.
        shortages: events of the guard, of all ranks.
    """

    ranks: int
    world: int
    updates: int
    followed: int
    seconds: float
    saved_seconds: float
    saved_share: float
    peak_bytes: int | None
    budget_bytes: int | None
    audits: int
    error_mean: float | None
    error_most: float | None
    error_limit: float
    shortages: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        """For a reader who reads nothing else."""
        if not self.followed:
            return "The run ended before plans were followed: the first updates only measure and try."
        if self.saved_seconds <= 0:
            return "Plans promised to save no time: no memory was free under the budget, or storing did not pay."
        return (
            f"By its own promises the run took {words.span(self.saved_seconds)} less than with every layer replayed: "
            f"{words.share(self.saved_share)} of the time that these updates would have taken, sampling and all else "
            "included."
        )

    def tiles(self) -> list[tuple[str, str]]:
        """Name and value of the figures on top of the page."""
        found = [
            (f"{'ranks' if self.world != 1 else 'rank'}", str(self.world)),
            ("time saved, promised", words.span(self.saved_seconds)),
            ("of the whole step", words.share(self.saved_share)),
        ]
        if self.budget_bytes is not None:
            peak = "not measured" if self.peak_bytes is None else words.size(self.peak_bytes)
            found.append((f"highest peak; budget {words.size(self.budget_bytes)}", peak))
        if self.error_limit:
            error = "none yet" if self.error_mean is None else words.share(self.error_mean)
            found.append((f"gradient error by {words.count_of(self.audits, 'audit')}", error))
        else:
            found.append(("gradients", "exact"))
        return [*found, ("times that memory ran short", str(self.shortages))]


def summarise(run: Run) -> Summary:
    """The run's figures."""
    audits = [audit.measured for audit in run.audits]
    slowest = min(run.ranks, key=lambda rank: rank.totals.saved_seconds)
    fullest = max(run.ranks, key=_fullness)
    limit = run.block.get("max_gradient_error")
    exact = run.block.get("mode") == "exact" or not isinstance(limit, float | int)
    return Summary(
        ranks=len(run.ranks),
        world=run.first.run.world,
        followed=max(rank.totals.followed for rank in run.ranks),
        updates=max(rank.totals.updates for rank in run.ranks),
        seconds=slowest.totals.seconds,
        saved_seconds=slowest.totals.saved_seconds,
        saved_share=slowest.totals.saved_share,
        peak_bytes=fullest.totals.peak_bytes,
        budget_bytes=fullest.totals.budget_bytes or None,
        audits=len(audits),
        error_mean=sum(audits) / len(audits) if audits else None,
        error_most=max(audits, default=None),
        error_limit=0.0 if exact or limit is None else float(limit),
        shortages=sum(rank.totals.shortages for rank in run.ranks),
    )


def _fullness(rank: RankLog) -> tuple[bool, float]:
    """Ranks whose peaks are measured come first."""
    totals = rank.totals
    if not totals.budget_bytes:
        return False, -1.0
    return totals.peak_bytes is not None, (totals.peak_bytes or 0) / totals.budget_bytes
