"""Budgets as written: what they parse to, that they survive being written again, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hilore.core.budget import (
    LARGEST_MULTIPLE,
    SMALLEST_BYTES,
    UNIT_BYTES,
    BudgetKind,
    MemoryBudget,
    RankBudgets,
    parse_budget,
)
from ds_hilore.core.errors import ConfigError

BYTES, SHARE, MULTIPLE = BudgetKind.BYTES, BudgetKind.DEVICE_SHARE, BudgetKind.CHECKPOINT_MULTIPLE


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("36GB", BYTES, 36_000_000_000),
        ("512MB", BYTES, 512_000_000),
        ("2GiB", BYTES, 2 * 1024**3),
        ("1.5 TiB", BYTES, 3 * 1024**4 // 2),
        ("0.1GB", BYTES, 100_000_000),  # exact, where 0.1 * 10**9 in floats need not be
        ("2097152b", BYTES, 2 << 20),
        (2_000_000_000, BYTES, 2_000_000_000),
        (0.9, SHARE, 0.9),
        (1.0, SHARE, 1.0),
        ("1.10x", MULTIPLE, 1.1),
        ("1.0x", MULTIPLE, 1.0),
        ("2 X", MULTIPLE, 2.0),
    ],
)
def test_what_is_written_is_what_is_meant(written: Any, kind: BudgetKind, value: float) -> None:
    assert parse_budget(written) == MemoryBudget(kind, value)


def test_a_list_has_one_entry_per_rank() -> None:
    budgets = parse_budget(["1.05x", 0.5, 4 << 30])
    assert isinstance(budgets, RankBudgets)
    assert [budgets.for_rank(rank, 3).kind for rank in range(3)] == [MULTIPLE, SHARE, BYTES]
    with pytest.raises(ConfigError, match="3 entries and the job has 2 ranks"):
        budgets.for_rank(0, 2)


def test_one_value_holds_for_every_rank() -> None:
    budget = parse_budget("1.10x")
    assert budget.for_rank(3, 8) is budget


@pytest.mark.parametrize(
    ("written", "expected_bytes"), [("1GiB", 1 << 30), (0.5, 4 << 30), ("1.5x", 3 << 30), ("1.0x", 2 << 30)]
)
def test_bytes_on_a_device(written: Any, expected_bytes: int) -> None:
    budget = parse_budget(written).for_rank(0, 1)
    in_bytes = budget.bytes_on(device_bytes=8 << 30, checkpointing_peak_bytes=2 << 30)
    assert in_bytes == expected_bytes and type(in_bytes) is int


@pytest.mark.parametrize("written", ["auto", "free", "Auto"])
def test_auto_is_what_others_leave(written: str) -> None:
    """A little less than that, and never more than the device."""
    budget = parse_budget(written).for_rank(0, 1)
    on = {ceiling: budget.bytes_on(8 << 30, 1, ceiling) for ceiling in (4 << 30, 8 << 30, 9 << 30, None)}
    assert 0.9 * (4 << 30) < on[4 << 30] < 4 << 30
    assert on[8 << 30] == on[9 << 30] == on[None] < 8 << 30
    assert parse_budget(budget.as_json()) == budget and budget.as_json() == "auto"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("0.99x", 'below "1.0x"'),
        ("1e3x", "cannot be read"),
        ("2000x", "limits nothing"),
        ("36", "no unit"),
        ("90%", "no unit"),
        ("36 gigs", 'unit "gigs"'),
        ("36G", 'unit "G"'),
        ("", "cannot be read"),
        ("-1GB", "cannot be read"),
        ("1KB", "less than 1 MiB"),
        (0, "less than 1 MiB"),
        (1, "write 1.0"),
        (-5, "less than 1 MiB"),
        (1.1, 'write "1.1x"'),
        (0.0, "above 0"),
        (-0.5, "above 0"),
        (math.nan, "above 0"),
        (math.inf, "above 0"),
        (True, "a bool is no budget"),
        (None, "a NoneType is no budget"),
        ({"bytes": 1}, "a dict is no budget"),
        ([], "the list is empty"),
        ([["1GB"]], "entry 0 is itself a list"),
        (["1GB", "1kb"], "entry 1 is '1kb'"),
    ],
)
def test_what_makes_no_sense_is_refused(written: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_budget(written)
    assert words in str(caught.value)


single = st.one_of(
    st.integers(SMALLEST_BYTES, 1 << 60),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(1.0, LARGEST_MULTIPLE).map(lambda multiple: f"{multiple!r}x"),
    st.sampled_from(["auto", "free", " AUTO "]),
)


@given(st.one_of(single, st.lists(single, min_size=1, max_size=5)))
def test_a_budget_survives_being_written_again(written: Any) -> None:
    budget = parse_budget(written)
    assert parse_budget(budget.as_json()) == budget


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(UNIT_BYTES)), st.booleans())
def test_units_are_exact_and_their_case_does_not_matter(whole: int, thousandths: int, unit: str, upper: bool) -> None:
    text = f"{whole}.{thousandths:03d}{unit.upper() if upper else unit}"
    expected = (whole * 1000 + thousandths) * UNIT_BYTES[unit] // 1000
    if expected < SMALLEST_BYTES:
        with pytest.raises(ValueError, match="less than 1 MiB"):
            parse_budget(text)
    else:
        assert parse_budget(text) == MemoryBudget(BYTES, expected)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_with_what_is_allowed(text: str) -> None:
    try:
        budget = parse_budget(text)
    except ValueError as error:
        assert "allowed:" in str(error) or "1.0x" in str(error)
    else:
        assert isinstance(budget, MemoryBudget)
