"""The exact gradient beside the engine: right, and without any effect on the engine (design fact 5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hilore.core.errors import UsageError
from ds_hilore.integration.exact_gradient import exact_gradients
from tests.engines import checkpointed, config, difference, engine, exact, gradients
from tests.models import batch, decoder_layers, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_exact_gradient"


def _updates(stage: int, adapters: bool, units: bool, checkpoint: bool, beside: bool) -> tuple[list[Any], list[Any]]:
    """Three updates of two microbatches; reduced gradients of the engine, and beside it for the same microbatches."""
    model = lora(llama()) if adapters else llama()
    layers = decoder_layers(model) if units else None
    made = engine(checkpointed(model) if checkpoint else model, config(stage, accumulation=2), layers)
    of_engine, beside_engine = [], []
    for update in range(3):
        microbatches = [batch(seed=100 * dist.get_rank() + 10 * update + k) for k in range(2)]
        parts = []
        for microbatch in microbatches:
            if beside:
                parts.append(exact_gradients(made, lambda module, b=microbatch: plain_loss(module, *b), reduce=True))
            made.backward(plain_loss(made, *microbatch))
            if made.is_gradient_accumulation_boundary():
                of_engine.append(gradients(made))
            made.step()
        if beside:
            beside_engine.append({name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]})
    return of_engine, beside_engine


def compared(**case: Any) -> dict[str, Any]:
    undisturbed, _ = _updates(beside=False, **case)
    disturbed, beside = _updates(beside=True, **case)
    return {
        "engine unchanged": all(
            torch.equal(a[name], b[name]) for a, b in zip(undisturbed, disturbed, strict=True) for name in a
        ),
        "error": max(difference(a, b) for a, b in zip(beside, disturbed, strict=True)),
        "norm": min(float(g.norm()) for gradient in disturbed for g in gradient.values()),
    }


def local_and_chosen() -> dict[str, Any]:
    """Unreduced gradients of chosen parameters under ZeRO-3, one of which the loss does not use."""
    model, oracle = llama(), llama()
    made = engine(model, config(3), decoder_layers(model))
    microbatch = batch(seed=dist.get_rank())
    names = ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]

    def loss(module: Any) -> torch.Tensor:
        return module.model(input_ids=microbatch[0]).last_hidden_state.square().mean()

    found = exact_gradients(made, loss, parameters=names)
    (expected,) = torch.autograd.grad(loss(oracle), [dict(oracle.named_parameters())[names[0]]])
    errors = []
    for function, arguments in ((loss, {"parameters": ["nonsense"]}), (lambda _m: torch.ones(2), {})):
        try:
            exact_gradients(made, function, **arguments)
        except UsageError as error:
            errors.append(str(error))
    reduced = exact_gradients(made, lambda module: plain_loss(module, *microbatch), reduce=True)
    return {
        "names": list(found),
        "error": float((found[names[0]] - expected).norm() / expected.norm()),
        "unused": (tuple(found[names[1]].shape), float(found[names[1]].abs().max())),
        "errors": errors,
        "reduced": difference(reduced, exact(oracle, [plain_loss(oracle, *microbatch)])),
    }


CASES = [
    *[{"stage": s, "adapters": a, "units": False, "checkpoint": False} for s in (0, 2) for a in (True, False)],
    {"stage": 1, "adapters": True, "units": False, "checkpoint": True},
    {"stage": 3, "adapters": True, "units": False, "checkpoint": False},
    *[{"stage": 3, "adapters": a, "units": True, "checkpoint": c} for a in (True, False) for c in (True, False)],
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_right_and_without_effect(ranks: RankPool, case: dict[str, Any]) -> None:
    for seen in ranks.run(f"{HERE}:compared", **case):
        assert seen["engine unchanged"]
        assert seen["error"] < 1e-6
        assert seen["norm"] > 0


def test_local_gradients_of_chosen_parameters(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:local_and_chosen"):
        assert seen["names"] == ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
        assert seen["error"] < 1e-6
        assert seen["unused"] == ((512, 64), 0.0)
        assert "not trainable parameters" in seen["errors"][0] and "scalar" in seen["errors"][1]
        assert seen["reduced"] < 1e-6
