"""Two ranks with opposite plans: NCCL where there are two GPUs, else two gloo processes on one; on the CPU by gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ranks import RankPool

HERE = "tests.gpu.test_two_ranks"


def compared(stage: int, dtype: str) -> dict[str, Any]:
    """Updates of DeepSpeed alone and of ours: rank 0 stores what rank 1 replays, the reverse, then planned ones."""
    import torch.distributed as dist

    if torch.cuda.is_available() and torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"  # both ranks on the one device
    from ds_hilore.core.types import Action
    from tests.engines import config, gradients
    from tests.integration.updates import hilore_engine, reference_engine, unequal_bits
    from tests.models import batch, llama, lora, plain_loss

    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    rank = dist.get_rank()
    settings = config(stage) | {"bf16": {"enabled": dtype == "bfloat16"}}

    def update(made: Any, number: int) -> Any:
        seed = 10 * number + rank
        torch.manual_seed(seed)
        made.backward(plain_loss(made, *batch(seed, device=made.device)))
        found = gradients(made)
        made.step()
        return found

    built = [lora(llama(), lora_dropout=0.1).to(getattr(torch, dtype)) for _ in range(2)]
    plain, ours = reference_engine(built[0], settings), hilore_engine(built[1], settings, memory_budget="1.5x")
    unequal: list[str] = []
    for number in range(2):
        ours.hilore.force(Action.STORE if rank == number else Action.RECOMPUTE)
        expected = update(plain, number)
        unequal += unequal_bits(update(ours, number), expected)
    ours.hilore.force(None)
    for number in range(2, 7):  # measuring, then following plans
        expected = update(plain, number)
        unequal += unequal_bits(update(ours, number), expected)
    return {"device": str(ours.device), "unequal": unequal, "stage": ours.hilore.stage.value}


@pytest.fixture(scope="module")
def cpu_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def cuda_ranks() -> Iterator[RankPool]:
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(count)))
    env = {
        "DS_ACCELERATOR": "cuda",
        "CUDA_VISIBLE_DEVICES": visible,
        "RANKS_BACKEND": "nccl" if count > 1 else "gloo",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    with RankPool(2, env) as pool:
        yield pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_opposite_plans_give_deepspeeds_gradients(
    device: torch.device, stage: int, dtype: str, request: pytest.FixtureRequest
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() == 1 and stage > 0:
        pytest.skip("gloo has no collectives of ZeRO-2 and ZeRO-3 for CUDA tensors; needs two CUDA devices")
    ranks: RankPool = request.getfixturevalue(f"{device.type}_ranks")
    for seen in ranks.run(f"{HERE}:compared", stage=stage, dtype=dtype, timeout=240.0):
        assert seen["device"].startswith(device.type)
        assert seen["stage"] == "planned"
        assert seen["unequal"] == []
