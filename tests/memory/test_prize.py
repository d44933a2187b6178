"""What storing every unit would take, and what is said of it."""

from __future__ import annotations

from ds_hilore.core.types import Action, Place, UnitId, UnitProfile, Variant
from ds_hilore.memory.prize import Prize, storing_bytes

R = Variant("R", Action.RECOMPUTE, 10)
DERIVED = Variant("H", Action.STORE, 70, saved_seconds=1.0)


def unit(*variants: Variant) -> UnitProfile:
    return UnitProfile(UnitId("layer"), "layer", (R, *variants))


def test_storing_counts_beyond_replaying() -> None:
    assert storing_bytes([unit(DERIVED), unit(DERIVED)]) == 2 * (70 - 10)


def test_units_that_can_only_be_replayed_count_for_nothing() -> None:
    on_host = Variant("O", Action.STORE, 90, saved_seconds=1.0, place=Place.HOST)
    compressed = Variant("L", Action.COMPRESS, 40, saved_seconds=1.0)
    assert storing_bytes([unit(), unit(on_host), unit(compressed)]) == 0


def test_of_several_ways_the_fastest_counts_and_the_smallest_of_equals() -> None:
    slower = Variant("H:less", Action.STORE, 50, saved_seconds=0.5)
    larger = Variant("H:more", Action.STORE, 90, saved_seconds=1.0)
    assert storing_bytes([unit(slower, larger, DERIVED)]) == 70 - 10


def test_it_is_said_beside_the_free_bytes() -> None:
    prize = Prize(200_000_000, 150_000_000, 10.0, 2.5, 1.0, 190_000_000, storing_bytes=300_000_000)
    assert "50 MB (replaying every unit peaks at 150 MB, storing every unit takes 300 MB more)" in prize.lines()[0]
    assert prize.as_json()["storing_bytes"] == 300_000_000
    assert "storing" not in str(Prize(200_000_000, 150_000_000, 10.0, 2.5, 1.0, 190_000_000))
