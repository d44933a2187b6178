"""A rank's run in a few figures, and in the one line that ends its log."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hilore.report import words
from ds_hilore.report.records import FOLLOWED, AuditRecord, UpdateRecord


@dataclass
class Totals:
    """What is summed up of a rank's updates.

    Attributes:
        followed: updates that followed plans for good.
        seconds: of all updates but the first, whose beginning nobody saw; sampling and all else included.
        saved_seconds: promised in those by plans that are followed for good.
        peak_bytes: the highest since there is a budget; None where peaks are not measured.
        budget_bytes: the newest.
        errors: measured by audits, one for each.
        shortages: events of the guard.
    """

    updates: int = 0
    followed: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0
    budget_bytes: int = 0
    peak_bytes: int | None = None
    audits: int = 0
    error_sum: float = 0.0
    error_most: float = 0.0
    shortages: int = 0

    def add(self, update: UpdateRecord) -> None:
        """One more update."""
        self.updates += 1
        self.followed += update.stage == FOLLOWED
        if update.seconds is not None:
            self.seconds += update.seconds
            self.saved_seconds += update.kept_seconds
        self.shortages = update.shortages
        if update.budget_bytes:
            self.budget_bytes = update.budget_bytes
            if update.peak_bytes is not None:
                self.peak_bytes = max(self.peak_bytes or 0, update.peak_bytes)

    def add_audit(self, audit: AuditRecord) -> None:
        """One more audit."""
        self.audits += 1
        self.error_sum += audit.measured
        self.error_most = max(self.error_most, audit.measured)

    @property
    def saved_share(self) -> float:
        """Of the time that these updates would have taken without plans."""
        without = self.seconds + self.saved_seconds
        return self.saved_seconds / without if without > 0 else 0.0

    def line(self, error_limit: float) -> str:
        """The end of a run in one line.

        Args:
            error_limit: the block's `max_gradient_error`.
        """
        begun = words.count_of(self.updates, "update")
        if not self.followed:
            return f"the run ends after {begun}, before plans are followed: the first updates measure and try"
        said = [
            f"the run ends after {begun}. Plans promised to save {words.span(self.saved_seconds)}, "
            f"{words.share(self.saved_share)} of what the updates would have taken without them",
            self._peak(),
            self._error(error_limit),
        ]
        if self.shortages:
            said.append(f"memory ran short {self.shortages} x")
        return "; ".join(said)

    def _peak(self) -> str:
        budget = f"the budget of {words.size(self.budget_bytes)}"
        if self.peak_bytes is None:
            return f"peaks were not measured against {budget}"
        return f"highest peak {words.size(self.peak_bytes)} of {budget}"

    def _error(self, limit: float) -> str:
        if limit == 0:
            return "gradients exact"
        if not self.audits:
            return f"gradient error up to {words.share(limit)} allowed, and no audit"
        mean = self.error_sum / self.audits
        return (
            f"audited gradient error {words.share(mean)} on average, {words.share(self.error_most)} at most "
            f"({words.count_of(self.audits, 'audit')}, {words.share(limit)} allowed)"
        )
