"""Every error this package raises on purpose, as one small tree.

A user's mistake is a `ValueError` kind, a broken run a `RuntimeError` kind. A message says what is wrong, where
(unit and rank, where there are any) and what to do. `assert` is kept for our own bugs.
"""

from __future__ import annotations


class HiLoReError(Exception):
    """Base of every error raised by ds_hilore."""


class ConfigError(HiLoReError, ValueError):
    """The "hilore" block, or what it asks for together with the rest of the DeepSpeed JSON, cannot be honoured."""


class UsageError(HiLoReError, ValueError):
    """A public function was called with arguments, or at a time, that make no sense."""


class UnsupportedError(HiLoReError, ValueError):
    """The model or the host uses something that is refused until it is proven (design fact 6)."""


class DependencyMissing(HiLoReError, ImportError):
    """A package is needed here and is not installed, or is too old. The message names the pip command."""


class RecoveryError(HiLoReError, RuntimeError):
    """Saved state of a unit could not be recovered exactly."""


class RecoveryMismatch(RecoveryError):
    """A replay saved other tensors than the forward pass: another count, shape or dtype."""


class StateChanged(RecoveryError):
    """A tensor or parameter that backward needs was changed between forward and backward."""


class OffloadError(RecoveryError):
    """Saved state could not be copied to host memory or back. The update has to run again on all ranks."""


class SpentError(RecoveryError):
    """State was asked for a second time after it was freed at its last use."""


class PlanError(HiLoReError, RuntimeError):
    """A plan does not fit the units, the lattice or the budget it was made for. Our own bug, or a foreign plan."""


class MemoryExhausted(HiLoReError, RuntimeError):
    """An allocation failed and nothing was left to give up. The update has to run again on all ranks."""


class GradientMismatch(HiLoReError, RuntimeError):
    """The self-check found a gradient that is not the plain model's. Names rank, unit, parameter. No step was made."""


class RankMismatch(HiLoReError, RuntimeError):
    """Ranks disagree on something that all must share, or one of them did not answer in time."""
