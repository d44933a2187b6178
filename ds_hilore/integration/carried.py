"""What an engine measured travels with its checkpoints, so that a resumed run goes on where the saved one was.

    <save_dir>/<tag>/hilore/*.json    beside DeepSpeed's own files: the profile, and the calibration of each rank with
                                      its audits, as profiling/store.py writes and checks them

Weights, optimizer state and random numbers are DeepSpeed's and the caller's. Of ours nothing else outlives an update:
the first two updates of a resumed run replay everything, since their peak is "1.0x" on the machine of today. Whatever
was measured in another setting (another ZeRO stage or world size, for example) is named in the log and measured anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.integration.gradient_checks import GradientChecks
from ds_hilore.integration.stored import (
    keeps_profile,
    profile_key,
    rank_class,
    take_up_calibration,
    take_up_profile,
)
from ds_hilore.profiling.store import CalibrationStore, ProfileStore
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.parts import Stage

#: Of a checkpoint, what is ours.
FOLDER = "hilore"


@dataclass
class CarriedState:
    """What one rank puts beside its checkpoints. Every rank is in both methods, as in DeepSpeed's own."""

    engine: Any
    config: HiLoReConfig
    controller: Controller
    plane: ControlPlane
    checks: GradientChecks | None = None

    def save(self, save_dir: str | os.PathLike[str], tag: str | None) -> None:
        """A checkpoint was saved. Where the disk does not let it, that is said, and the checkpoint stands.

        Args:
            save_dir, tag: as DeepSpeed was given them; its default tag is that of its `save_checkpoint`.
        """
        name = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        profile, calibration = self._stores(Path(save_dir) / name)
        learning = self.controller.learning
        # before plans are followed, measurements are not complete
        if keeps_profile(self.engine, self.plane.rank) and learning.stage is Stage.PLANNED:
            profile.save(learning.measurements)
        if self.checks is not None:
            calibration.save(self.checks.progress)

    def load(self, load_path: str | os.PathLike[str]) -> None:
        """A checkpoint was loaded into an engine that has made no update yet; one that has knows itself better.

        Args:
            load_path: of the file that DeepSpeed says it has read.
        """
        learning = self.controller.learning
        if self.controller.update > 0 or learning.stage is not Stage.MEASURE_R:
            return
        profile, calibration = self._stores(Path(load_path).parent)
        if not learning.known and not learning.measurements.roster:
            take_up_profile(profile, self.controller)
        if self.checks is not None:
            take_up_calibration(calibration, self.checks)

    def _stores(self, checkpoint: Path) -> tuple[ProfileStore, CalibrationStore]:
        folder, key = os.path.abspath(checkpoint / FOLDER), profile_key(self.engine, self.config)
        return ProfileStore(folder, key, rank_class(self.engine)), CalibrationStore(folder, key, self.plane.rank)
