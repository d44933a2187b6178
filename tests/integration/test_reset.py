"""An exception anywhere in an update, `reset_update`, the whole update again: as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hilore.integration.reset import reset_update
from ds_hilore.integration.zero3 import gathered_numel
from tests.engines import checkpointed, config, engine, gradients
from tests.models import batch, decoder_layers, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_reset"
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu"}}


class Broken(Exception):
    """What the fault raises."""


class Fault:
    """Raises inside a layer's MLP in one chosen forward call, or in the backward of that call."""

    def __init__(self, layer: nn.Module) -> None:
        self.where = ""
        self.raised = 0
        layer.mlp.act_fn.register_forward_hook(self._after_forward)  # type: ignore[union-attr]

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if self.where == "forward":
            self._raise()
        if output.requires_grad:
            output.register_hook(self._in_backward)

    def _in_backward(self, _gradient: torch.Tensor) -> None:
        if self.where == "backward":
            self._raise()

    def _raise(self) -> None:
        self.raised += 1
        raise Broken


def _update(made: Any, number: int, fault: Fault | None = None, where: str = "", at: int = -1) -> dict[str, Any]:
    """One update; `where` the fault strikes in microbatch `at`."""
    found = {}
    for k in range(made.gradient_accumulation_steps()):
        if fault is not None:
            fault.where = where if k == at else ""
        made.backward(plain_loss(made, *batch(seed=100 * dist.get_rank() + 10 * number + k)))
        if made.is_gradient_accumulation_boundary():
            found = gradients(made)
        made.step()
    return found


def again(
    stage: int,
    at: int = 1,
    broken_updates: tuple[int, ...] = (0, 2),
    adapters: bool = True,
    checkpoint: bool = False,
    units: bool = False,
    accumulation: int = 3,
    **zero: Any,
) -> dict[str, Any]:
    """Three updates; some are broken off in forward, reset, broken off in backward, reset, and then done. Compared with
    an engine that never failed."""

    def build() -> tuple[Any, Fault]:
        model = lora(llama(layers=2)) if adapters else llama(layers=2)
        layers = decoder_layers(model)
        fault = Fault(layers[0])
        if checkpoint:
            checkpointed(model)
        return engine(model, config(stage, accumulation, **zero), layers if units else None), fault

    reference = build()[0]
    made, fault = build()
    worst, bitwise, gathered = 0.0, True, 0
    for number in range(3):
        expected = _update(reference, number)
        for where in ("forward", "backward") if number in broken_updates else ():
            try:
                _update(made, number, fault, where, at)
            except Broken:
                reset_update(made)
                gathered = max(gathered, gathered_numel(made) if stage == 3 else 0)
            fault.where = ""
        found = _update(made, number)
        assert made.global_steps == number + 1
        for name, value in expected.items():
            bitwise = bitwise and torch.equal(value, found[name])
            worst = max(worst, float((value - found[name]).norm() / (value.norm() + 1e-12)))
    return {"error": worst, "bitwise": bitwise, "raised": fault.raised, "gathered": gathered}


def idle() -> dict[str, Any]:
    """Without a failure before it, a reset changes nothing but what it says."""
    from deepspeed.runtime.zero import parameter_offload

    one, two = llama(), llama()
    made, reference = engine(one, config(3), decoder_layers(one)), engine(two, config(3), decoder_layers(two))
    same = True
    for number in range(3):
        reset_update(made)
        expected, found = _update(reference, number), _update(made, number)
        same = same and all(torch.equal(value, found[name]) for name, value in expected.items())
    stack = parameter_offload.FWD_MODULE_STACK
    return {"same": same, "roots": [sum(m is root for m in stack) for root in (made.module, reference.module)]}


STAGES = [
    pytest.param({"stage": 0}, id="zero0"),
    pytest.param({"stage": 1}, id="zero1"),
    pytest.param({"stage": 1, **OFFLOAD}, id="zero1-offload"),
    pytest.param({"stage": 2, "reduce_bucket_size": 5_000}, id="zero2"),
    pytest.param({"stage": 2, "adapters": False, "checkpoint": True, "overlap_comm": True}, id="zero2-full-overlap"),
    pytest.param({"stage": 2, **OFFLOAD}, id="zero2-offload"),
    pytest.param({"stage": 2, "contiguous_gradients": False}, id="zero2-not contiguous"),
    pytest.param({"stage": 3}, id="zero3"),
    pytest.param({"stage": 3, "checkpoint": True, "stage3_param_persistence_threshold": 300}, id="zero3-checkpointing"),
    pytest.param({"stage": 3, "units": True, "reduce_bucket_size": 5_000}, id="zero3-units"),
    pytest.param({"stage": 3, "units": True, "checkpoint": True, "adapters": False}, id="zero3-units-full"),
    pytest.param({"stage": 3, "units": True, "checkpoint": True, **OFFLOAD_ALL}, id="zero3-units-offload"),
]


@pytest.mark.parametrize("case", STAGES)
def test_update_again_after_exceptions(ranks: RankPool, case: dict[str, Any]) -> None:
    """Microbatch 1 of 3 fails in updates 0 and 2."""
    for seen in ranks.run(f"{HERE}:again", **case):
        assert seen["raised"] == 4
        assert seen["error"] <= 1e-6
        assert seen["bitwise"]
        assert seen["gathered"] == 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_without_accumulation(ranks: RankPool, stage: int) -> None:
    """The very first forward fails too: there ZeRO-3 records its trace."""
    case: dict[str, Any] = {"at": 0, "broken_updates": (0, 1), "accumulation": 1, "stage": stage, "units": stage == 3}
    for seen in ranks.run(f"{HERE}:again", **case):
        assert seen["raised"] == 4 and seen["bitwise"]


def test_reset_without_failure(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:idle"):
        assert seen == {"same": True, "roots": [1, 1]}
