"""A variant's name and what it does say the same."""

from __future__ import annotations

import pytest

from ds_hilore.core.errors import UsageError
from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, REPLAYED, STORED, Treatment
from ds_hilore.core.types import Action


@pytest.mark.parametrize(
    "treatment",
    [
        STORED,
        REPLAYED,
        OFFLOADED,
        INPUT_OFFLOADED,
        Treatment(Action.RECOMPUTE, keeps=("attention",)),
        Treatment(Action.STORE, keeps=("attention",)),
        Treatment(Action.COMPRESS, codecs=(("mlp", "int8:64"),)),
        Treatment(Action.COMPRESS, codecs=(("attention_out", "bf16"), ("mlp", "fp8_e4m3:unscaled"))),
    ],
    ids=lambda treatment: treatment.name,
)
def test_a_name_gives_its_treatment_again(treatment: Treatment) -> None:
    assert Treatment.parse(treatment.name) == treatment


@pytest.mark.parametrize(
    "name", ["", "X", "L", "L:", "L:mlp", "L:=bf16", "L:mlp=", "R:attention,,", "h", "O:", "O:attention"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="names no variant"):
        Treatment.parse(name)
