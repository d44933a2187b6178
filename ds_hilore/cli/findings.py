"""What `hilore doctor` finds: one fault, or one thing to know, with its place and its remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """Whether a finding needs a change before a run."""

    WRONG = "wrong"  # the run is refused, or the block has no effect
    NOTE = "note"  # the run works, and something that was asked for has no effect
    SOUND = "sound"  # it was tried, and nothing is wrong


@dataclass(frozen=True)
class Finding:
    """`where`: a key of the JSON, a path of the model, a file, a package or a device."""

    what: str
    where: str
    remedy: str
    severity: Severity = Severity.WRONG

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.value}
