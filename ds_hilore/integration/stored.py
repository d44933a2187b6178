"""What an engine measured, kept from run to run: the profile of its units, and calibration where plans may compress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_hilore.core.config import HiLoReConfig, Mode
from ds_hilore.integration.gradient_checks import GradientChecks
from ds_hilore.integration.model_parallel import tensor_parallel_size
from ds_hilore.integration.profile_key import profile_fingerprint
from ds_hilore.profiling.calibration_layout import Progress
from ds_hilore.profiling.layout import Fingerprint, StoredProfile
from ds_hilore.profiling.store import CalibrationStore, ProfileStore
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.parts import ControllerParts


def keep_profile(engine: Any, config: HiLoReConfig, controller: Controller, rank: int) -> None:
    """What an earlier run of this setting has measured is taken over; what this one measures is stored, by one rank
    for all that measure the same."""
    if config.profile.path is None:
        return
    store = ProfileStore(config.profile.path, profile_key(engine, config), rank_class(engine))
    take_up_profile(store, controller)
    if keeps_profile(engine, rank):
        controller.learning.learnt = store.save


def rank_class(engine: Any) -> str:
    """Of ranks that measure the same: all, or those of one pipeline stage."""
    stage = getattr(engine, "stage_id", None)
    return "all" if stage is None else f"stage{stage}"


def keeps_profile(engine: Any, rank: int) -> bool:
    """Whether this rank stores the profile of its class."""
    return rank == 0 or bool(getattr(engine, "stage_id", None))


def take_up_profile(store: ProfileStore, controller: Controller) -> None:
    """Measurements are those of a stored profile, where there is one that may be used."""
    if _all_know(store, controller.parts):
        controller.learning.known = isinstance(store.restore(controller.measurements), StoredProfile)


def _all_know(store: ProfileStore, parts: ControllerParts) -> bool:
    """Whether this rank may use a stored profile. Ranks that agree on replays measure in step: all of them go by a
    stored profile, or none does."""
    if parts.agreement is None or parts.plane is None:
        return True
    return all(parts.plane.exchange("stored profile", isinstance(store.load(), StoredProfile)))


def keep_calibration(engine: Any, config: HiLoReConfig, checks: GradientChecks, rank: int) -> None:
    """Calibration goes on where an earlier run of this setting was, and is stored by each rank for itself."""
    if config.profile.path is None:
        return
    store = CalibrationStore(config.profile.path, profile_key(engine, config), rank)
    take_up_calibration(store, checks, store.save)


def take_up_calibration(
    store: CalibrationStore, checks: GradientChecks, keep: Callable[[Progress], object] | None = None
) -> None:
    """Calibration goes on where a stored one is. `keep`: as `GradientChecks.go_on` has it."""
    found = store.load()
    checks.go_on(found if isinstance(found, Progress) else None, keep)


def profile_key(engine: Any, config: HiLoReConfig) -> Fingerprint:
    """The setting of an engine, as what it measured is stored with it."""
    tried = ", ".join(config.codecs) if config.compresses else "exact"
    if config.mode is Mode.PAPER:
        tried = f"paper {tried} {config.paper.least_tensor_bytes} {' '.join(config.paper.dtypes)}"
    return profile_fingerprint(
        engine.module,
        zero_stage=engine.zero_optimization_stage(),
        world_size=engine.world_size,
        loss_path="any",  # the loss is no unit
        device=torch.device(engine.device),
        state=tried,
        tensor_parallel=tensor_parallel_size(engine.mpu),
    )
