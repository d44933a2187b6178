"""Records as a run of the update-step benchmark gives them, made up."""

from __future__ import annotations

from benchmarks.records import Record

FLOOR = 1_000_000_000
TORCH_BYTES, NONE_BYTES = 1_400_000_000, 2_400_000_000
#: Time without checkpointing, of that with it.
NONE_TIME = 0.7


def record(
    method: str,
    budget: str | None = None,
    budget_bytes: int | None = None,
    time: float = 1.0,
    counted: float | None = None,
    **changes: object,
) -> Record:
    """One with an interval of +-0.01 whose peak is its budget's, or that of checkpointing."""
    made = {
        "method": method,
        "budget": budget,
        "budget_bytes": budget_bytes,
        "phi": None if budget_bytes is None else (budget_bytes - TORCH_BYTES) / (NONE_BYTES - TORCH_BYTES),
        "time_ratio_to_checkpointing": time,
        "time_ratio_low": time - 0.01,
        "time_ratio_high": time + 0.01,
        "time_ratio_to_none": time / NONE_TIME,
        "time_ratio_to_none_low": (time - 0.01) / NONE_TIME,
        "time_ratio_to_none_high": (time + 0.01) / NONE_TIME,
        "recovered_share": (1 - time) / (1 - NONE_TIME),
        "counted_share": counted,
        "peak_bytes": budget_bytes or TORCH_BYTES,
        "floor_bytes": FLOOR,
        "predicted_peak_bytes": None,
        "gradient_error": 0.0,
        "actions": {"H": 3, "R": 27},
        "pairs": 4,
        "policy": "",
    }
    return Record(**{**made, **changes})  # type: ignore[arg-type]


def references() -> list[Record]:
    return [
        record("none", time=NONE_TIME, counted=1.0, peak_bytes=NONE_BYTES),
        record("torch", counted=0.0),
    ]
