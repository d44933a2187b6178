"""Variants of a unit, put together from measured parts."""

from __future__ import annotations

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action, Place, Shape, Variant
from ds_hilore.profiling.host_link import LinkSpeed
from ds_hilore.profiling.variants import StateFits, Whole, components, compressions, error_of, variants

SHAPE = Shape(2, 8)
#: (bytes of the group, bytes under bf16, bytes under int8)
GROUPS = {"mlp": (4000, 2000, 1100), "attention_qk": (1000, 500, 300), "residual": (800, 400, 220)}


def state(bf16: bool = True) -> StateFits:
    made = StateFits()
    made.operator("attention").held.note(SHAPE, 600)
    made.operator("attention").seconds.note(SHAPE, 0.3)
    for group, (raw, half, quarter) in GROUPS.items():
        made.group(group).note(SHAPE, raw)
        for codec, held, error in (("bf16", half, 0.002), ("int8", quarter, 0.01)):
            if codec == "int8" or bf16:
                fits = made.codec(group, codec)
                fits.held.note(SHAPE, held)
                fits.encode.note(SHAPE, 0.01)
                fits.decode.note(SHAPE, 0.02)
                fits.note_error(error)
    return made


def made(
    parts: StateFits,
    risk: float | None = 0.5,
    gains: dict[str, float] | None = None,
    link: LinkSpeed | None = None,
    position: int = 0,
) -> dict[str, Variant]:
    whole = Whole(SHAPE, 500, 7000, 1.0, (gains or {}).get, lambda treatment: risk, link=link, position=position)
    return {variant.name: variant for variant in variants(whole, parts)}


def test_r_comes_first_and_costs_no_more_than_its_inputs() -> None:
    found = made(state())
    assert next(iter(found)) == "R"
    assert found["R"].held_bytes == 500 and found["R"].workspace_bytes == 7000 and found["R"].saved_seconds == 0
    assert found["H"].held_bytes == 7500 and found["H"].saved_seconds == 1.0


def test_kept_attention_moves_bytes_from_the_replay_to_what_is_held() -> None:
    found = made(state())["R:attention"]
    assert (found.held_bytes, found.workspace_bytes, found.action) == (1100, 6400, Action.RECOMPUTE)
    assert abs(found.saved_seconds - 0.3) < 1e-9 and found.risk == 0


def test_a_compressed_variant_adds_up_its_groups() -> None:
    found = made(state())["L:mlp=int8"]
    assert found.held_bytes == 500 + 7000 - 4000 + 1100
    assert found.workspace_bytes == found.forward_bytes == 4000
    assert abs(found.saved_seconds - 0.98) < 1e-9 and abs(found.prepare_seconds - 0.01) < 1e-9
    assert found.risk == 0.5 and found.codecs == (("mlp", "int8"),)


def test_what_is_offered_in_float32_and_in_bfloat16() -> None:
    everything = (("attention_qk", "bf16"), ("mlp", "bf16"), ("residual", "bf16"))
    mixed = (("attention_qk", "bf16"), ("mlp", "int8"), ("residual", "bf16"))
    assert compressions(state(), SHAPE) == [everything, (("mlp", "int8"),), mixed]
    # queries and keys stay exact where only a cheap codec makes them smaller
    assert compressions(state(bf16=False), SHAPE) == [(("mlp", "int8"), ("residual", "int8")), (("mlp", "int8"),)]


def test_no_risk_known_no_compression() -> None:
    assert all(variant.action is not Action.COMPRESS for variant in made(state(), risk=None).values())


def test_measured_gains_take_the_place_of_computed_ones() -> None:
    found = made(state(), gains={"H": 0.7, "R:attention": 0.2, "L:mlp=int8": 0.5})
    assert found["H"].saved_seconds == 0.7 and found["R:attention"].saved_seconds == 0.2
    # what was measured holds encoding, which plans charge by itself
    assert abs(found["L:mlp=int8"].saved_seconds - found["L:mlp=int8"].prepare_seconds - 0.5) < 1e-9


def test_names_say_what_to_do() -> None:
    for name, variant in made(state()).items():
        treatment = Treatment.parse(name)
        assert treatment.action is variant.action and treatment.codecs == variant.codecs


def test_components_of_what_is_offered() -> None:
    mixed = (("attention_qk", "bf16"), ("mlp", "int8"), ("residual", "bf16"))
    rest = (("attention_qk", "bf16"), ("residual", "bf16"))
    assert components(mixed) == {("rest", "bf16"): rest, ("mlp", "int8"): (("mlp", "int8"),)}


def test_errors_of_several_groups_are_a_root_mean_square() -> None:
    parts = StateFits()
    parts.codec("mlp", "bf16").note_error(3.0)
    parts.codec("residual", "bf16").note_error(4.0)
    assert abs(error_of(parts, [("mlp", "bf16"), ("residual", "bf16")]) - (12.5**0.5)) < 1e-12


def test_offloaded_state_holds_nothing_on_the_device_but_while_it_moves() -> None:
    found = made(state(), link=LinkSpeed(1e9, overlaps=True, rounding=2.0))
    bundle, inputs = found["O"], found["O:input"]
    assert (bundle.action, inputs.action) == (Action.STORE, Action.RECOMPUTE)
    assert bundle.place is inputs.place is Place.HOST
    assert bundle.held_bytes == 2 * 7500 and inputs.held_bytes == 2 * 500
    assert (bundle.forward_bytes, bundle.workspace_bytes) == (7500, 7500)
    assert (inputs.forward_bytes, inputs.workspace_bytes) == (500, 7500)
    assert bundle.saved_seconds == found["H"].saved_seconds == 1.0 and inputs.saved_seconds == 0.0


def test_a_bundle_goes_from_as_many_units_as_the_link_can_hide() -> None:
    """A copy takes 1.5 s and a unit 1 s, of which 0.8 s may be used: every second unit."""
    link = LinkSpeed(7500 / 1.5, overlaps=True)
    assert ["O" in made(state(), link=link, position=place) for place in range(4)] == [True, False, True, False]
    assert all("O:input" in made(state(), link=link, position=place) for place in range(4))


def test_copies_that_hold_the_device_up_are_charged_both_ways() -> None:
    found = made(state(), link=LinkSpeed(75_000, overlaps=False), position=1)
    assert abs(found["O"].saved_seconds - (1.0 - 2 * 0.1)) < 1e-9
    assert abs(found["O:input"].saved_seconds + 2 * 500 / 75_000) < 1e-9


def test_measured_seconds_of_offloaded_state_take_the_place_of_computed_ones() -> None:
    found = made(state(), gains={"O": 0.7, "O:input": -0.1}, link=LinkSpeed(1e9, overlaps=True))
    assert found["O"].saved_seconds == 0.7 and found["O:input"].saved_seconds == -0.1
