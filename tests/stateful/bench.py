"""An engine of ours and DeepSpeed without checkpointing, which makes the same updates a step later.

The reference sees whole updates only: what ours has thrown away by an exception, or never differentiated, is not in
them. So nothing of ours stands behind both sides of the comparison.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.integration.deepspeed_engine import attach
from tests.engines import config, gradients
from tests.integration import updates
from tests.models import batch, llama, lora, plain_loss

LAYERS = 2


class Planted(Exception):
    """Stands for any exception of the user's own."""


@dataclass(frozen=True)
class Forward:
    """One forward with grad: its data and its random numbers."""

    seed: int
    rows: int
    tokens: int


#: Forwards of one backward.
Microbatch = tuple[Forward, ...]


class Engines:
    """The two engines.

    Args:
        stage: of ZeRO.
        accumulation: microbatches of an update.
        block: the first one of ours.
    """

    def __init__(self, stage: int, accumulation: int, block: dict[str, Any]) -> None:
        self.settings = config(stage, accumulation)
        self.reference = updates.reference_engine(_model(), self.settings)
        self.ours = updates.hilore_engine(_model(), self.settings, **block)
        # One engine of ZeRO-3 replaces it for the whole process: both sides are to have the same.
        self._linear = nn.functional.linear

    def close(self) -> None:
        ds_hilore.detach(self.ours)
        for engine in (self.ours, self.reference):
            engine.destroy()

    def loss(self, engine: Any, forward: Forward) -> Tensor:
        """Of one forward; the same random numbers at every call."""
        torch.manual_seed(forward.seed)
        return plain_loss(engine, *batch(forward.seed, forward.rows, forward.tokens))

    def sampled(self, engine: Any, forward: Forward, evaluating: bool) -> Tensor:
        """Logits without grad, in training or eval mode."""
        engine.train(not evaluating)
        torch.manual_seed(forward.seed)
        with torch.no_grad():
            found: Tensor = engine(input_ids=batch(forward.seed, forward.rows, forward.tokens)[0]).logits
        engine.train()
        return found

    def compare_update(self, update: Sequence[Microbatch], losses: Sequence[Tensor]) -> list[str]:
        """The reference makes the same update; gradients are those before the step, which both make then.

        Returns:
            What differs in any bit: losses, gradients, weights.
        """
        made = self.reference
        unequal: list[str] = []
        for number, microbatch in enumerate(update):
            expected = sum(self.loss(made, forward) for forward in microbatch)
            assert isinstance(expected, Tensor)
            if not torch.equal(expected.detach(), losses[number]):
                unequal.append(f"loss {number}")
            made.backward(expected)
            if number + 1 < len(update):
                made.step()
        unequal += updates.unequal_bits(gradients(self.ours), gradients(made))
        for engine in (self.ours, made):
            engine.step()
        return unequal + self.unequal_state(moments=True)

    def unequal_state(self, moments: bool) -> list[str]:
        """Names of trained parameters, and of moments of their optimizer, that differ in any bit.

        Args:
            moments: DeepSpeed links those of ZeRO-1 and 2 to parameters in the first step of an engine, not when they
                are loaded.
        """
        return updates.unequal_bits(state_of(self.ours, moments), state_of(self.reference, moments))

    def attach_anew(self, block: dict[str, Any]) -> None:
        """The same engine goes on under another block."""
        ds_hilore.detach(self.ours)
        made = HiLoReConfig.from_ds_json({"hilore": updates.quiet_block(**block)})
        assert made is not None
        attach(self.ours, made, self.settings)

    def resume(self, block: dict[str, Any]) -> None:
        """A new engine of another block takes up a checkpoint of the old one."""
        folder = tempfile.mkdtemp(prefix="stateful-")
        try:
            self.ours.save_checkpoint(folder, tag="one")
            ds_hilore.detach(self.ours)
            self.ours.destroy()
            self.ours = updates.hilore_engine(_model(seed=7), self.settings, **block)
            self.ours.load_checkpoint(folder, tag="one")
        finally:
            shutil.rmtree(folder)


def _model(seed: int = 0) -> nn.Module:
    return lora(llama(LAYERS), seed=1 + seed, lora_dropout=0.1)


MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(engine: Any, moments: bool = True) -> dict[str, Tensor]:
    """Trained parameters in full precision, and moments of the optimizer (zeros before its first step)."""
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = value = _whole(engine, parameter)
            for key in MOMENTS if moments else ():
                moment = _moment(engine, parameter, key)
                found[f"{name}: {key}"] = torch.zeros_like(value) if moment is None else moment
    return found


def _whole(engine: Any, parameter: nn.Parameter) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    found: Tensor = safe_get_full_fp32_param(parameter) if engine.zero_optimization_stage() else parameter.detach()
    return found.clone()


def _moment(engine: Any, parameter: nn.Parameter, key: str) -> Tensor | None:
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.global_steps == 0:
        return None
    if engine.zero_optimization_stage():
        found: Tensor | None = safe_get_full_optimizer_state(parameter, key)
    else:
        found = engine.optimizer.state[parameter].get(key)
    return None if found is None else found.clone()


@contextmanager
def raising(module: nn.Module, in_backward: bool) -> Iterator[None]:
    """Inside, the module raises: in its forward, or when the gradient of its output has been computed."""

    def fail(*_: Any) -> None:
        raise Planted

    def fail_later(_module: nn.Module, _args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(fail)

    hook: Callable[..., None] = fail_later if in_backward else fail
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
