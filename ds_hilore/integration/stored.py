"""What an engine measured, kept from run to run: the profile of its units, and calibration where plans may compress."""

from __future__ import annotations

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
    stage = getattr(engine, "stage_id", None)  # of a pipeline
    key = _profile_key(engine, config)
    store = ProfileStore(config.profile.path, key, "all" if stage is None else f"stage{stage}")
    if _all_know(store, controller.parts):
        controller.learning.known = isinstance(store.restore(controller.measurements), StoredProfile)
    if rank == 0 or stage:
        controller.learning.learnt = store.save


def _all_know(store: ProfileStore, parts: ControllerParts) -> bool:
    """Ranks that agree on replays measure in step: all of them go by a stored profile, or none does."""
    if parts.agreement is None or parts.plane is None:
        return True
    return all(parts.plane.exchange("stored profile", isinstance(store.load(), StoredProfile)))


def keep_calibration(engine: Any, config: HiLoReConfig, checks: GradientChecks, rank: int) -> None:
    """Calibration goes on where an earlier run of this setting was, and is stored by each rank for itself."""
    if config.profile.path is None:
        return
    store = CalibrationStore(config.profile.path, _profile_key(engine, config), rank)
    found = store.load()
    checks.go_on(found if isinstance(found, Progress) else None, store.save)


def _profile_key(engine: Any, config: HiLoReConfig) -> Fingerprint:
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
