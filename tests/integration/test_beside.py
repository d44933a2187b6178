"""A microbatch run again beside the engine has the engine's own gradient, whatever the outputs and their loss are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hilore.core.treatment import REPLAYED, STORED
from ds_hilore.core.types import UnitId
from ds_hilore.integration.beside import gradients_of, recording
from ds_hilore.integration.checkpoint import ModelParallelRng
from ds_hilore.integration.exact_gradient import averaged
from ds_hilore.integration.gradient_scale import loss_scale
from tests.engines import config, difference, gradients
from tests.integration import updates
from tests.models import batch, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_beside"


def labelled(model: Any, ids: Tensor, advantages: Tensor) -> Tensor:
    """Both outputs are used, and one is computed from the other."""
    output = model(input_ids=ids, labels=ids, use_cache=False)
    return output.loss + (output.logits.log_softmax(-1)[..., 0] * advantages).mean()


def written(model: Any, ids: Tensor, advantages: Tensor) -> Tensor:
    """The caller writes into an output in place, as losses do that divide logits by a temperature."""
    output = model(input_ids=ids, labels=ids, use_cache=False)
    return output.loss + (output.logits.div_(0.7).log_softmax(-1)[..., 0] * advantages).mean()


LOSSES = {"plain": plain_loss, "labelled": labelled, "written": written}


def again(stage: int, loss: str, accumulation: int = 1, **how: Any) -> dict[str, Any]:
    """The reduced gradient of an update, and that of the same microbatches beside the engine, under two plans."""
    model = lora(llama(layers=2), lora_dropout=0.1)
    if how.get("tracked"):
        model.get_base_model().model.norm.register_forward_hook(noisy)
    engine = updates.hilore_engine(model, config(stage, accumulation))
    if how.get("divides"):  # as 0.18 does in every backward
        engine.__dict__["_backward_prologue_per_tensor"] = lambda gradient: gradient / accumulation
    if how.get("scaled"):
        engine.optimizer.override_loss_scale(256.0)
    taken = []
    for k in range(accumulation):
        seed = 10 * dist.get_rank() + k
        torch.manual_seed(seed)
        tracker = ModelParallelRng.if_used()

        def recorded(tracker: Any = tracker, **inputs: Any) -> Any:
            with recording(engine, tracker) as made:
                result = engine(**inputs)
            taken.extend(made.taken)
            left = made.leaving(result)
            assert type(left) is type(result) and torch.equal(left.logits, result.logits)
            return left

        engine.backward(LOSSES[loss](recorded, *batch(seed)), scale_wrt_gas=not how.get("divides"))
        if k < accumulation - 1:
            engine.step()
    truth = {name: found / loss_scale(engine) for name, found in gradients(engine).items()}
    units, found = [UnitId(path) for path in updates.units_of(engine)], {}
    for treatment in (REPLAYED, STORED):
        passes = [gradients_of(engine, engine.hilore, each, dict.fromkeys(units, treatment)) for each in taken]
        sums = averaged(engine, {name: sum(each[name] for each in passes) for name in passes[0]})
        found[treatment.name] = difference(sums, truth), updates.unequal_bits(truth, sums)
    engine.step()
    return found


def noisy(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Draws from the model-parallel random stream, which is not among torch's own."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    drawn = torch.Generator().set_state(states.setdefault("hilore-test", torch.Generator().manual_seed(3).get_state()))
    noise = torch.rand(output.shape, generator=drawn)
    tracker.set_states(states | {"hilore-test": drawn.get_state()})
    return output * noise


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_microbatch_beside_the_engine_has_the_engine_s_gradient(ranks: RankPool, stage: int) -> None:
    for found in ranks.run(f"{HERE}:again", stage=stage, loss="plain"):
        assert found == {"R": (0.0, []), "H": (0.0, [])}


@pytest.mark.parametrize(
    "case",
    [
        {"stage": 0, "loss": "labelled"},
        {"stage": 2, "loss": "labelled", "accumulation": 2},
        {"stage": 3, "loss": "labelled", "accumulation": 2},
        {"stage": 2, "loss": "written"},
        {"stage": 2, "loss": "labelled", "accumulation": 2, "divides": True},
        {"stage": 3, "loss": "plain", "accumulation": 2, "divides": True},
        {"stage": 2, "loss": "labelled", "accumulation": 2, "scaled": True},
        {"stage": 3, "loss": "labelled", "scaled": True},
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_whatever_its_outputs_are(ranks: RankPool, case: dict[str, Any]) -> None:
    for found in ranks.run(f"{HERE}:again", **case):
        assert max(error for error, _ in found.values()) < 1e-6


def again_tracked() -> dict[str, Any]:
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states(before | {"hilore-test": torch.Generator().manual_seed(3).get_state()})
    try:
        return again(stage=2, loss="plain", accumulation=2, tracked=True)
    finally:
        tracker.set_states(before)


def test_model_parallel_randomness_is_that_of_the_forward(ranks: RankPool) -> None:
    for found in ranks.run(f"{HERE}:again_tracked"):
        assert max(error for error, _ in found.values()) < 1e-6
