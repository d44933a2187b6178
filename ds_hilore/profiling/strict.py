"""What stored files have in common: no unknown keys, no conversions, a bound on every text and number."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, le=1 << 60)]
#: What is larger is no measurement.
LARGEST = 1e18
Amount = Annotated[float, Field(ge=0, le=LARGEST)]


class Strict(BaseModel):
    """No unknown keys, no conversion of types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
