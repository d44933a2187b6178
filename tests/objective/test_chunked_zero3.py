"""A head that ZeRO-3 has partitioned: real DeepSpeed, two ranks, updates against the plain head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.objective.chunked import LogitOptions, log_probs
from tests.ranks import RankPool

pytest.importorskip("deepspeed", reason="ZeRO-3 is DeepSpeed's")

VOCAB, WIDTH = 50, 16


class TinyModel(nn.Module):
    """Hidden states, or log-probabilities where `inside` names how the head is read in the engine's forward."""

    def __init__(self, inside: str | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.inside = inside

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(ids)))
        if self.inside == "plain":
            return self.head(hidden).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        if self.inside == "chunked":
            return log_probs(hidden, self.head, labels, options=LogitOptions(chunk_tokens=3))
        return hidden


def three_updates(how: str, frozen: bool) -> list[tuple[float, float]]:
    """Loss and norm of the head's reduced gradient (0 where frozen) of each update on this rank."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    torch.manual_seed(0)
    model = TinyModel(how if how in ("plain", "chunked") else None)
    model.head.weight.requires_grad_(not frozen)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        # Nothing stays gathered a moment longer than its module's own forward or backward.
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    generator = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
    gather = (lambda parameters: deepspeed.zero.GatheredParameters(list(parameters))) if how == "gather" else None
    options, seen = LogitOptions(chunk_tokens=3, gather=gather), []
    for _ in range(3):
        ids, labels = (torch.randint(VOCAB, (2, 7), generator=generator) for _ in range(2))
        output = engine(ids, labels)
        assert model.head.weight.numel() == 0, "the head is not partitioned: this test would prove nothing"
        if output.dim() == 3:
            both = log_probs(output, model.head, labels, with_entropy=how == "entropy", options=options)
            output = both[0] if isinstance(both, tuple) else both
        loss = -output.mean()
        engine.backward(loss)
        norm = 0.0 if frozen else safe_get_full_grad(model.head.weight).norm().item()
        engine.step()
        seen.append((loss.item(), norm))
    engine.destroy()
    return seen


@pytest.mark.parametrize(
    ("how", "frozen"),
    [("chunked", False), ("after", False), ("entropy", False), ("chunked", True), ("after", True), ("gather", True)],
)
def test_updates_are_those_of_the_plain_head(ranks: RankPool, how: str, frozen: bool) -> None:
    """Inside the engine's forward and after it, by the head's own hooks; by `gather` where the head is frozen."""
    body = "tests.objective.test_chunked_zero3:three_updates"
    expected = ranks.run(body, how="plain", frozen=frozen)
    found = ranks.run(body, how=how, frozen=frozen)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=5e-6)
    first, second = expected
    assert first != second, "both ranks saw the same data"
