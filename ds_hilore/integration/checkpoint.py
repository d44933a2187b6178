"""The checkpoint function that hosts call, and its place in DeepSpeed.

`checkpoint` is what transformers models get as their gradient-checkpointing function and what
`deepspeed.checkpointing.checkpoint` is while an engine with a "hilore" block is attached. Inside such an engine's
forward it is a recovery unit; anywhere else it does what was there before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.recovery.unit import inside_unit
from ds_hilore.runtime.current import running

_MARKER = "_hilore_original"


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` so that its saved state is recovered as the plan says.

    Within a unit: a plain call, part of that unit. Outside of the forward of an engine with a "hilore" block: torch's
    non-reentrant checkpoint, which is exact and bounded in memory (so an exact gradient beside the engine fits, design
    fact 5).

    Source: `deepspeed.checkpointing.checkpoint`, `torch.utils.checkpoint.checkpoint`.
    """
    if inside_unit():  # of its forward, or of its replay in backward, where no engine's forward runs
        return function(*args, **kwargs)
    controller = running()
    if controller is None:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return controller.run_unit(function, args, kwargs)


class DeepSpeedCheckpointPatch:
    """Puts `checkpoint` in place of DeepSpeed's, on all its import paths, for as long as any engine needs it.

    `deepspeed.checkpointing` is the module `deepspeed.runtime.activation_checkpointing.checkpointing`, so one
    attribute serves both paths. `configure`, `reset` and `is_configured` stay DeepSpeed's own. Not covered: code that
    bound the function with `from ... import checkpoint` before the engine was made, and `PipelineModule`'s default
    argument, which is bound at import.
    """

    @staticmethod
    def apply() -> None:
        """Patches, or counts one more user of the patch.

        Raises:
            UnsupportedError: this DeepSpeed's function has another signature than we know.
        """
        from deepspeed.runtime.activation_checkpointing import checkpointing

        current = checkpointing.checkpoint
        if hasattr(current, _MARKER):
            current._hilore_users += 1
            return
        kinds = [parameter.kind for parameter in inspect.signature(current).parameters.values()]
        if kinds[:2] != [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL]:
            raise UnsupportedError(
                f"deepspeed.checkpointing.checkpoint has the signature {inspect.signature(current)}, ds_hilore knows "
                "(function, *args, ...); use deepspeed from 0.18.3 to 0.19.8"
            )

        def checkpoint_or_original(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if inside_unit():
                return function(*args, **kwargs)
            controller = running()
            if controller is None:
                return current(function, *args, **kwargs)
            return controller.run_unit(function, args, kwargs)

        setattr(checkpoint_or_original, _MARKER, current)
        checkpoint_or_original._hilore_users = 1  # type: ignore[attr-defined]
        checkpointing.checkpoint = checkpoint_or_original

    @staticmethod
    def undo() -> None:
        """Counts one user less; the last one puts DeepSpeed's own function back."""
        from deepspeed.runtime.activation_checkpointing import checkpointing

        current = checkpointing.checkpoint
        original = getattr(current, _MARKER, None)
        if original is None:
            return
        current._hilore_users -= 1
        if current._hilore_users == 0:
            checkpointing.checkpoint = original


def deepspeed_checkpoint() -> Callable[..., Any]:
    """DeepSpeed's own checkpoint function, under our patch of it; for comparisons.

    It is reentrant: without an input that needs a gradient (LoRA on a frozen embedding) nothing would be
    differentiated, so the first layer's input is made to need one, as `enable_input_require_grads` does.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    original = getattr(checkpointing.checkpoint, _MARKER, checkpointing.checkpoint)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if isinstance(first, Tensor) and not first.requires_grad:
            args = (first.detach().requires_grad_(), *args[1:])
        return original(partial(function, **kwargs), *args)

    return run


class ModelParallelRng:
    """DeepSpeed's (and Megatron-DeepSpeed's) model-parallel random state tracker, as recovery/ wants it."""

    def get_states(self) -> Any:
        from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

        return get_cuda_rng_tracker().get_states()

    def set_states(self, states: Any) -> None:
        from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

        get_cuda_rng_tracker().set_states(states)

    @classmethod
    def if_used(cls) -> ModelParallelRng | None:
        """The tracker where it holds any state (a host has seeded it), else None."""
        tracker = cls()
        return tracker if tracker.get_states() else None
